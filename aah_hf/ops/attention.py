"""`windowed_attention`: the public operator. Validates, then hands over to a backend."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import OperatorError
from . import eager, gpu, native
from .sequences import Sequences

logger = logging.getLogger("aah_hf")


def windowed_attention(
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
    kv_start: int = 0,
    sequences: Sequences | None = None,
    limit: int | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention in which every query head has a window of its own (paper §3, method.md §1).

    The query at position i of head h sees the keys `i - windows[h] + 1 … i` and the first
    `sink_tokens` tokens of its sequence. Differentiable once in q, k, v and `sink_logits`.

    Args:
        q: [batch, query_heads, q_len, head_dim].
        k, v: [batch, kv_heads, kv_len, head_dim]; query_heads is a multiple of kv_heads (GQA).
        windows: one window per query head, >= 1 keys including the query's own; None is full attention.
        sink_tokens: first real tokens of each sequence that stay visible. Default 0, as in the paper.
        scale: factor on the scores, default `head_dim ** -0.5`.
        softcap: cap the scores to `softcap * tanh(score / softcap)`.
        sink_logits: [query_heads], a learned logit per head that takes probability and has no value.
        q_start: position of the first query. Default: the queries are the last `q_len` positions. A tensor
            is read on the device only (static caches under torch.compile), which costs reading all keys.
        kv_start: position of the first key, for caches that have dropped earlier ones.
        sequences: padding and packing, see `Sequences`; its length counts from position 0 to the last key.
        limit: the model's own sliding window; hides sink tokens too.
        mask: [batch or 1, query_heads or 1, q_len, >= kv_len], bool (True is seen) or added to the scores, on
            top of all other rules. Not differentiable.
        dropout: probability of dropping an attention weight.

    Returns:
        [batch, query_heads, q_len, head_dim]; zero rows where a query sees nothing.

    Raises:
        OperatorError: shapes, dtypes or values do not fit together.
    """
    windows = _check(q, k, v, windows, sink_tokens, softcap, sink_logits, mask, dropout, limit)
    _check_positions(q_start, kv_start, sequences, scale)
    total = kv_start + k.shape[2]
    if q_start is None:
        q_start = total - q.shape[2]
    if isinstance(q_start, Tensor) and q_start.numel() != 1:
        raise OperatorError(f"q_start has shape {tuple(q_start.shape)}; expected one position, the same for all rows.")
    if isinstance(q_start, Tensor) and not torch.compiler.is_compiling():
        q_start = int(q_start)
    if isinstance(q_start, int):
        end = q_start + q.shape[2]
        if q_start < kv_start or end > total:
            raise OperatorError(
                f"queries at positions {q_start} … {end - 1} need keys up to their own position, and the keys given "
                f"are {kv_start} … {total - 1}."
            )
        k, v = k[:, :, : end - kv_start], v[:, :, : end - kv_start]  # a static cache hands over its whole buffer
        total = end
    if sequences is not None and (sequences.valid.shape[0] != q.shape[0] or sequences.valid.shape[1] < total):
        raise OperatorError(
            f"sequences cover [batch, length] = {tuple(sequences.valid.shape)}; expected [{q.shape[0]}, >= {total}]."
        )
    why = _not_native(q, k, v, q_start, sequences, mask, dropout, sink_logits)
    if why is None:
        return _native(q, k, v, windows, sink_tokens, scale, softcap, sink_logits, q_start, kv_start, sequences, limit)
    if why and not torch.compiler.is_compiling():
        _say_once(why)
    return eager.forward(
        q,
        k,
        v,
        [total if w is None else min(w, total) for w in windows],
        eager.Options(sink_tokens, scale, softcap, dropout, limit),
        sink_logits=sink_logits,
        q_start=q_start,
        kv_start=kv_start,
        sequences=sequences,
        mask=mask,
    )


def backend(q: Tensor) -> str:
    """Which operator plain calls with tensors like `q` run, without gradients: "native" or "eager"."""
    return "native" if _missing(q) is None and native.supports(q) is None else "eager"


def _missing(q: Tensor) -> str | None:
    """Why there is no native operator where `q` is: None where there is, "" where that is no news."""
    if q.device.type == "cuda":
        return gpu.missing(q.device.index)
    # `aah info` says which operator runs, and a failed build has been reported
    return None if q.device.type == "cpu" and native.available() else ""


def _not_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_start: int | Tensor,
    sequences: Sequences | None,
    mask: Tensor | None,
    dropout: float,
    sink_logits: Tensor | None,
) -> str | None:
    """Why this call goes to the pure PyTorch operator: None when it does not, "" when there is no news in it."""
    if v.shape[-1] != q.shape[-1]:
        return ""
    missing = _missing(q)
    if missing is not None:
        return missing
    if dropout:
        return "attention dropout is not part of the native operator"
    if mask is not None:
        return "the caller passed an attention mask of its own"
    if torch.compiler.is_compiling() and (sequences is not None or isinstance(q_start, Tensor)):
        return ""
    if sequences is not None and sequences.runs is None:
        return "there is padding inside a sequence"
    given = (q, k, v) if sink_logits is None else (q, k, v, sink_logits)
    if q.device.type == "cuda" and torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return native.NO_GRADIENT
    return native.supports(q)


@cache
def _say_once(why: str) -> None:
    logger.warning("windowed attention runs in pure PyTorch here, which is slower: %s", why)


def _native(q, k, v, windows, sink_tokens, scale, softcap, sink_logits, q_start, kv_start, sequences, limit) -> Tensor:
    if sequences is None:
        layout = {"q_start": q_start - kv_start, "start": -kv_start if kv_start else None}
    else:
        layout = sequences.arranged(q.shape[2], k.shape[2], q_start, kv_start)
    out, _ = native.forward(
        q,
        k,
        v,
        windows,
        sink_tokens,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        limit=limit,
        **layout,
    )
    return out


def _check(q, k, v, windows, sink_tokens, softcap, sink_logits, mask, dropout, limit) -> list[int | None]:
    if (
        q.dim() != 4
        or k.dim() != 4
        or k.shape[:3] != v.shape[:3]
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
    ):
        raise OperatorError(
            "q must be [batch, query_heads, q_len, head_dim] and k, v [batch, kv_heads, kv_len, head_dim]; got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise OperatorError(f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}.")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise OperatorError(f"{heads} query heads cannot share {kv_heads} KV heads evenly.")
    result = check_windows(windows, heads)
    if isinstance(sink_tokens, bool) or not isinstance(sink_tokens, int) or not 0 <= sink_tokens < 2**63:
        raise OperatorError(f"sink_tokens is {sink_tokens!s:.60}; expected an integer >= 0.")
    check_softcap(softcap)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise OperatorError(f"limit is {limit!r}; expected a window >= 1, or None.")
    if not 0.0 <= dropout < 1.0:
        raise OperatorError(f"dropout is {dropout!r}; expected 0 <= dropout < 1.")
    if sink_logits is not None and tuple(sink_logits.shape) != (heads,):
        raise OperatorError(f"sink_logits has shape {tuple(sink_logits.shape)}; expected ({heads},).")
    if mask is not None:
        fits = mask.dim() == 4 and mask.shape[0] in (1, q.shape[0]) and mask.shape[1] in (1, heads)
        if not fits or mask.shape[2] != q.shape[2] or mask.shape[3] < k.shape[2]:
            raise OperatorError(
                f"mask has shape {tuple(mask.shape)}; expected [{q.shape[0]} or 1, {heads} or 1, {q.shape[2]}, "
                f">= {k.shape[2]}]."
            )
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise OperatorError(
                f"mask is of type {mask.dtype}; expected bool (True is seen) or a floating type (added)."
            )
        if mask.requires_grad:
            raise OperatorError("mask requires a gradient, which windowed attention does not compute; detach it.")
    return result


def check_windows(windows: Sequence[int | None] | Tensor, heads: int) -> list[int | None]:
    """One window per query head, as plain integers >= 1 or None.

    Raises:
        OperatorError: another number of windows, or something that is not a window.
    """
    if windows is None or isinstance(windows, (int, str, dict)):
        raise OperatorError(f"windows is {windows!r}; expected one window per query head.")
    given: list[Any] = windows.tolist() if isinstance(windows, Tensor) else list(windows)
    # NumPy's integers count as integers, booleans do not
    result = [operator.index(w) if hasattr(w, "__index__") and not isinstance(w, bool) else w for w in given]
    if len(result) != heads:
        raise OperatorError(
            f"{len(result)} windows were given for {heads} query heads; give one per head. (Heads are the second dimension: "
            "tensors are [batch, heads, length, head_dim].)"
        )
    for head, window in enumerate(result):
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise OperatorError(f"windows[{head}] is {window!r}; expected an integer >= 1, or None for full attention.")
    return result


def check_softcap(softcap: float | None) -> None:
    """Raise unless `softcap` is a finite number above 0, or None."""
    number = isinstance(softcap, (int, float)) and not isinstance(softcap, bool)
    if softcap is not None and not (number and 0 < softcap < float("inf")):
        raise OperatorError(f"softcap is {softcap!r}; expected a finite number > 0, or None for no cap.")


def check_scale(scale: float | None) -> None:
    """Raise unless `scale` is a finite number, or None."""
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise OperatorError(f"scale is {scale!r}; expected a finite number, or None for head_dim ** -0.5.")


def _check_positions(q_start: Any, kv_start: Any, sequences: Any, scale: Any) -> None:
    for name, value, kinds in (
        ("q_start", q_start, (int, torch.SymInt, Tensor)),
        ("kv_start", kv_start, (int, torch.SymInt)),
    ):
        if name == "q_start" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, int) and value < 0):
            raise OperatorError(f"{name} is {value!r}; expected a position, an integer >= 0.")
    if sequences is not None and not isinstance(sequences, Sequences):
        raise OperatorError(
            f"sequences is a {type(sequences).__name__}; expected Sequences(valid=...) for padding, or "
            "Sequences(documents=...) for packing."
        )
    check_scale(scale)
