"""What the checks run on: the GPU, the operator built for it, and compute-sanitizer around it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from check import Check

from aah_hf.ops import build as native_build
from aah_hf.ops import gpu, library, native, recipes, toolchain
from aah_hf.ops.attention import backend


def describe(check: Check) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    facts = {
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    for name, value in facts.items():
        check.say(f"{name}: {value}")
    return facts


def build(check: Check, arch: str, installed: bool) -> dict[str, Any]:
    """The operator for this GPU, loaded into this process."""
    facts: dict[str, Any] = {}
    if not installed:
        recipe = recipes.with_cuda(recipes.default_recipe(), arch)
        path = native_build.build(
            recipe=recipe, progress=lambda done, total, label: check.say(f"{done}/{total} {label}")
        )
        facts = dict(library.read_manifest(path) or {})
    status = native.status()
    facts |= vars(status)
    check.say(f"loaded {status.path}, CUDA {status.cuda}")
    if check.expect(status.available, f"the operator is not there: {status.reason}"):
        q = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
        why = gpu.missing(0)
        check.expect(why is None and backend(q) == "native", f"this GPU does not run it: {why}")
    return facts


TOOLS = ("memcheck", "racecheck", "synccheck")  # initcheck's work is done by the section "poison"


def sanitize(check: Check) -> dict[str, str]:
    """A few of the correctness cases under every tool of compute-sanitizer, where there is one."""
    program = _find_sanitizer()
    if program is None:
        check.say(
            "compute-sanitizer was not found (the CUDA toolkit has it, or `pip install nvidia-cuda-sanitizer-api`)"
        )
        return {tool: "not run: there is no compute-sanitizer" for tool in TOOLS}
    script = str(Path(__file__).with_name("sanitized.py"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    facts = {}
    for tool in TOOLS:
        # torch's own kernels are not ours to judge, and checking them takes minutes
        command = [program, "--tool", tool, "--error-exitcode", "99", "--print-limit", "5", "--kernel-name", "kns=aah"]
        command += [sys.executable, script, str(check.seed)]
        seconds = max(20.0, min(90.0, check.seconds_left() / 6))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
        except subprocess.TimeoutExpired:
            facts[tool] = f"not finished in {seconds:.0f} s"
        else:
            said = (done.stdout + done.stderr)[-1500:]
            if "sanitized cases ran" in done.stdout:
                facts[tool] = "clean" if done.returncode == 0 else "errors"
                check.expect(done.returncode == 0, f"{tool} found errors:\n{said}")
            elif done.returncode == 99:
                facts[tool] = "errors"
                check.fail(f"{tool} found errors:\n{said}")
            else:  # it needs rights, or a driver, that this machine may not give
                facts[tool] = f"does not work here: {said.strip()[-300:]}"
        check.say(f"{tool}: {facts[tool]}")
    return facts


def _find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    nvcc = toolchain.find_nvcc()
    if found is None and nvcc is not None and nvcc.lib is not None:
        for folder in Path(nvcc.lib).parents:
            for place in (folder / "bin", folder / "compute-sanitizer"):  # of a toolkit, or of PyPI's packages
                if (place / "compute-sanitizer").is_file():
                    return str(place / "compute-sanitizer")
    return found
