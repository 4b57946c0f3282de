"""Finds, loads and calls the native operator; `ops/build.py` compiles it, `csrc/` is its source.

`AAH_HF_NATIVE` says whether it is used: `1` (default) where it can be, and for CPUs it is compiled on first use where
a compiler exists; `0` never; `require` makes its absence an error. Code for GPUs is compiled by `aah build` alone.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import OperatorError
from . import build, library, recipes, toolchain
from .sequences import Run
from .toolchain import NativeBuildError

logger = logging.getLogger("aah_hf")

WHEEL_FOLDER = Path(__file__).resolve().parents[1] / "_lib"
"""Where a wheel carries its library."""

UNLIMITED = 2**31 - 1
"""A window or limit that hides nothing; larger numbers mean the same."""

NO_GRADIENT = "the native operator has no gradient on GPUs yet"

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class NativeStatus:
    """What `aah info` says about the native operator.

    Attributes:
        available: it is loaded and used.
        reason: why it is not available, None where it is.
        mode: `AAH_HF_NATIVE`: "1", "0" or "require".
        path: the library that is loaded, or would be.
        source: "wheel" or "cache".
        isa: instruction set that its kernels use on this machine.
        compiler: what built it.
        torch: the installed torch, and `torch_range` those that the library works with.
        cuda: what the library has for GPUs: `targets` (compute capabilities, "80,90"; PTX of the first for others),
            versions of its CUDA `runtime` and of the `driver` (13000 is 13.0, 0 is none), usable `devices`. None where
            it was built without.
    """

    available: bool
    reason: str | None
    mode: str
    path: str | None = None
    source: str | None = None
    isa: str | None = None
    compiler: str | None = None
    torch: str = torch.__version__
    torch_range: str = f">={recipes.TORCH_TARGET[0]}.{recipes.TORCH_TARGET[1]}"
    cuda: dict[str, Any] | None = None


_lock = threading.RLock()
_status: NativeStatus | None = None


def mode() -> str:
    """`AAH_HF_NATIVE`, checked."""
    value = os.environ.get("AAH_HF_NATIVE", "1") or "1"
    if value not in {"0", "1", "require"}:
        raise OperatorError(
            f"AAH_HF_NATIVE is {value!r}; expected 1 (use it where it can be), 0 (never) or require (or else fail)."
        )
    return value


def status(*, build_now: bool = False) -> NativeStatus:
    """What is known about the native operator. Loads it; compiles it first only with `build_now`."""
    global _status
    asked = mode()
    with _lock:
        if _status is not None and _status.available:
            return _status if asked != "0" else NativeStatus(False, "AAH_HF_NATIVE=0", asked, _status.path)
        if _status is None or _status.mode != asked or (build_now and _status.reason == NOT_BUILT):
            _status = _load(asked, build_now)
        return _status


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether the native operator can be called on CPU tensors; compiles and loads it on first use.

    Raises:
        OperatorError: `AAH_HF_NATIVE=require` and it cannot be used.
    """
    found = status(build_now=True)
    if not found.available and found.mode == "require":
        raise OperatorError(f"AAH_HF_NATIVE=require, but the native operator cannot be used: {found.reason}")
    return found.available


def supports(q: Tensor) -> str | None:
    """Why the native operator cannot take tensors like `q` [..., head_dim]; None where it can."""
    if q.device.type not in {"cpu", "cuda"}:
        return f"it has no code for {q.device.type} tensors"
    if q.dtype not in DTYPES or (q.dtype == torch.float64 and q.device.type == "cuda"):
        names = "float32, bfloat16 and float16" if q.device.type == "cuda" else "float32, float64, bfloat16 and float16"
        return f"it takes {names}, not {q.dtype}"
    if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= MAX_HEAD_DIM:
        return f"it takes head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, not {q.shape[-1]}"
    return None


# --- finding and loading ----------------------------------------------------------------------------------------

NOT_BUILT = "not built yet; it is compiled on first use, or by `aah build`"


def _load(asked: str, build_now: bool) -> NativeStatus:
    if asked == "0":
        return NativeStatus(False, "AAH_HF_NATIVE=0", asked)
    have = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if have < recipes.TORCH_TARGET:
        return NativeStatus(False, f"torch {torch.__version__} is older than 2.10", asked)
    try:
        path, source, manifest = _find(build_now)
    except NativeBuildError as error:
        if build_now:  # said once: the status is kept
            logger.warning("attention runs in pure PyTorch, without the native operator: %s", error)
        return NativeStatus(False, str(error), asked)
    if path is None:
        return NativeStatus(False, NOT_BUILT, asked)
    try:
        info = _open(path)
    except (OSError, RuntimeError, AttributeError) as error:
        reason = f"{path} does not load: {error}"
        logger.warning("attention runs in pure PyTorch, without the native operator: %s", reason)
        return NativeStatus(False, reason, asked, str(path), source)
    return NativeStatus(True, None, asked, str(path), source, info["isa"], manifest.get("compiler"), cuda=info["cuda"])


def _find(build_now: bool) -> tuple[Path | None, str | None, dict]:
    """A verified library that fits these sources: the wheel's, else the cache's, else a new one."""
    shipped = WHEEL_FOLDER / library.LIBRARY
    recipe = recipes.default_recipe()
    if shipped.is_file():
        manifest = library.verify(shipped)
        # one left behind by an earlier checkout would run old rules
        if library.built_from(recipe, manifest):
            return shipped, "wheel", manifest
    cached = library.find_cached(recipe)
    if cached is None and build_now:
        where = library.cache_folder()
        if toolchain.find_compiler() is not None:
            logger.warning("compiling the native operator once into %s (about half a minute) ...", where)
        started = time.monotonic()
        cached = build.build(recipe=recipe)
        logger.warning("the native operator is ready (%.0f s)", time.monotonic() - started)
    if cached is None:
        return None, None, {}
    return cached, "cache", library.verify(cached)


_opened: Path | None = None


def _open(path: Path) -> dict[str, Any]:
    """Load a library, register what Python adds to its operators, and return what it says of itself."""
    global _opened
    if (_opened is None and hasattr(torch.ops.aah, "fwd")) or _opened not in (None, path):
        # registering the same operators twice ends the process, without a message
        raise RuntimeError("another copy of the operator is already loaded in this process; restart it")
    torch.ops.load_library(str(path))
    _opened = path
    _register()
    return json.loads(torch.ops.aah.info())


# --- what Python adds to the operators --------------------------------------------------------------------------


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _fwd_fake(q, k, v, window, sink_logits, *rest):
    batch, q_len, heads, head_dim = q.shape
    out = q.new_empty(batch, q_len, heads, head_dim)
    return out, q.new_empty(batch, heads, q_len, dtype=accumulator(q.dtype))


def _bwd_fake(dout, dlse, q, k, v, out, lse, window, sink_logits, *rest):
    heads = 0 if sink_logits is None else q.shape[2]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty(heads, dtype=accumulator(q.dtype)),
    )


def _decode_fake(q, *rest):
    return _fwd_fake(q, None, None, None, None)


def _append_fake(k_cache, v_cache, *rest):
    return None


def _save(ctx, inputs, output):
    q, k, v, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, *(t for t in rest[:7] if t is not None))
    ctx.present = tuple(t is not None for t in rest[:7])  # window, sink_logits, ... end
    ctx.rest = rest[7:]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, *saved = ctx.saved_tensors
    if q.is_cuda:  # windowed_attention does not come here
        raise OperatorError(NO_GRADIENT)
    saved = iter(saved)
    optional = [next(saved) if there else None for there in ctx.present]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, d_sink = torch.ops.aah.bwd.default(dout, dlse, q, k, v, out, lse, *optional, *ctx.rest)
    d_sink = d_sink if optional[1] is not None else None
    return dq, dk, dv, None, d_sink, *[None] * (len(optional) - 2 + len(ctx.rest))


def _double_backward(ctx, *grads):
    raise OperatorError(
        "windowed attention has no second derivative in its native operator; set AAH_HF_NATIVE=0 to use the pure "
        "PyTorch one for double backward (create_graph=True)."
    )


@functools.cache
def _register() -> None:
    torch.library.register_fake("aah::fwd", _fwd_fake)
    torch.library.register_fake("aah::bwd", _bwd_fake)
    torch.library.register_fake("aah::decode", _decode_fake)
    torch.library.register_fake("aah::cache_append_", _append_fake)
    torch.library.register_autograd("aah::fwd", _backward, setup_context=_save)
    torch.library.register_autograd("aah::bwd", _double_backward)


# --- calling ----------------------------------------------------------------------------------------------------


def _tracing() -> bool:
    """Are tensors made now possibly fake, or part of a graph? Then none may be kept."""
    if torch.compiler.is_compiling():
        return True
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def _ints(values: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=4096)
def _kept_ints(values: tuple[int, ...]) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be saved for a later backward
        return _ints(values)


@functools.lru_cache(maxsize=4096)
def _kept_windows(windows: tuple[int | None, ...]) -> Tensor:
    return _kept_ints(_window_ints(windows))


def _window_ints(windows: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(UNLIMITED if w is None else min(w, UNLIMITED) for w in windows)


def kept_ints(values: tuple[int, ...]) -> Tensor:
    """int32 on the CPU, made once and shared by all who ask for the same numbers: not to be written to."""
    return _ints(values) if _tracing() else _kept_ints(values)


def window_tensor(windows: Sequence[int | None] | Tensor) -> Tensor:
    if isinstance(windows, Tensor):
        return windows.to("cpu", torch.int32)  # the schedule is made from them, on a GPU too
    return _ints(_window_ints(windows)) if _tracing() else _kept_windows(tuple(windows))


def _per_sequence(value: int | Tensor | None, sequences: int, device: torch.device) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value if value is None else value.to(device, torch.int32).reshape(-1).expand(sequences).contiguous()
    return torch.full((sequences,), value, dtype=torch.int32, device=device)


def arrange(
    runs: Iterable[Run],
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    q_start: int = 0,
    kv_start: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, int | Tensor | tuple[Tensor, Tensor]]:
    """The sequences of a padded or packed batch as arguments of `forward`.

    Args:
        runs: `Sequences.runs`, in absolute positions.
        q_start, kv_start: absolute position of the first query and of the first key that is present.
        device: where the queries are.
    """
    of_row: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
    for run in runs:
        for row in run.rows:
            if run.end > kv_start:
                of_row[row].append((run.start, run.end))
    if all(len(found) <= 1 for found in of_row):
        spans = [found[0] if found else (kv_start, kv_start) for found in of_row]
        return {
            "q_start": q_start - kv_start,
            "start": _ints([a - kv_start for a, _ in spans], device),
            "end": _ints([b - kv_start for _, b in spans], device),
        }
    cu_q, cu_k, first_query, start, end = [0], [0], [], [], []
    for row, found in enumerate(of_row):
        # a document takes the padding behind it, and a row's first document also the padding before it
        found = sorted(found) or [(kv_start, kv_start)]
        borders = [kv_start, *(a for a, _ in found[1:]), kv_start + kv_len]
        for (a, b), origin, border in zip(found, borders, borders[1:]):
            cu_k.append(row * kv_len + border - kv_start)
            # the last document of a row takes all queries that are left
            taken = q_len if border == borders[-1] else min(max(border - q_start, 0), q_len)
            cu_q.append(row * q_len + taken)
            first_query.append(max(q_start, origin) - origin)
            start.append(a - origin)
            end.append(b - origin)
    return {
        "q_start": _ints(first_query, device),
        "start": _ints(start, device),
        "end": _ints(end, device),
        "cu_seqlens": (_ints(cu_q, device), _ints(cu_k, device)),
    }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[int | None] | Tensor,
    sink_tokens: int = 0,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    q_start: int | Tensor | None = None,
    start: int | Tensor | None = None,
    end: int | Tensor | None = None,
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None,
    limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Windowed attention in the native operator; on a CPU differentiable once in q, k, v and sink_logits.

    `available()` must have said yes (on a GPU `gpu.missing` None), and `supports(q)` None. Any strides are taken, so [batch, length, heads, ...]
    tensors come in transposed without a copy.

    Args:
        q: [batch, query_heads, q_len, head_dim]; k, v: [batch, kv_heads, kv_len, head_dim].
        windows: one per query head, None is full; or int32 [query_heads].
        sink_tokens: first real tokens of each sequence that stay visible.
        scale: default `head_dim ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sink_logits: [query_heads].
        q_start: position of the first query among the keys: an int, or one number per sequence. Default 0.
        start, end: the real tokens `start … end - 1` of each sequence, as positions among its keys. `start` is negative
            where a cache has dropped that many first tokens. Default: all are real.
        cu_seqlens: cumulative lengths of packed documents, int32 [documents + 1], over the batch's tokens row after
            row: from 0 to batch * length, and no document crosses a row. A pair where queries and keys differ. With it
            "sequence" above means document, and positions count from its first token.
        limit: the model's own sliding window, which hides sink tokens too.

    Returns:
        out [batch, query_heads, q_len, head_dim] (in memory [batch, q_len, query_heads, head_dim]) and the
        log-sum-exp [batch, query_heads, q_len], float32 (float64 for float64).
    """
    cu_q, cu_k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    if cu_q is not None and cu_k is not None:
        cu_q, cu_k = cu_q.to(q.device, torch.int32), cu_k.to(q.device, torch.int32)
    sequences = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if isinstance(q_start, int) and q_start == 0:
        q_start = None
    out, lse = torch.ops.aah.fwd.default(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        window_tensor(windows),
        None if sink_logits is None else sink_logits.to(accumulator(q.dtype)),
        _per_sequence(q_start, sequences, q.device),
        cu_q,
        cu_k,
        _per_sequence(start, sequences, q.device),
        _per_sequence(end, sequences, q.device),
        q.shape[2],
        k.shape[2],
        sink_tokens,
        UNLIMITED if limit is None else min(limit, UNLIMITED),
        q.shape[-1] ** -0.5 if scale is None else scale,
        softcap or 0.0,
    )
    return out.transpose(1, 2), lse


__all__ = [
    "NativeBuildError",
    "NativeStatus",
    "arrange",
    "available",
    "forward",
    "mode",
    "status",
    "supports",
]
