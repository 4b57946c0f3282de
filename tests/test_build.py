"""Building the native operator: the cache is private and checked, builds do not disturb each other, errors help."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aah_hf import OperatorError
from aah_hf.ops import build, library, native, recipes, toolchain
from aah_hf.ops.recipes import Recipe, Unit
from aah_hf.ops.toolchain import NativeBuildError

needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("AAH_HF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "aah_hf"


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    """A library of one small file."""
    root = tmp_path / "sources"
    (root / "include").mkdir(parents=True)
    (root / "include" / "answer.h").write_text("#define ANSWER 42\n")
    (root / "cpu").mkdir()
    (root / "cpu" / "a.cpp").write_text('#include "../include/answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    return Recipe(root, (Unit("cpu/a.cpp"),), ("-O0", "-fPIC"))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@needs_compiler
def test_second_build_is_a_look_into_the_cache(cache, recipe):
    steps = []
    built = build.build(recipe=recipe, progress=lambda *step: steps.append(step))
    assert [label.split()[0] for _, _, label in steps] == ["compiling", "linking", "built"]
    assert steps[-1][0] == steps[-1][1] == 2
    assert library.find_cached(recipe) == built
    library.verify(built)
    steps.clear()
    assert build.build(recipe=recipe, progress=lambda *step: steps.append(step)) == built and not steps
    assert build.build(recipe=recipe, force=True) == built


@needs_compiler
def test_folders_belong_to_the_user_alone(cache, recipe):
    old = os.umask(0)  # the most careless one
    try:
        built = build.build(recipe=recipe)
    finally:
        os.umask(old)
    for folder in (cache, cache / "native", built.parent):
        assert mode_of(folder) == 0o700 and folder.stat().st_uid == os.getuid()
    assert [p for p in (cache / "native").iterdir() if p.name.startswith(".")] == []


@needs_compiler
@pytest.mark.parametrize("what", ["include/answer.h", "cpu/a.cpp"])
def test_changed_sources_are_another_library(cache, recipe, what):
    first = build.build(recipe=recipe)
    (recipe.root / what).write_text((recipe.root / what).read_text() + "// changed\n")
    assert library.find_cached(recipe) is None
    assert build.build(recipe=recipe) != first


@needs_compiler
def test_flags_and_compiler_are_part_of_the_key(cache, recipe, monkeypatch):
    first = build.build(recipe=recipe)
    other = Recipe(recipe.root, recipe.units, (*recipe.flags, "-DMORE"))
    assert library.find_cached(other) is None
    command = toolchain.find_compiler().command
    monkeypatch.setattr(toolchain, "find_compiler", lambda: toolchain.Compiler(command, "another version"))
    assert library.find_cached(recipe) is None
    assert build.build(recipe=recipe) != first


@needs_compiler
def test_without_a_compiler_an_earlier_build_still_serves(cache, recipe, monkeypatch):
    built = build.build(recipe=recipe)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    assert library.find_cached(recipe) == built
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler|CXX"):
        build.build(recipe=recipe, force=True)


@needs_compiler
@pytest.mark.parametrize("damage", ["changed", "truncated", "record", "link"])
def test_a_library_that_is_not_the_one_built_is_not_loaded(cache, recipe, damage, tmp_path):
    built = build.build(recipe=recipe)
    content = bytearray(built.read_bytes())
    if damage == "changed":
        content[len(content) // 2] ^= 1
        built.write_bytes(content)
    elif damage == "truncated":
        built.write_bytes(content[:-1])
    elif damage == "record":
        (built.parent / library.MANIFEST).unlink()
    else:
        (tmp_path / "elsewhere.so").write_bytes(content)
        built.unlink()
        built.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(NativeBuildError, match="aah build --force"):
        library.verify(built)
    library.verify(build.build(recipe=recipe))  # building repairs it, without being forced


@needs_compiler
def test_native_refuses_a_tampered_library(cache, recipe, monkeypatch):
    built = build.build(recipe=recipe)
    built.write_bytes(built.read_bytes() + b"!")
    monkeypatch.setattr(recipes, "default_recipe", lambda: recipe)
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setattr(native, "WHEEL_FOLDER", cache / "no wheel")
    monkeypatch.delenv("AAH_HF_NATIVE", raising=False)
    found = native.status(build_now=True)
    assert not found.available and "hash has changed" in found.reason


@needs_compiler
def test_a_folder_of_somebody_else_is_refused(cache, recipe, monkeypatch):
    build.build(recipe=recipe)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with pytest.raises(NativeBuildError, match="belongs to user"):
        library.find_cached(recipe)


@needs_compiler
def test_a_folder_that_others_can_write_is_refused(cache, recipe):
    build.build(recipe=recipe)
    (cache / "native").chmod(0o770)
    for attempt in (library.find_cached, lambda r: build.build(recipe=r)):
        with pytest.raises(NativeBuildError, match="can be written by others"):
            attempt(recipe)
    (cache / "native").chmod(0o755)
    assert library.find_cached(recipe) and mode_of(cache / "native") == 0o700


def test_a_parent_that_everybody_can_write_is_refused(cache, recipe):
    cache.parent.mkdir()
    cache.parent.chmod(0o777)
    with pytest.raises(NativeBuildError, match="everybody can write"):
        build.build(recipe=recipe)
    cache.parent.chmod(0o1777)  # sticky, like /tmp: others cannot replace what is ours
    if toolchain.find_compiler() is not None:
        build.build(recipe=recipe)


def test_a_link_in_place_of_the_folder_is_refused(cache, recipe, tmp_path):
    (tmp_path / "target").mkdir()
    cache.mkdir(parents=True, mode=0o700)
    (cache / "native").symlink_to(tmp_path / "target")
    with pytest.raises(NativeBuildError, match="not a folder"):
        build.build(recipe=recipe)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("AAH_HF_CACHE", str(tmp_path / "mine"))
    assert library.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("AAH_HF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library.cache_folder() == tmp_path / "xdg" / "aah_hf"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says: ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / ".cache" / "aah_hf"


@needs_compiler
def test_a_compiler_error_is_shown_whole_with_one_line_of_advice(cache, recipe):
    (recipe.root / "cpu" / "a.cpp").write_text("int f() { return this_is_missing; }\n" * 3)
    with pytest.raises(NativeBuildError) as caught:
        build.build(recipe=recipe)
    text = str(caught.value)
    assert text.count("this_is_missing") >= 3 and "-O0" in text
    assert len([line for line in text.splitlines() if line.startswith("Advice: ")]) == 1
    assert library.find_cached(recipe) is None
    assert [p.suffix for p in (cache / "native").iterdir()] == [".lock"]


@needs_compiler
def test_advice_fits_the_error(cache, recipe):
    (recipe.root / "cpu" / "a.cpp").write_text("#include <torch/csrc/stable/library.h>\n")
    with pytest.raises(NativeBuildError, match="Advice: this torch has no headers of the stable ABI"):
        build.build(recipe=recipe)


def test_no_compiler(cache, recipe, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler.*apt install g\+\+.*pure PyTorch"):
        build.build(recipe=recipe)
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(NativeBuildError, match="CXX is 'no-such-compiler -m64'"):
        build.build(recipe=recipe)


def test_without_a_compiler_the_operator_says_so_once_and_is_absent(cache, recipe, monkeypatch, caplog):
    monkeypatch.setattr(recipes, "default_recipe", lambda: recipe)
    monkeypatch.setattr(toolchain, "find_compiler", lambda: None)
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setattr(native, "WHEEL_FOLDER", cache / "no wheel")
    monkeypatch.setenv("AAH_HF_NATIVE", "1")
    with caplog.at_level("WARNING", "aah_hf"):
        assert not native.available() and not native.available()
    assert len(caplog.records) == 1 and "pure PyTorch" in caplog.text and "compiler" in native.status().reason
    monkeypatch.setenv("AAH_HF_NATIVE", "require")
    with pytest.raises(OperatorError, match=r"AAH_HF_NATIVE=require.*compiler"):
        native.available()


def test_switched_off(monkeypatch, cache):
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setenv("AAH_HF_NATIVE", "0")
    assert not native.available() and native.status().reason == "AAH_HF_NATIVE=0"
    monkeypatch.setenv("AAH_HF_NATIVE", "maybe")
    with pytest.raises(OperatorError, match=r"expected 1.*0.*require"):
        native.available()


@needs_compiler
def test_first_use_builds_with_a_visible_note(cache, recipe, monkeypatch, caplog):
    monkeypatch.setattr(recipes, "default_recipe", lambda: recipe)
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setattr(native, "WHEEL_FOLDER", cache / "no wheel")
    monkeypatch.setattr(native, "_open", lambda path: {"isa": "some isa", "cuda": None})
    monkeypatch.delenv("AAH_HF_NATIVE", raising=False)
    assert "not built yet" in native.status().reason  # asking does not build
    with caplog.at_level("WARNING", "aah_hf"):
        assert native.available()
    assert "compiling" in caplog.text and str(cache) in caplog.text
    found = native.status()
    assert (found.source, found.isa) == ("cache", "some isa") and found.path.startswith(str(cache))


@needs_compiler
def test_wheel_library_comes_first_unless_it_is_of_other_sources(cache, recipe, monkeypatch, tmp_path):
    wheel = tmp_path / "_lib"
    assert build.build(recipe=recipe, out=wheel) == wheel / library.LIBRARY
    assert sorted(p.name for p in wheel.iterdir()) == sorted([library.LIBRARY, library.MANIFEST])
    monkeypatch.setattr(recipes, "default_recipe", lambda: recipe)
    monkeypatch.setattr(native, "WHEEL_FOLDER", wheel)
    monkeypatch.setattr(native, "_open", lambda path: {"isa": "some isa", "cuda": None})
    monkeypatch.setattr(native, "_status", None)
    assert native.status().source == "wheel"
    (recipe.root / "include" / "answer.h").write_text("#define ANSWER 43\n")
    monkeypatch.setattr(native, "_status", None)
    assert native.status().source is None


@needs_compiler
def test_two_builders_at_once_compile_once(cache, recipe):
    slow_compiler(recipe)
    steps, results = [], []

    def work():
        results.append(build.build(recipe=recipe, progress=lambda *step: steps.append(step[2])))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(results)) == 1 and len(results) == 3
    assert len([label for label in steps if label.startswith("compiling")]) == 1
    library.verify(results[0])


def slow_compiler(recipe: Recipe) -> None:
    """A compiler takes its time over a deep template."""
    (recipe.root / "cpu" / "a.cpp").write_text(
        "template <int N, int M> struct S { static constexpr long v = S<N - 1, M>::v + S<N - 1, M + (1 << N)>::v; };\n"
        "template <int M> struct S<0, M> { static constexpr long v = M; };\n"
        'extern "C" long answer() { return S<14, 0>::v; }\n'
    )


@needs_compiler
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_that_counts(cache, recipe, how):
    slow_compiler(recipe)
    code = (
        "import sys, types; from pathlib import Path\n"
        "for name, folder in (('aah_hf', '.'), ('aah_hf.ops', 'ops')):\n"  # build.py alone, without importing torch
        "    sys.modules[name] = types.ModuleType(name)\n"
        f"    sys.modules[name].__path__ = [str(Path({str(recipes.CSRC.parent)!r}) / folder)]\n"
        "from aah_hf.ops.build import *\nfrom aah_hf.ops.recipes import *\n"
        f"build(recipe=Recipe(Path({str(recipe.root)!r}), (Unit('cpu/a.cpp'),), {recipe.flags!r}), "
        "progress=lambda *step: print(step, flush=True))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()  # it compiles now
    time.sleep(0.1)
    process.send_signal(how)
    process.communicate()
    assert process.returncode != 0
    assert library.find_cached(recipe) is None
    left = [p for p in (cache / "native").iterdir() if p.suffix != ".lock"]
    assert bool(left) == (how == signal.SIGKILL)
    library.verify(build.build(recipe=recipe))  # the lock is free
    assert not [p for p in (cache / "native").iterdir() if p.name.startswith(".")]  # and leftovers are swept


def test_a_record_that_is_not_one_is_no_record(tmp_path):
    (tmp_path / library.LIBRARY).write_bytes(b"x")
    for content in ("", "[]", json.dumps({"sha256": 3}), "{"):
        (tmp_path / library.MANIFEST).write_text(content)
        with pytest.raises(NativeBuildError, match="no record"):
            library.verify(tmp_path / library.LIBRARY)


def test_jobs_must_be_a_number(monkeypatch):
    monkeypatch.setenv("AAH_HF_BUILD_JOBS", "many")
    with pytest.raises(NativeBuildError, match="AAH_HF_BUILD_JOBS"):
        build._jobs()


def test_fingerprint_knows_every_source_of_the_operator():
    sources = {p.relative_to(recipes.CSRC).parts[0] for p in recipes.CSRC.rglob("*.cpp")}
    assert {"cpu", "torch"} <= sources
    recipe = recipes.default_recipe()
    for unit in recipe.units:
        assert (recipes.CSRC / unit.source).is_file()
    assert recipe.fingerprint() == recipes.default_recipe().fingerprint()
