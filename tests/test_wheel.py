"""What a wheel holds: with a compiler the operator, without one everything else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aah_hf.ops import toolchain

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling")

FILES = ("aah_hf/py.typed", "aah_hf/report/modelcard_template.md", "aah_hf/csrc/torch/ops.cpp")


def make(source: Path, out: Path, *kind: str, **environment: str) -> Path:
    """Run `python -m build` as a user does, and return what it made."""
    command = [sys.executable, "-m", "build", *kind, "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory, request) -> Path:
    """The source distribution, unpacked: a wheel is built from what it holds, not from a checkout."""
    out = tmp_path_factory.mktemp("sdist")
    archive = make(request.config.rootpath, out, "--sdist")
    shutil.unpack_archive(archive, out)
    return next(path for path in out.iterdir() if path.is_dir())


@pytest.mark.skipif(toolchain.find_compiler() is None, reason="needs a C++ compiler")
def test_a_wheel_carries_the_operator_and_runs_it_without_a_compiler(sdist, tmp_path):
    wheel = make(sdist, tmp_path / "wheel", "--wheel", AAH_HF_NATIVE="require", AAH_HF_CUDA="0")
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and not wheel.stem.endswith("any")
    with zipfile.ZipFile(wheel) as archive:
        assert set(FILES) <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    script = """
import json, sys, torch, aah_hf
from aah_hf.ops import native
q = torch.randn(1, 2, 40, 16)
out = aah_hf.windowed_attention(q, q, q, [8, None])
status = native.status()
print(json.dumps({"file": aah_hf.__file__, "source": status.source, "available": status.available}))
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH")}
    environment |= {
        "PYTHONPATH": str(tmp_path / "site"),
        "PATH": str(tmp_path),  # no compiler here
        "AAH_HF_NATIVE": "require",
        "AAH_HF_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["available"] and said["source"] == "wheel" and said["file"].startswith(str(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_the_sdist_makes_a_pure_wheel(sdist, tmp_path):
    wheel = make(sdist, tmp_path / "wheel", "--wheel", CXX="no-such-compiler")
    assert wheel.name.endswith("py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert set(FILES) <= set(names) and not any(name.startswith("aah_hf/_lib") for name in names)


def test_require_without_a_compiler_is_an_error(sdist, tmp_path):
    with pytest.raises(AssertionError, match="no C\\+\\+ compiler"):
        make(sdist, tmp_path / "wheel", "--wheel", CXX="no-such-compiler", AAH_HF_NATIVE="require")
