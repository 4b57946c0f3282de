"""Finds the compilers: a C++ one, and NVIDIA's nvcc with the GPUs that it shall compile for."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import AAHError

CUDA_TARGETS = ("80", "86", "89", "90", "100", "120")
"""Compute capabilities that a build has machine code for, as far as its nvcc knows them. PTX of the first serves
every other GPU from 8.0 on: the driver compiles it when the library is loaded there."""

NATIVE = "native"

GET_NVCC = "install the CUDA toolkit, or `pip install nvidia-cuda-nvcc nvidia-cuda-runtime`"


class NativeBuildError(AAHError, RuntimeError):
    """The native operator could not be compiled or its cache not be trusted; the message holds the whole reason."""


# --- C++ --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler | None:
    """The C++ compiler: `CXX` where set, else g++, clang++ or c++ on the path; None where there is none."""
    asked = os.environ.get("CXX")
    for command in [shlex.split(asked)] if asked else [["g++"], ["clang++"], ["c++"]]:
        if not command or shutil.which(command[0]) is None:
            continue
        said = _ask([*command, "--version"])
        if said is not None:
            return Compiler(tuple(command), said.splitlines()[0] if said else "unknown")
    return None


def no_compiler() -> NativeBuildError:
    asked = os.environ.get("CXX")
    what = f"CXX is {asked!r}, which does not run" if asked else "no C++ compiler (g++ or clang++) is on the path"
    return NativeBuildError(
        f"{what}, so the native operator cannot be built. Install one (Debian: `apt install g++`) and run `aah build`; "
        "until then attention runs in pure PyTorch."
    )


def _ask(command: list[str]) -> str | None:
    """What a command prints; None where it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


# --- CUDA -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    """NVIDIA's compiler.

    Attributes:
        command: how to call it.
        version: its release, "13.0.88".
        knows: compute capabilities that it has machine code for, "80" and so on.
        include: folders of cuda_runtime_api.h.
        lib: folder of libcudart_static.a; None where the linker must find it by itself.
    """

    command: str
    version: str
    knows: frozenset[str]
    include: tuple[str, ...]
    lib: str | None


def _nvcc_places() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found:
        yield Path(found)
    # PyPI's packages of CUDA 13 share one folder, nvidia/cu13
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(folder) / "cu13" / "bin" / "nvcc"
    yield Path("/usr/local/cuda/bin/nvcc")


@functools.lru_cache
def _describe_nvcc(command: str) -> Nvcc | None:
    said = _ask([command, "--version"])
    codes = _ask([command, "--list-gpu-code"])
    if said is None or codes is None:
        return None
    version = next((word[1:].rstrip(",") for word in said.split() if word[0] == "V" and word[1:2].isdigit()), "unknown")
    knows = frozenset(line.removeprefix("sm_") for line in codes.split() if line.startswith("sm_"))
    # A dry run tells the folders, wherever the script or link that we call leads to.
    try:
        dry = subprocess.run(
            [command, "-dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull],
            capture_output=True, text=True, timeout=30,
        ).stderr  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    facts: dict[str, str] = {}
    for line in dry.splitlines():
        name, equals, value = line.removeprefix("#$ ").partition("=")
        if equals and name.isupper():
            facts[name] = value
    top = Path(facts.get("TOP") or str(Path(command).parents[1]))
    include = [flag[2:] for flag in shlex.split(facts.get("INCLUDES", "")) if flag.startswith("-I")]
    include = [str(Path(folder).resolve()) for folder in [*include, str(top / "include")]]
    lib = [flag[2:] for flag in shlex.split(facts.get("LIBRARIES", "")) if flag.startswith("-L")]
    lib += [str(top / "lib64"), str(top / "lib")]
    return Nvcc(
        command,
        version,
        knows,
        # not /usr/include, which every compiler searches by itself and in another order
        tuple(dict.fromkeys(p for p in include if Path(p, "cuda_runtime_api.h").is_file() and p != "/usr/include")),
        next((str(Path(p).resolve()) for p in lib if Path(p, "libcudart_static.a").is_file()), None),
    )


def find_nvcc() -> Nvcc | None:
    """nvcc in `CUDA_HOME` or `CUDA_PATH`, on the path, of PyPI's CUDA 13 packages, or in /usr/local/cuda."""
    for place in _nvcc_places():
        if place.is_file() and os.access(place, os.X_OK):
            found = _describe_nvcc(str(place))
            if found is not None:
                return found
    return None


def cuda_targets(nvcc: Nvcc, asked: str | None = None) -> tuple[str, ...]:
    """The compute capabilities to compile for, ascending.

    Args:
        asked: "90,100" (or "9.0,10.0"), "native" for the GPUs of this machine, None for all of `CUDA_TARGETS` that
            this nvcc knows.

    Raises:
        NativeBuildError: not a list of compute capabilities, one that the kernels do not run on or that this nvcc
            does not know, or "native" without a GPU.
    """
    if asked is None:
        chosen = [target for target in CUDA_TARGETS if target in nvcc.knows]
        if not chosen:
            raise NativeBuildError(f"nvcc {nvcc.version} knows none of the GPUs {', '.join(CUDA_TARGETS)}; {GET_NVCC}.")
        return tuple(chosen)
    words = native_targets() if asked.strip() == NATIVE else asked.replace(".", "").replace("sm_", "").split(",")
    chosen = sorted({word.strip() for word in words}, key=lambda word: (len(word), word))
    for word in chosen:
        if not word.isdigit() or not 80 <= int(word) < 1000:
            raise NativeBuildError(
                f"--arch is {asked!r}; expected compute capabilities from 80 on like 90 or 90,100, or {NATIVE}."
            )
        if word not in nvcc.knows:
            known = ", ".join(sorted((code for code in nvcc.knows if int(code) >= 80), key=int))
            raise NativeBuildError(
                f"nvcc {nvcc.version} has no code for compute capability {word}, but for {known}; choose among them, or "
                "set CUDA_HOME to another toolkit."
            )
    return tuple(chosen)


def native_targets() -> list[str]:
    """Compute capabilities of this machine's GPUs, by nvidia-smi, else by torch.

    Raises:
        NativeBuildError: neither sees a GPU.
    """
    said = _ask(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    found = {line.strip().replace(".", "") for line in (said or "").splitlines()}
    found = {word for word in found if word.isdigit()}
    if not found:
        # another process, because asking torch for a GPU would start CUDA in this one
        code = (
            "import torch\n"
            "for i in range(torch.cuda.device_count()): print(*torch.cuda.get_device_capability(i), sep='')"
        )
        found = set((_ask([sys.executable, "-c", code]) or "").split())
    if not found:
        raise NativeBuildError(
            f"--arch {NATIVE} asks for this machine's GPU, and neither nvidia-smi nor torch sees one; name the compute "
            "capability (`--arch 90`), or leave --arch out to build for all."
        )
    return sorted(found, key=int)


def host_compiler_flags(compiler: Compiler) -> list[str]:
    """How to tell nvcc which C++ compiler to use; it takes one program, without a compiler cache before it."""
    command = list(compiler.command)
    if len(command) > 1 and Path(command[0]).name in {"ccache", "sccache", "distcc"}:
        command = command[1:]
    return ["-ccbin", command[0], *(f"-Xcompiler={flag}" for flag in command[1:])]
