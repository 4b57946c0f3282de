"""What a build of the native operator is made of: sources, flags, and the identity that follows from them."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from .toolchain import GET_NVCC, NativeBuildError, Nvcc, cuda_targets, find_nvcc

TORCH_TARGET = (2, 10)
"""The oldest torch whose stable ABI the library uses; it loads in this and every newer one."""

CSRC = Path(__file__).resolve().parents[1] / "csrc"

_SOURCES = {".h", ".cpp", ".cuh", ".cu"}


@dataclass(frozen=True)
class Unit:
    """One source file and the flags that only it gets. nvcc compiles .cu files, the C++ compiler all others."""

    source: str
    flags: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        return self.source.endswith(".cu")


@dataclass(frozen=True)
class CudaPart:
    """What a build for GPUs has in addition.

    Attributes:
        nvcc: the compiler of the .cu units.
        targets: compute capabilities with machine code, ascending; PTX of the first serves other GPUs.
        units: translation units that only such a build has.
        flags: nvcc's flags.
        link_flags: flags after those of the recipe.
    """

    nvcc: Nvcc
    targets: tuple[str, ...]
    units: tuple[Unit, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """Everything about a build but the C++ compiler.

    Attributes:
        root: folder of the sources.
        units: translation units, relative to `root`.
        flags: compiler flags of every C++ unit.
        link_flags: flags after the object files.
        local: flags that name folders of this machine; they do not count towards the library's identity.
        cuda: what the library has for GPUs, None for a CPU library.
    """

    root: Path
    units: tuple[Unit, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    local: tuple[str, ...] = field(default=(), compare=False)
    cuda: CudaPart | None = None

    def sources(self) -> str:
        """Hash of the headers and of the folders that hold the units: what the library does on a CPU."""
        return _hash_folders(self.root, {"include", *(str(Path(unit.source).parent) for unit in self.units)})

    def cuda_sources(self) -> str:
        """Hash of the device code and its launchers: what a library with a CUDA part does on a GPU."""
        return _hash_folders(self.root, {"include", "device", "cuda"})

    def fingerprint(self) -> str:
        """Hash of sources, flags and platform: what the library does on a CPU and where it can run."""
        parts = [self.sources(), *self.flags, "--", *self.link_flags, "--"]
        parts += [platform.machine(), sys.platform, *platform.libc_ver()]
        for unit in self.units:
            parts += ["--", unit.source, *unit.flags]
        return _hash(parts)

    def cuda_fingerprint(self) -> str:
        """Hash of device code, nvcc, GPUs and flags of the CUDA part."""
        assert self.cuda is not None
        parts = [self.cuda_sources(), self.cuda.nvcc.version, *self.cuda.targets, "--", *self.cuda.flags, "--"]
        parts += self.cuda.link_flags
        for unit in self.cuda.units:
            parts += ["--", unit.source, *unit.flags]
        return _hash(parts)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _hash_folders(root: Path, folders: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for folder in folders for p in (root / folder).glob("*") if p.suffix in _SOURCES):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# -ffast-math is not among them: it lets the compiler break the rounding that exp2 relies on, and switches the whole
# process to flush-to-zero. -static-libstdc++ is not either: exceptions that cross into torch would abort.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)


def default_recipe() -> Recipe:
    """The native operator for this machine's CPU, against the installed torch."""
    torch = torch_folder()
    units = [Unit("cpu/isa_baseline.cpp"), Unit("cpu/driver.cpp"), Unit("cpu/work.cpp"), Unit("cpu/decode.cpp")]
    if platform.machine() in {"x86_64", "AMD64"}:
        units = [Unit("cpu/isa_avx512.cpp", _AVX512), Unit("cpu/isa_avx2.cpp", _AVX2), *units]
    units.append(Unit("torch/ops.cpp", _TORCH_FLAGS))
    # Debian's g++ links --as-needed and would drop libtorch.so, through which CUDA builds of torch offer their symbols.
    link = ("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu")
    if sys.platform == "darwin":
        link = ("-ltorch", "-ltorch_cpu")
    return Recipe(
        root=CSRC,
        units=tuple(units),
        flags=_FLAGS,
        link_flags=link,
        local=(f"-I{torch / 'include'}", f"-L{torch / 'lib'}"),
    )


_CUDART = ("-lcudart_static", "-Wl,--exclude-libs,libcudart_static.a", "-lpthread", "-ldl", "-lrt")
"""A runtime of the library's own, so that it needs none; hidden, so that it does not stand before torch's."""

_TORCH_FLAGS = (f"-DTORCH_TARGET_VERSION=0x{(TORCH_TARGET[0] << 56) | (TORCH_TARGET[1] << 48):016x}",)


def with_cuda(recipe: Recipe, arch: str | None = None) -> Recipe:
    """The same library with code for GPUs in it; one nvcc for all, so that any torch loads it, CPU builds too.

    Args:
        arch: "90,100", "native", or None for all GPUs that nvcc knows; see `toolchain.cuda_targets`.

    Raises:
        NativeBuildError: there is no nvcc, or it has no code for these GPUs.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise NativeBuildError(f"no nvcc was found (CUDA_HOME, the path, PyPI's packages): {GET_NVCC}.")
    targets = cuda_targets(nvcc, arch)
    code = [f"--generate-code=arch=compute_{target},code=sm_{target}" for target in targets]
    # What has no machine code here is compiled by the driver from this. The oldest serves most: 8.7, 10.3, 11.0, ...
    code.append(f"--generate-code=arch=compute_{targets[0]},code=compute_{targets[0]}")
    host = ",".join(flag for flag in _FLAGS if flag.startswith("-f"))
    flags = ("-std=c++17", "-O3", f"-Xcompiler={host}", "-Xptxas=-v", *code)
    registration = Unit("torch/ops_cuda.cpp", (*_TORCH_FLAGS, f'-DAAH_CUDA_TARGETS="{",".join(targets)}"'))
    kernels = sorted(path.relative_to(recipe.root).as_posix() for path in (recipe.root / "cuda").glob("*.cu"))
    return replace(
        recipe,
        local=(*recipe.local, *(f"-I{folder}" for folder in nvcc.include), *([f"-L{nvcc.lib}"] if nvcc.lib else [])),
        cuda=CudaPart(nvcc, targets, (*(Unit(kernel) for kernel in kernels), registration), flags, _CUDART),
    )


def torch_folder() -> Path:
    """Where torch is installed; found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeBuildError("torch is not installed here, and the native operator is built against it.")
    return Path(spec.origin).parent
