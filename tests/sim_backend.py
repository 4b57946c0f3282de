"""Compiles the CUDA kernels' emulator (csrc/sim) and calls it like `native.forward`. Tests only."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import aah_hf

CSRC = Path(aah_hf.__file__).parent / "csrc"
UNLIMITED = 2**31 - 1
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

DIMS = (64, 80, 96, 128, 192, 256)
"""Head sizes that kernels exist for; others are padded to the next."""

DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 3}  # AahDtype
FOLDERS = ("include", "device", "cuda", "sim")
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")


class SimError(AssertionError):
    """The emulator objected to what a kernel did; the message says where."""


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "length", "head"))]


class _Params(ctypes.Structure):
    """AahParams of include/aah_params.h."""

    _fields_ = [
        ("version", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "sequences")
        ),
        *((name, ctypes.c_void_p) for name in ("window", "q_start", "start", "end", "cu_q", "cu_k")),
        ("sinks", ctypes.c_int32),
        ("limit", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("sink_logits", ctypes.c_void_p),
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        *((name, _Tensor) for name in ("dout", "dq", "dk", "dv")),
        ("dlse", ctypes.c_void_p),
        ("d_sink_logits", ctypes.c_void_p),
    ]


def padded(head_dim: int) -> int:
    return next(dim for dim in DIMS if dim >= head_dim)


def cache_folder() -> Path:
    return Path(os.environ.get("AAH_HF_CACHE") or Path.home() / ".cache" / "aah_hf") / "sim"


def compile_once(
    source: str, flags: tuple[str, ...], root: Path = CSRC, suffix: str = ".so", folder: Path | None = None
) -> Path:
    """A program, library or object, kept in a folder (default the cache) until any of the sources changes."""
    assert COMPILER is not None
    digest = hashlib.sha256("\0".join([source, *FLAGS, *flags, COMPILER]).encode())
    for path in sorted(p for folder in FOLDERS for p in (root / folder).glob("*.*")):
        digest.update(path.name.encode() + path.read_bytes())
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = folder / (digest.hexdigest()[:24] + suffix)
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            command = [COMPILER, *FLAGS, *flags, *(str(root / name) for name in source.split())]
            done = subprocess.run([*command, "-o", f"{work}/x"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(f"{work}/x", target)
    return target


@dataclass(frozen=True)
class Emulator:
    """The kernels for one padded head size, compiled from the sources at `root`."""

    dim: int
    root: Path = CSRC
    flags: tuple[str, ...] = ()
    folder: Path | None = None

    @functools.cached_property
    def function(self):
        flags = ("-DAAH_SIM", f"-DAAH_DIM={self.dim}", "-fPIC", "-shared", *self.flags)
        machine = compile_once("sim/machine.cpp", ("-fPIC", "-c"), suffix=".o")
        path = compile_once(f"sim/forward.cpp {machine}", flags, self.root, folder=self.folder)
        function = ctypes.CDLL(str(path)).aah_sim_fwd
        function.argtypes = [
            ctypes.POINTER(_Params),
            *[ctypes.c_int64] * 2,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int),
            ctypes.c_char_p,
            ctypes.c_int,
        ]
        return function


emulator = functools.lru_cache(maxsize=None)(Emulator)


def _tensor(t: Tensor) -> _Tensor:
    return _Tensor(t.data_ptr(), *t.stride()[:3])


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows,
    sink_tokens: int = 0,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    q_start: int | Tensor | None = None,
    start: Tensor | None = None,
    end: Tensor | None = None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    limit: int | None = None,
    processors: int = 1,
    most: int = 0,
    seed: int = 0,
    lazy: bool = True,
    with_emulator: Emulator | None = None,
    max_lengths: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, int]:
    """`native.forward` on the emulator; also returns the number of tiles whose keys were split.

    Args:
        processors: multiprocessors to plan for; with more than one, long rows are split where blocks are few.
        most: split the keys of tiles that visit more tiles of keys than this; 0 leaves it to the plan.
        seed: schedule of the warps; 0 is lockstep.
        lazy: asynchronous copies land when they are waited for, not at once.
    """
    q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
    batch, q_len, heads, dim = q.shape
    cu_q, cu_k = cu_seqlens or (None, None)
    sequences = batch if cu_q is None else len(cu_q) - 1
    if isinstance(q_start, int):
        q_start = torch.full((sequences,), q_start, dtype=torch.int32)
    window = torch.tensor([UNLIMITED if w is None else min(w, UNLIMITED) for w in windows], dtype=torch.int32)
    out = torch.full((batch, q_len, heads, dim), torch.nan, dtype=q.dtype)
    lse = torch.full((batch, heads, q_len), torch.nan)
    logits = None if sink_logits is None else sink_logits.detach().float()
    p = _Params(version=1, dtype=DTYPES[q.dtype], batch=batch, q_len=q_len, kv_len=k.shape[1], q_heads=heads)
    p.kv_heads, p.head_dim, p.sequences = k.shape[2], dim, sequences
    p.window, p.q_start, p.start, p.end = _pointer(window), _pointer(q_start), _pointer(start), _pointer(end)
    p.cu_q, p.cu_k, p.sinks = _pointer(cu_q), _pointer(cu_k), sink_tokens
    p.limit = UNLIMITED if limit is None else limit
    p.scale, p.softcap = dim**-0.5 if scale is None else scale, softcap or 0.0
    p.sink_logits, p.lse = _pointer(logits), lse.data_ptr()
    p.q, p.k, p.v, p.out = _tensor(q), _tensor(k), _tensor(v), _tensor(out)
    splits, error = ctypes.c_int(), ctypes.create_string_buffer(500)
    function = (with_emulator or emulator(padded(dim))).function
    max_q, max_k = max_lengths or (q_len, k.shape[1])
    status = function(p, max_q, max_k, processors, most, seed, lazy, ctypes.byref(splits), error, len(error))
    if status == -1:
        raise SimError(error.value.decode())
    assert status == 0, f"AahStatus {status}"
    return out.transpose(1, 2), lse, splits.value
