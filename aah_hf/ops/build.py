"""Compiles the native operator into the user's cache.

A build happens in a folder of its own and is published by one rename, so a reader sees a whole library or none, and
an interrupted build leaves nothing that counts.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import recipes, toolchain
from .library import LIBRARY, LOG, MANIFEST, Progress, key, lock, native_folder, sha256, verify, workspace
from .recipes import Recipe, Unit
from .toolchain import Compiler, NativeBuildError


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
        verbose: print the compiler commands and their messages to stderr.
        progress: called before every step. Default: lines on stderr when `verbose`, else silence.
        force: compile again even where the cache has a good library.
        jobs: compilers at a time, default `AAH_HF_BUILD_JOBS` or the number of processors.
        recipe: what to build, default the operator for CPUs; `recipes.with_cuda` adds GPUs.
        out: put the library and its record into this folder (a wheel's `aah_hf/_lib`) instead of the cache.

    Raises:
        NativeBuildError: no compiler, a compiler error (with the compiler's whole message), or a cache folder that
            cannot be trusted.
    """
    if os.name != "posix":
        raise NativeBuildError(
            "the native operator builds on Linux and macOS only; attention runs in pure PyTorch here."
        )
    recipe = recipe or recipes.default_recipe()
    compiler = toolchain.find_compiler()
    if compiler is None:
        raise toolchain.no_compiler()
    report = progress or (_print_progress if verbose else _silent)
    jobs = jobs or _jobs()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        with workspace(out, "wheel") as work:
            _compile(recipe, compiler, work, report, verbose, jobs)
            for file in (LIBRARY, MANIFEST):
                os.replace(work / file, out / file)
        return out / LIBRARY

    folder = native_folder(create=True)
    assert folder is not None
    name = key(recipe, compiler)
    final = folder / name
    if not force and _is_good(final / LIBRARY):
        os.utime(final / LIBRARY)  # the library that was asked for last is the one that is used
        return final / LIBRARY
    with lock(folder / f"{name}.lock", report):
        if not force and _is_good(final / LIBRARY):  # built while we waited
            return final / LIBRARY
        for left in folder.glob(f".{name}-*"):
            shutil.rmtree(left, ignore_errors=True)  # of a build that was killed: we hold its lock
        with workspace(folder, name) as work:
            _compile(recipe, compiler, work, report, verbose, jobs)
            if os.path.lexists(final):  # damaged, or replaced by force; a process that has loaded it keeps its pages
                os.rename(final, work / "old")
            published = work / "new"
            published.mkdir(mode=0o700)
            for file in (LIBRARY, MANIFEST, LOG):
                os.rename(work / file, published / file)
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


def _compile(recipe: Recipe, compiler: Compiler, work: Path, report: Progress, verbose: bool, jobs: int) -> None:
    """Compile and link into `work`, and write the record."""
    started = time.monotonic()
    sources = recipe.sources()  # as they are now: whoever edits them meanwhile gets another library next time
    cuda_sources = None if recipe.cuda is None else recipe.cuda_sources()
    library = work / LIBRARY
    units, link_flags = recipe.units, recipe.link_flags
    if recipe.cuda is not None:  # its kernels take longest, so they start first
        units, link_flags = (*recipe.cuda.units, *units), (*link_flags, *recipe.cuda.link_flags)
    total = len(units) + 1
    objects = [str(work / f"{index}.o") for index in range(len(units))]
    waiting = list(zip(units, objects))
    running: list[_Job] = []
    finished: list[_Job] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                unit, target = waiting.pop(0)
                report(len(finished), total, f"compiling {unit.source}")
                running.append(_start([*_command(recipe, compiler, unit), "-o", target], verbose))
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                job.check(verbose)
                finished.append(job)
            if running:
                time.sleep(0.01)
        report(len(finished), total, f"linking {LIBRARY}")
        folders = [flag for flag in recipe.local if flag.startswith("-L")]
        running.append(
            _start([*compiler.command, "-shared", "-o", str(library), *objects, *folders, *link_flags], verbose)
        )
        running[0].process.wait()
        finished.append(running.pop())
        finished[-1].check(verbose)
    finally:
        for job in running:  # an error or Ctrl-C: leave no compiler behind
            job.stop()
    manifest = {
        "sha256": sha256(library),
        "sources": sources,
        "compiler": compiler.version,
        "torch_target": list(recipes.TORCH_TARGET),
        "seconds": round(time.monotonic() - started, 1),
        "compiler_mib": _largest_child(),
        "cuda": None
        if recipe.cuda is None
        else {
            "sources": cuda_sources,
            "targets": list(recipe.cuda.targets),
            "nvcc": recipe.cuda.nvcc.version,
        },
    }
    with open(work / LOG, "w", encoding="utf-8") as log:
        for job in finished:
            log.write(f"$ {shlex.join(job.command)}\n{job.said()}\n")
    with open(work / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    report(total, total, f"built {LIBRARY} in {manifest['seconds']} s")


def _largest_child() -> int:
    """MiB of memory that the largest compiler took (or another child of this process, if one was larger)."""
    import resource  # not on Windows, where no build is attempted

    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return most >> (20 if sys.platform == "darwin" else 10)


def _command(recipe: Recipe, compiler: Compiler, unit: Unit) -> list[str]:
    source = ["-c", str(recipe.root / unit.source)]
    if unit.is_cuda:
        assert recipe.cuda is not None
        nvcc = [recipe.cuda.nvcc.command, *toolchain.host_compiler_flags(compiler)]
        return [*nvcc, *recipe.cuda.flags, *unit.flags, *source]
    include = [flag for flag in recipe.local if flag.startswith("-I")]
    return [*compiler.command, *recipe.flags, *unit.flags, *include, *source]


@dataclass(frozen=True)
class _Job:
    """A running compiler. It leads a process group, because nvcc starts others that outlive it when it is killed."""

    process: subprocess.Popen
    command: list[str]
    log: IO[bytes]  # a file, not a pipe: long messages cannot block the compiler

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode("utf-8", errors="replace").strip()

    def check(self, verbose: bool) -> None:
        said = self.said()
        if self.process.returncode != 0:
            raise _failure(self, said)
        if verbose and said:
            print(said, file=sys.stderr, flush=True)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)  # so that nvcc removes its temporary files
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _start(command: list[str], verbose: bool) -> _Job:
    if verbose:
        print(shlex.join(command), file=sys.stderr, flush=True)
    log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the job)
    # messages in English, so that the advice below finds its words
    environment = os.environ | {"LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise NativeBuildError(f"{command[0]} does not start: {error}. Set CXX to a working C++ compiler.") from error
    return _Job(process, command, log)


_ADVICE = (
    ("torch/csrc/stable", "this torch has no headers of the stable ABI; torch 2.10 or newer is needed."),
    ("cannot find -ltorch", "torch's libraries were not found; build with the Python that torch is installed in."),
    ("unsupported GNU version", "this nvcc does not take this g++; set CXX to an older one, or `aah build --no-cuda`."),
    ("nvcc fatal", "set CUDA_HOME to another CUDA toolkit, or leave the GPU out with `aah build --no-cuda`."),
    ("cannot find -lcudart_static", "the CUDA runtime is missing; `pip install nvidia-cuda-runtime`."),
    ("cuda_runtime", "the CUDA runtime is missing; `pip install nvidia-cuda-runtime`."),
    ("unrecognized command", "this compiler is too old; g++ 9 or clang 11 and newer work (set CXX)."),
    ("unknown argument", "this compiler is too old; g++ 9 or clang 11 and newer work (set CXX)."),
    ("No space left", "the disk is full; set AAH_HF_CACHE or TMPDIR to another one."),
    ("Killed", "the compiler ran out of memory; set AAH_HF_BUILD_JOBS=1."),
)


def _failure(job: _Job, said: str) -> NativeBuildError:
    said = said or ("Killed" if job.process.returncode < 0 else "(the compiler said nothing)")
    advice = next((text for sign, text in _ADVICE if sign in said), None)
    advice = advice or "set CXX to another compiler, or AAH_HF_NATIVE=0 to stay with pure PyTorch."
    return NativeBuildError(
        f"the native operator does not compile (exit status {job.process.returncode}).\n{shlex.join(job.command)}\n"
        f"{said}\nAdvice: {advice}"
    )
