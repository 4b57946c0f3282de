"""The folder of compiled libraries, which belongs to the user alone.

A library in the cache is code that gets loaded: its folder is private (0700, owner checked), its hash is recorded
when it is built and checked before it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import recipes, toolchain
from .recipes import Recipe
from .toolchain import Compiler, NativeBuildError

Progress = Callable[[int, int, str], None]
"""progress(done, total, label): called before every step of a build and once at its end."""

LIBRARY = "libaah.so"
MANIFEST = "manifest.json"
LOG = "build.log"


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


def native_folder(create: bool) -> Path | None:
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


def sha256(path: Path) -> str:
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
    if not library.is_file() or library.is_symlink() or sha256(library) != manifest["sha256"]:
        raise NativeBuildError(
            f"{library} is not the file that was built (its hash has changed), so it is not loaded; rebuild it with "
            "`aah build --force`."
        )
    return manifest


def key(recipe: Recipe, compiler: Compiler) -> str:
    """Name of a library's folder: what it does on which GPUs, what it does on a CPU, and the compiler."""
    name = f"{recipe.fingerprint()}-{_who(compiler)}"
    return name if recipe.cuda is None else f"cuda-{recipe.cuda_fingerprint()}-{name}"


def _who(compiler: Compiler) -> str:
    return hashlib.sha256("\0".join([*compiler.command, compiler.version]).encode()).hexdigest()[:8]


def built_from(recipe: Recipe, manifest: dict) -> bool:
    """Whether a library is of today's sources; device code counts where the library has some."""
    cuda = manifest.get("cuda")
    if cuda is not None and (not isinstance(cuda, dict) or cuda.get("sources") != recipe.cuda_sources()):
        return False
    return manifest.get("sources") == recipe.sources()


def find_cached(recipe: Recipe | None = None) -> Path | None:
    """A library in the cache that was built from these sources; None where there is none. Not yet verified.

    Of those with and without a CUDA part the one that was asked for last. Only libraries of today's compiler count;
    without a compiler any other one of the same sources, flags and platform serves: it may have been built before
    the compiler was removed.
    """
    recipe = recipe or recipes.default_recipe()
    folder = native_folder(create=False)
    if folder is None:
        return None
    compiler = toolchain.find_compiler()
    name = f"{recipe.fingerprint()}-{'*' if compiler is None else _who(compiler)}"
    found = list(folder.glob(f"{name}/{LIBRARY}"))
    for path in folder.glob(f"cuda-*-{name}/{LIBRARY}"):
        if built_from(recipe, read_manifest(path) or {}):
            found.append(path)
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@contextmanager
def lock(path: Path, progress: Progress) -> Iterator[None]:
    """One build at a time; the lock of a process that dies is released by the system."""
    import fcntl  # not on Windows, where no build is attempted

    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(0, 1, "waiting for another process that is building the same library")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def workspace(folder: Path, name: str) -> Iterator[Path]:
    """A folder for one build, on the file system where its result goes; gone at the end."""
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))  # mkdtemp makes it 0700
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
