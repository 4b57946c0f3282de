"""Compiles the native operator into a cache folder that belongs to the user alone.

A library in the cache is code that gets loaded: its folder is private (0700, owner checked), its hash is recorded
when it is built and checked before it is loaded. A build happens in a folder of its own and is published by one
rename, so a reader sees a whole library or none, and an interrupted build leaves nothing that counts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import AAHError

Progress = Callable[[int, int, str], None]
"""progress(done, total, label): called before every step of a build and once at its end."""

TORCH_TARGET = (2, 10)
"""The oldest torch whose stable ABI the library uses; it loads in this and every newer one."""

CSRC = Path(__file__).resolve().parents[1] / "csrc"
LIBRARY = "libaah.so"
MANIFEST = "manifest.json"


class NativeBuildError(AAHError, RuntimeError):
    """The native operator could not be compiled or its cache not be trusted; the message holds the whole reason."""


# --- what to build ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One source file and the flags that only it gets."""

    source: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """Everything about a build but the compiler.

    Attributes:
        root: folder of the sources.
        units: translation units, relative to `root`.
        flags: compiler flags of every unit.
        link_flags: flags after the object files.
        local: flags that name folders of this machine; they do not count towards the library's identity.
    """

    root: Path
    units: tuple[Unit, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    local: tuple[str, ...] = field(default=(), compare=False)

    def sources(self) -> str:
        """Hash of the headers and of the folders that hold the units: what the library does."""
        digest = hashlib.sha256()
        folders = {self.root / "include", *((self.root / unit.source).parent for unit in self.units)}
        for path in sorted(p for folder in folders for p in folder.glob("*") if p.suffix in {".h", ".cpp"}):
            digest.update(f"\0{path.relative_to(self.root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def fingerprint(self) -> str:
        """Hash of sources, flags and platform: what the library does and where it can run."""
        parts = [self.sources(), *self.flags, "--", *self.link_flags, "--"]
        parts += [platform.machine(), sys.platform, *platform.libc_ver()]
        for unit in self.units:
            parts += ["--", unit.source, *unit.flags]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
    """The native operator for this machine, against the installed torch."""
    torch = torch_folder()
    units = [Unit("cpu/isa_baseline.cpp"), Unit("cpu/driver.cpp"), Unit("cpu/work.cpp"), Unit("cpu/decode.cpp")]
    if platform.machine() in {"x86_64", "AMD64"}:
        units = [Unit("cpu/isa_avx512.cpp", _AVX512), Unit("cpu/isa_avx2.cpp", _AVX2), *units]
    target = (TORCH_TARGET[0] << 56) | (TORCH_TARGET[1] << 48)
    units.append(Unit("torch/ops.cpp", (f"-DTORCH_TARGET_VERSION=0x{target:016x}",)))
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


def torch_folder() -> Path:
    """Where torch is installed; found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeBuildError("torch is not installed here, and the native operator is built against it.")
    return Path(spec.origin).parent


# --- the compiler -----------------------------------------------------------------------------------------------


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
        try:
            said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(tuple(command), said.stdout.splitlines()[0] if said.stdout else "unknown")
    return None


def _no_compiler() -> NativeBuildError:
    asked = os.environ.get("CXX")
    what = f"CXX is {asked!r}, which does not run" if asked else "no C++ compiler (g++ or clang++) is on the path"
    return NativeBuildError(
        f"{what}, so the native operator cannot be built. Install one (Debian: `apt install g++`) and run `aah build`; "
        "until then attention runs in pure PyTorch."
    )


# --- the cache --------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`AAH_HF_CACHE`, else `aah_hf` in `XDG_CACHE_HOME` or `~/.cache`. Not created here."""
    asked = os.environ.get("AAH_HF_CACHE")
    if asked:
        return Path(asked).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "aah_hf"
    except RuntimeError as error:
        raise NativeBuildError("this user has no home folder; set AAH_HF_CACHE to a folder for the library.") from error


def _check_private(folder: Path) -> None:
    """Refuse a folder that somebody else could have put a library into."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NativeBuildError(f"{folder} is not a folder (or is a link); remove it, or set AAH_HF_CACHE elsewhere.")
    if found.st_uid != os.getuid():
        raise NativeBuildError(
            f"{folder} belongs to user {found.st_uid}, not to you ({os.getuid()}); "
            "set AAH_HF_CACHE to a folder of yours."
        )
    if found.st_mode & 0o022:
        raise NativeBuildError(
            f"{folder} can be written by others (mode {stat.S_IMODE(found.st_mode):o}), so its libraries are not "
            "trusted; remove it, or set AAH_HF_CACHE elsewhere."
        )
    if found.st_mode & 0o077:
        os.chmod(folder, 0o700)  # readable by others: harmless so far, closed from here on


def _check_parents(folder: Path) -> None:
    """Whoever can write a parent can put another folder in our place, unless the sticky bit forbids it."""
    for parent in folder.resolve().parents:
        found = os.stat(parent)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise NativeBuildError(
                f"everybody can write {parent}, so nothing below it is trusted; set AAH_HF_CACHE elsewhere."
            )


def _native_folder(create: bool) -> Path | None:
    """The checked folder of libraries; None where it does not exist and shall not be made."""
    base = cache_folder()
    folder = base / "native"
    try:
        if create:
            for missing in [p for p in reversed((folder, *folder.parents)) if not os.path.lexists(p)]:
                missing.mkdir(mode=0o700, exist_ok=True)  # mkdir(parents=True) would go by the umask
        elif not os.path.lexists(folder):
            return None
        _check_parents(folder)
        if not os.environ.get("AAH_HF_CACHE"):  # a folder the user chose may be used for other things too
            _check_private(base)
        _check_private(folder)
    except OSError as error:
        raise NativeBuildError(
            f"the cache folder {folder} cannot be used: {error}. Set AAH_HF_CACHE elsewhere."
        ) from error
    return folder


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(library: Path) -> dict | None:
    """The record beside a library, or None where there is none that can be read."""
    try:
        with open(library.with_name(MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def verify(library: Path) -> dict:
    """Check a library against its record and return the record.

    Raises:
        NativeBuildError: there is no record, or the file is not the one that was built.
    """
    manifest = read_manifest(library)
    if manifest is None or not isinstance(manifest.get("sha256"), str):
        raise NativeBuildError(f"{library} has no record of its hash; rebuild it with `aah build --force`.")
    if not library.is_file() or library.is_symlink() or _sha256(library) != manifest["sha256"]:
        raise NativeBuildError(
            f"{library} is not the file that was built (its hash has changed), so it is not loaded; rebuild it with "
            "`aah build --force`."
        )
    return manifest


def _key(recipe: Recipe, compiler: Compiler) -> str:
    who = hashlib.sha256("\0".join([*compiler.command, compiler.version]).encode()).hexdigest()[:8]
    return f"{recipe.fingerprint()}-{who}"


def find_cached(recipe: Recipe | None = None) -> Path | None:
    """A library in the cache that was built from these sources; None where there is none.

    The one of today's compiler comes first. Without a compiler any other one of the same sources, flags and
    platform serves: it may have been built before the compiler was removed. Not yet verified.
    """
    recipe = recipe or default_recipe()
    folder = _native_folder(create=False)
    if folder is None:
        return None
    compiler = find_compiler()
    if compiler is not None:
        library = folder / _key(recipe, compiler) / LIBRARY
        return library if library.is_file() else None
    found = sorted(folder.glob(f"{recipe.fingerprint()}-*/{LIBRARY}"), key=lambda p: p.stat().st_mtime)
    return found[-1] if found else None


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """One build at a time; the lock of a process that dies is released by the system."""
    import fcntl  # not on Windows, where no build is attempted

    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, 1, "waiting for another process that is building the same library")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- building ---------------------------------------------------------------------------------------------------


def build(
    *,
    verbose: bool = False,
    progress: Progress | None = None,
    force: bool = False,
    jobs: int | None = None,
    recipe: Recipe | None = None,
    out: Path | None = None,
) -> Path:
    """Compile the native operator unless the cache has it, and return the library's path.

    Args:
        verbose: print the compiler commands to stderr.
        progress: called before every step. Default: lines on stderr when `verbose`, else silence.
        force: compile again even where the cache has a good library.
        jobs: compilers at a time, default `AAH_HF_BUILD_JOBS` or the number of processors.
        recipe: what to build, default the operator.
        out: put the library and its record into this folder (a wheel's `aah_hf/_lib`) instead of the cache.

    Raises:
        NativeBuildError: no compiler, a compiler error (with the compiler's whole message), or a cache folder that
            cannot be trusted.
    """
    if os.name != "posix":
        raise NativeBuildError(
            "the native operator builds on Linux and macOS only; attention runs in pure PyTorch here."
        )
    recipe = recipe or default_recipe()
    compiler = find_compiler()
    if compiler is None:
        raise _no_compiler()
    report = progress or (_print_progress if verbose else _silent)
    jobs = jobs or _jobs()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with _workspace(out, "wheel") as work:
            _compile(recipe, compiler, work, report, verbose, jobs)
            for name in (LIBRARY, MANIFEST):
                os.replace(work / name, out / name)
        return out / LIBRARY

    folder = _native_folder(create=True)
    assert folder is not None
    key = _key(recipe, compiler)
    final = folder / key
    if not force and _is_good(final / LIBRARY):
        return final / LIBRARY
    with _lock(folder / f"{key}.lock", report):
        if not force and _is_good(final / LIBRARY):  # built while we waited
            return final / LIBRARY
        for left in folder.glob(f".{key}-*"):
            shutil.rmtree(left, ignore_errors=True)  # of a build that was killed: we hold its lock
        with _workspace(folder, key) as work:
            _compile(recipe, compiler, work, report, verbose, jobs)
            if os.path.lexists(final):  # damaged, or replaced by force; a process that has loaded it keeps its pages
                os.rename(final, work / "old")
            published = work / "new"
            published.mkdir(mode=0o700)
            for name in (LIBRARY, MANIFEST):
                os.rename(work / name, published / name)
            os.rename(published, final)
    return final / LIBRARY


def _jobs() -> int:
    asked = os.environ.get("AAH_HF_BUILD_JOBS", "")
    if asked and not (asked.isdigit() and int(asked) > 0):
        raise NativeBuildError(f"AAH_HF_BUILD_JOBS is {asked!r}; expected a number of compilers >= 1.")
    if asked:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _silent(done: int, total: int, label: str) -> None:
    pass


def _print_progress(done: int, total: int, label: str) -> None:
    print(f"[{done}/{total}] {label}", file=sys.stderr, flush=True)


def _is_good(library: Path) -> bool:
    try:
        verify(library)
    except NativeBuildError:
        return False
    return True


@contextmanager
def _workspace(folder: Path, key: str) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=folder))  # mkdtemp makes it 0700
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(recipe: Recipe, compiler: Compiler, work: Path, report: Progress, verbose: bool, jobs: int) -> None:
    """Compile and link into `work`, and write the record."""
    total = len(recipe.units) + 1
    waiting = list(enumerate(recipe.units))
    running: list[tuple[subprocess.Popen, list[str], Path]] = []
    started = time.monotonic()
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, unit = waiting.pop(0)
                report(done, total, f"compiling {unit.source}")
                include = [flag for flag in recipe.local if flag.startswith("-I")]
                source, target = str(recipe.root / unit.source), str(work / f"{index}.o")
                command = [*compiler.command, *recipe.flags, *unit.flags, *include, "-c", source, "-o", target]
                running.append(_start(command, work / f"{index}.log", verbose))
            for job in [j for j in running if j[0].poll() is not None]:
                running.remove(job)
                _check_finished(*job)
                done += 1
            if running:
                time.sleep(0.01)
        report(done, total, f"linking {LIBRARY}")
        library = work / LIBRARY
        objects = [str(work / f"{i}.o") for i in range(len(recipe.units))]
        folders = [flag for flag in recipe.local if flag.startswith("-L")]
        command = [*compiler.command, "-shared", "-o", str(library), *objects, *folders, *recipe.link_flags]
        running.append(_start(command, work / "link.log", verbose))
        running[0][0].wait()
        _check_finished(*running.pop())
    finally:
        for process, _, _ in running:  # an error or Ctrl-C: leave no compiler behind
            process.kill()
            process.wait()
    manifest = {
        "sha256": _sha256(library),
        "sources": recipe.sources(),
        "compiler": compiler.version,
        "torch_target": list(TORCH_TARGET),
        "seconds": round(time.monotonic() - started, 1),
    }
    with open(work / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    report(total, total, f"built {LIBRARY} in {manifest['seconds']} s")


def _start(command: list[str], log: Path, verbose: bool) -> tuple[subprocess.Popen, list[str], Path]:
    if verbose:
        print(shlex.join(command), file=sys.stderr, flush=True)
    with open(log, "wb") as file:  # a file, not a pipe: long messages cannot block the compiler
        # messages in English, so that the advice below finds its words
        environment = os.environ | {"LC_ALL": "C"}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise NativeBuildError(
                f"{command[0]} does not start: {error}. Set CXX to a working C++ compiler."
            ) from error
    return process, command, log


_ADVICE = (
    ("torch/csrc/stable", "this torch has no headers of the stable ABI; torch 2.10 or newer is needed."),
    ("cannot find -ltorch", "torch's libraries were not found; build with the Python that torch is installed in."),
    ("unrecognized command", "this compiler is too old; g++ 9 or clang 11 and newer work (set CXX)."),
    ("unknown argument", "this compiler is too old; g++ 9 or clang 11 and newer work (set CXX)."),
    ("No space left", "the disk is full; set AAH_HF_CACHE or TMPDIR to another one."),
    ("Killed", "the compiler ran out of memory; set AAH_HF_BUILD_JOBS=1."),
)


def _check_finished(process: subprocess.Popen, command: list[str], log: Path) -> None:
    if process.returncode == 0:
        return
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    said = said or ("Killed" if process.returncode < 0 else "(the compiler said nothing)")
    advice = next((text for sign, text in _ADVICE if sign in said), None)
    advice = advice or "set CXX to another compiler, or AAH_HF_NATIVE=0 to stay with pure PyTorch."
    raise NativeBuildError(
        f"the native operator does not compile (exit status {process.returncode}).\n{shlex.join(command)}\n{said}\n"
        f"Advice: {advice}"
    )
