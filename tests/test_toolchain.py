"""Choosing compilers and GPUs, and libraries with a CUDA part in the cache; nvcc is a small script here."""

from __future__ import annotations

import os
import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aah_hf import OperatorError
from aah_hf.ops import attention, build, gpu, library, native, recipes, toolchain
from aah_hf.ops.recipes import CudaPart, Recipe, Unit
from aah_hf.ops.toolchain import NativeBuildError, Nvcc

needs_compiler = pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C++ compiler")

NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88";;
  *--list-gpu-code*) printf 'sm_75\\nsm_80\\nsm_90\\nsm_120\\n';;
  *-dryrun*) echo '#$ TOP={top}/bin/..' >&2; echo '#$ INCLUDES="-I{top}/bin/../include"  ' >&2
             echo '#$ LIBRARIES=  "-L{top}/bin/../lib/stubs" "-L{top}/bin/../lib"' >&2;;
  *) echo "ptxas info : none"; while [ "$1" != -c ]; do shift; done; exec g++ -fPIC -x c++ "$@";;
esac
"""


def toolkit(root: Path) -> Path:
    """A CUDA toolkit whose nvcc calls g++."""
    for folder in ("bin", "include", "lib"):
        (root / folder).mkdir(parents=True)
    (root / "include" / "cuda_runtime_api.h").write_text("")
    (root / "lib" / "libcudart_static.a").write_bytes(b"!<arch>\n")
    program = root / "bin" / "nvcc"
    program.write_text(NVCC.replace("{top}", str(root)))
    program.chmod(0o755)
    return root


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No nvcc of this machine's."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvcc" else which(name))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda p: not str(p).startswith("/usr/local/cuda") and is_file(p))


def test_nvcc_of_a_toolkit(nowhere, monkeypatch, tmp_path):
    assert toolchain.find_nvcc() is None
    root = toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(root))
    found = toolchain.find_nvcc()
    assert found is not None and found.command == str(root / "bin" / "nvcc") and found.version == "13.0.88"
    assert found.knows == {"75", "80", "90", "120"}
    assert found.include == (str(root / "include"),) and found.lib == str(root / "lib")


def test_nvcc_of_pypi_packages(nowhere, monkeypatch, tmp_path):
    root = toolkit(tmp_path / "nvidia" / "cu13")
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    found = toolchain.find_nvcc()
    assert found is not None and found.command == str(root / "bin" / "nvcc") and found.lib == str(root / "lib")


def test_an_nvcc_that_does_not_run_is_passed_over(nowhere, monkeypatch, tmp_path):
    root = toolkit(tmp_path / "broken")
    (root / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert toolchain.find_nvcc() is None
    with pytest.raises(NativeBuildError, match=r"no nvcc was found.*pip install nvidia-cuda-nvcc"):
        recipes.with_cuda(Recipe(tmp_path, (), ()))


SOME_NVCC = Nvcc("nvcc", "13.0.88", frozenset({"75", "80", "86", "90", "103", "120"}), (), None)


def test_targets():
    assert toolchain.cuda_targets(SOME_NVCC) == ("80", "86", "90", "120")  # all of ours that it knows
    assert toolchain.cuda_targets(SOME_NVCC, "90") == ("90",)
    assert toolchain.cuda_targets(SOME_NVCC, " 12.0, 9.0,sm_103,90") == ("90", "103", "120")
    for asked in ("", "hopper", "9", "75", "90,", "90;100"):
        with pytest.raises(NativeBuildError, match=r"expected compute capabilities from 80 on like 90 or 90,100"):
            toolchain.cuda_targets(SOME_NVCC, asked)
    with pytest.raises(NativeBuildError, match=r"no code for compute capability 100, but for 80, 86, 90, 103, 120"):
        toolchain.cuda_targets(SOME_NVCC, "100")
    with pytest.raises(NativeBuildError, match="knows none"):
        toolchain.cuda_targets(replace(SOME_NVCC, knows=frozenset({"75"})))


def test_native_asks_nvidia_smi_then_torch(monkeypatch):
    answers = {"nvidia-smi": "9.0\n9.0\n12.0\n", sys.executable: "80\n"}
    monkeypatch.setattr(toolchain, "_ask", lambda command: answers.get(command[0]))
    assert toolchain.cuda_targets(SOME_NVCC, "native") == ("90", "120")
    answers["nvidia-smi"] = "[N/A]\n"
    assert toolchain.cuda_targets(SOME_NVCC, "native") == ("80",)
    answers[sys.executable] = ""
    with pytest.raises(NativeBuildError, match=r"neither nvidia-smi nor torch sees one; name the compute capability"):
        toolchain.cuda_targets(SOME_NVCC, "native")


def test_host_compiler_of_nvcc():
    flags = toolchain.host_compiler_flags
    assert flags(toolchain.Compiler(("g++-13",), "")) == ["-ccbin", "g++-13"]
    assert flags(toolchain.Compiler(("ccache", "g++", "-m64"), "")) == ["-ccbin", "g++", "-Xcompiler=-m64"]


# --- libraries with a CUDA part ---------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path, monkeypatch) -> tuple[Recipe, Recipe]:
    """A small library for CPUs, and the same one with a CUDA part."""
    monkeypatch.setenv("AAH_HF_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "sources"
    for name, text in {
        "include/answer.h": "#define ANSWER 42\n",
        "cpu/a.cpp": '#include "../include/answer.h"\nextern "C" int answer() { return ANSWER; }\n',
        "cuda/b.cu": 'extern "C" int cuda_answer() { return 43; }\n',
        "device/c.cuh": "\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    plain = Recipe(root, (Unit("cpu/a.cpp"),), ("-O0", "-fPIC"))
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    part = CudaPart(nvcc, ("80", "90"), (Unit("cuda/b.cu"),), ("-O0",))
    return plain, replace(plain, cuda=part)


@needs_compiler
def test_the_library_that_was_asked_for_last_is_used(pair):
    plain, with_gpu = pair
    first = build.build(recipe=plain)
    second = build.build(recipe=with_gpu)
    os.utime(first, (1, 1))
    assert library.find_cached(plain) == second != first
    assert library.read_manifest(second)["cuda"] == {
        "sources": plain.cuda_sources(),
        "targets": ["80", "90"],
        "nvcc": "13.0.88",
    }
    os.utime(second, (1, 1))
    assert build.build(recipe=plain) == first  # no compilation: it is only asked for
    assert library.find_cached(plain) == first


@needs_compiler
def test_gpus_nvcc_and_device_code_are_part_of_the_key(pair):
    plain, with_gpu = pair
    compiler = toolchain.find_compiler()
    changed = [
        replace(with_gpu, cuda=replace(with_gpu.cuda, targets=("90",))),
        replace(with_gpu, cuda=replace(with_gpu.cuda, nvcc=replace(with_gpu.cuda.nvcc, version="14.0.1"))),
        replace(with_gpu, cuda=replace(with_gpu.cuda, flags=("-O1",))),
    ]
    assert len({library.key(r, compiler) for r in (plain, with_gpu, *changed)}) == 5
    before = library.key(with_gpu, compiler)
    (plain.root / "device" / "c.cuh").write_text("// changed\n")
    assert library.key(with_gpu, compiler) != before


@needs_compiler
def test_changed_device_code_leaves_the_cpu_library_good(pair):
    plain, with_gpu = pair
    cpu, gpu = build.build(recipe=plain), build.build(recipe=with_gpu)
    (plain.root / "device" / "c.cuh").write_text("// changed\n")
    os.utime(cpu, (1, 1))
    assert library.find_cached(plain) == cpu
    assert not library.built_from(plain, library.read_manifest(gpu))
    assert library.built_from(plain, library.read_manifest(cpu))


@needs_compiler
def test_the_log_has_every_command_and_what_it_said(pair):
    built = build.build(recipe=pair[1])
    log = built.with_name(library.LOG).read_text()
    assert log.count("$ ") == 3 and "ptxas info : none" in log and "b.cu" in log and "a.cpp" in log


@needs_compiler
def test_an_error_of_nvcc_comes_with_advice(pair):
    plain, with_gpu = pair
    (plain.root / "cuda" / "b.cu").write_text("#error unsupported GNU version! gcc versions later than 15 ...\n")
    with pytest.raises(NativeBuildError, match=r"Advice: this nvcc does not take this g\+\+.*aah build --no-cuda"):
        build.build(recipe=with_gpu)


@needs_compiler
def test_first_use_never_compiles_for_gpus(pair, monkeypatch):
    plain, _ = pair
    monkeypatch.setattr(recipes, "default_recipe", lambda: plain)
    monkeypatch.setattr(recipes, "with_cuda", lambda *a: pytest.fail("asked for CUDA"))
    monkeypatch.setattr(native, "WHEEL_FOLDER", plain.root / "no wheel")
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setattr(native, "_open", lambda path: {"isa": "some isa", "cuda": None})
    monkeypatch.delenv("AAH_HF_NATIVE", raising=False)
    assert native.available() and library.read_manifest(Path(native.status().path))["cuda"] is None


def test_the_operators_recipe_with_cuda(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    plain = recipes.default_recipe()
    with_gpu = recipes.with_cuda(plain, "90,120")
    assert with_gpu.fingerprint() == plain.fingerprint() and with_gpu.sources() == plain.sources()
    part = with_gpu.cuda
    assert part.targets == ("90", "120")
    assert [flag for flag in part.flags if "generate-code" in flag] == [
        "--generate-code=arch=compute_90,code=sm_90",
        "--generate-code=arch=compute_120,code=sm_120",
        "--generate-code=arch=compute_90,code=compute_90",
    ]
    found = {unit.source for unit in part.units}
    assert "torch/ops_cuda.cpp" in found and {u.source for u in part.units if u.is_cuda} == {
        p.relative_to(recipes.CSRC).as_posix() for p in recipes.CSRC.rglob("*.cu")
    }


# --- which operator runs on a GPU -------------------------------------------------------------------------------

FACTS = {"targets": "80,90", "runtime": 13000, "driver": 13010, "devices": 1}


@pytest.mark.parametrize(
    ("facts", "capability", "why"),
    [
        (FACTS, (9, 0), None),
        (FACTS, (12, 0), None),  # through PTX
        (FACTS, (8, 6), None),
        (FACTS, (7, 5), "compute capability 75.*built for 80 and newer"),
        (FACTS | {"targets": "90"}, (8, 9), "compute capability 89.*built for 90"),
        (FACTS | {"driver": 12080}, (9, 0), "driver is for CUDA 12.*built with CUDA 13; update"),
        (FACTS | {"runtime": 13020}, (9, 0), None),  # machine code needs the major version only
        (FACTS | {"runtime": 13020}, (12, 0), "no machine code for compute capability 120.*aah build --arch 120"),
        (FACTS | {"driver": 0}, (9, 0), "no NVIDIA driver"),
        (None, (9, 0), "built without code for GPUs; `aah build`"),
    ],
)
def test_which_gpus_run_the_kernel(facts, capability, why):
    found = gpu.refusal(facts, capability)
    assert found is None if why is None else re.search(why, found)


def gpu_tensor(heads: int, requires_grad: bool = False, dtype: torch.dtype = torch.bfloat16):
    """As much of a CUDA tensor as the choice of an operator looks at."""
    return types.SimpleNamespace(
        device=torch.device("cuda", 0), dtype=dtype, shape=(1, heads, 5, 64), requires_grad=requires_grad
    )


def choice(monkeypatch, missing: str | None, **kwargs) -> str | None:
    monkeypatch.setattr(gpu, "missing", lambda index: missing)
    q, k = gpu_tensor(4, **kwargs), gpu_tensor(2)
    return attention._not_native(q, k, k, 0, None, None, 0.0, None)


def test_gpu_tensors_go_to_the_kernel_where_there_is_one(monkeypatch):
    assert choice(monkeypatch, None) is None
    assert choice(monkeypatch, "why not") == "why not"
    assert attention.backend(gpu_tensor(4)) == "eager"
    monkeypatch.setattr(gpu, "missing", lambda index: None)
    assert attention.backend(gpu_tensor(4)) == "native"
    assert attention.backend(gpu_tensor(4, dtype=torch.float64)) == "eager"


def test_training_on_a_gpu_goes_to_pure_pytorch_and_says_so(monkeypatch):
    assert choice(monkeypatch, None, requires_grad=True) == native.NO_GRADIENT
    with torch.no_grad():
        assert choice(monkeypatch, None, requires_grad=True) is None


def test_a_gpu_never_makes_the_operator_compile(monkeypatch):
    monkeypatch.setattr(native, "_status", None)
    monkeypatch.setattr(native, "_find", lambda build_now: pytest.fail("compiled") if build_now else (None, None, {}))
    monkeypatch.setenv("AAH_HF_NATIVE", "1")
    assert "not built yet; `aah build` does it" in gpu.missing(0)
    monkeypatch.setenv("AAH_HF_NATIVE", "require")
    with pytest.raises(OperatorError, match="AAH_HF_NATIVE=require, but the native operator is not there"):
        gpu.missing(0)
