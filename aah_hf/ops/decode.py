"""Attention over a ragged ring cache, and appending to it: what one decoding step does in every layer.

The cache of a layer is one K and one V tensor [batch, slots, head_dim]. KV head `h` owns the slots
`offset[h] … offset[h + 1] - 1`, `cap` of them. A token's *rank* is its position minus `first`, the position of its row's
first real token, so padding takes no slots. The first `sink_tokens` ranks keep their slots, later ones go round in the
`cap - sink_tokens` slots behind them; a buffer that has not wrapped is linear (`csrc/include/aah_cache.h`).

These are the native operators alone, for calls that `supports` finds nothing against. AAHCache calls `decode` and `write_`
where it can and has its own general route (cache_attention.py) for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OperatorError
from . import native
from .attention import check_scale, check_softcap, check_windows


def cached_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    offset: Tensor,
    windows: Sequence[int | None] | Tensor,
    sink_tokens: int,
    past: int,
    first: Tensor,
    *,
    scale: float | None = None,
    limit: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of the new tokens over the cache and themselves (method.md §1, KV coverage: §2).

    Call `append_` afterwards, not before: a new token may take the slot of a key that an earlier one still sees.

    Args:
        q: [batch, query_heads, new, head_dim], any strides. Made for few new tokens (1 … 16); right for any number.
        k_new, v_new: [batch, kv_heads, new, head_dim], not yet in the cache.
        k_cache, v_cache: [batch, slots, head_dim].
        offset: int32 [kv_heads + 1], rising, within `slots`.
        windows: one per query head, None is full; or int32 [query_heads]. A KV head needs a slot per token so far, or
            `sink_tokens` plus the largest window of its query heads minus one.
        sink_tokens: first real tokens of each row that stay visible and keep their slots.
        past: tokens per row before the new ones, padding included; the new ones are at `past … past + new - 1`.
        first: int32 [batch], position of each row's first real token: its left padding.
        scale: factor on the scores, default `head_dim ** -0.5`.
        limit: the model's own sliding window; hides sink tokens too.
        softcap: cap the scores to `softcap * tanh(score / softcap)`.
        sink_logits: [query_heads], a learned logit per head that takes probability and has no value.

    Returns:
        [batch, query_heads, new, head_dim]; zero rows for padding.

    Raises:
        OperatorError: shapes, dtypes or values do not fit together, a KV head has too few slots for its windows, or the
            native operator cannot run here (`supports`).
    """
    _check_cache(k_new, v_new, k_cache, v_cache, offset, sink_tokens, past, first)
    if q.dim() != 4 or q.shape[0] != k_new.shape[0] or q.shape[2:] != k_new.shape[2:] or q.shape[1] % k_new.shape[1]:
        raise OperatorError(
            f"q is {tuple(q.shape)}; expected [{k_new.shape[0]}, a multiple of {k_new.shape[1]}, {k_new.shape[2]}, "
            f"{k_new.shape[3]}]."
        )
    if q.dtype != k_new.dtype:
        raise OperatorError(f"q is of type {q.dtype} and the keys of type {k_new.dtype}; they must be the same.")
    check_softcap(softcap)
    check_scale(scale)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise OperatorError(f"limit is {limit!r}; expected a window >= 1, or None.")
    if sink_logits is not None and tuple(sink_logits.shape) != (q.shape[1],):
        raise OperatorError(f"sink_logits has shape {tuple(sink_logits.shape)}; expected ({q.shape[1]},).")
    tensors = (q, k_new, v_new, k_cache, v_cache, *(() if sink_logits is None else (sink_logits,)))
    _require_native(*tensors)
    if not isinstance(windows, Tensor):
        windows = check_windows(windows, q.shape[1])
    try:
        return decode(
            *(q, k_new, v_new, k_cache, v_cache),
            *(offset, native.window_tensor(windows), sink_tokens, past, first),
            scale=scale,
            limit=limit,
            softcap=softcap,
            sink_logits=sink_logits,
        )
    except RuntimeError as error:
        raise _refusal(error) from None


def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    offset: Tensor,
    windows: Tensor,
    sink_tokens: int,
    past: int,
    first: Tensor,
    *,
    scale: float | None = None,
    limit: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`cached_attention` for a caller whose arguments are right; `windows` are int32 [query_heads].

    The operator still refuses, with a RuntimeError, what would make it read beyond the tensors.
    """
    out, _ = torch.ops.aah.decode.default(
        q.transpose(1, 2),
        k_new.transpose(1, 2),
        v_new.transpose(1, 2),
        k_cache,
        v_cache,
        offset,
        windows,
        first,
        None if sink_logits is None else sink_logits.to(native.accumulator(q.dtype)),
        past,
        sink_tokens,
        native.UNLIMITED if limit is None else min(limit, native.UNLIMITED),
        q.shape[-1] ** -0.5 if scale is None else scale,
        softcap or 0.0,
    )
    return out.transpose(1, 2)


def append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    offset: Tensor,
    first: Tensor,
    past: int,
    sink_tokens: int,
) -> None:
    """Write new tokens into their slots, in place; arguments as in `cached_attention`.

    Padding is not written. Of more new tokens than a ring has slots only the last ones are.

    Raises:
        OperatorError: shapes, dtypes or values do not fit together, a head has fewer slots than sink tokens and is full,
            or the native operator cannot run here (`supports`). Nothing has been written then.
    """
    _check_cache(k_new, v_new, k_cache, v_cache, offset, sink_tokens, past, first)
    _require_native(k_cache, v_cache, k_new, v_new)
    try:
        write_(k_cache, v_cache, k_new, v_new, offset, first, past, sink_tokens)
    except RuntimeError as error:
        raise _refusal(error) from None


def write_(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    offset: Tensor,
    first: Tensor,
    past: int,
    sink_tokens: int,
) -> None:
    """`append_` for a caller whose arguments are right (see `decode`)."""
    torch.ops.aah.cache_append_.default(
        k_cache, v_cache, k_new.transpose(1, 2), v_new.transpose(1, 2), offset, first, past, sink_tokens
    )


def supports(*tensors: Tensor) -> str | None:
    """Why the native operators cannot take these queries, keys, values, buffers or logits; None where they can."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "they have no gradients"
    if any(t.device.type != "cpu" for t in tensors):
        return "they have no code for tensors outside the CPU yet"
    if not native.available():
        return "they are not available (`aah info` says why)"
    return native.supports(tensors[0])


# --- checks -----------------------------------------------------------------------------------------------------


def _require_native(*tensors: Tensor) -> None:
    why = supports(*tensors)
    if why is not None:
        raise OperatorError(f"the native operators of a ring cache cannot run here: {why}.")


def _check_cache(k_new, v_new, k_cache, v_cache, offset, sink_tokens, past, first) -> None:
    if k_new.dim() != 4 or k_new.shape != v_new.shape or k_new.shape[1] == 0:
        raise OperatorError(
            "k_new and v_new must both be [batch, kv_heads, new, head_dim]; got "
            f"{tuple(k_new.shape)} and {tuple(v_new.shape)}."
        )
    batch, kv_heads, new, head_dim = k_new.shape
    fits = k_cache.dim() == 3 and k_cache.shape == v_cache.shape
    if not fits or k_cache.shape[0] != batch or k_cache.shape[2] != head_dim:
        raise OperatorError(
            f"k_cache and v_cache must both be [{batch}, slots, {head_dim}]; got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}."
        )
    if not k_new.dtype == v_new.dtype == k_cache.dtype == v_cache.dtype or not k_new.is_floating_point():
        raise OperatorError(
            f"cache and new tokens must share one floating dtype, got {k_cache.dtype}, {v_cache.dtype}, {k_new.dtype}, "
            f"{v_new.dtype}."
        )
    for name, numbers, length in (("offset", offset, kv_heads + 1), ("first", first, batch)):
        if numbers.dtype != torch.int32 or tuple(numbers.shape) != (length,):
            raise OperatorError(
                f"{name} is {numbers.dtype} of shape {tuple(numbers.shape)}; expected torch.int32 ({length},)."
            )
    if isinstance(sink_tokens, bool) or not isinstance(sink_tokens, int) or sink_tokens < 0:
        raise OperatorError(f"sink_tokens is {sink_tokens!r}; expected an integer >= 0.")
    if isinstance(past, bool) or not isinstance(past, (int, torch.SymInt)) or not 0 <= past <= 2**31 - 1 - new:
        raise OperatorError(f"past is {past!r}; expected an integer >= 0, with the new tokens below 2^31.")


def _refusal(error: RuntimeError) -> Exception:
    """What the native operator refused, as an error of ours; another error as it is."""
    _, ours, said = str(error).splitlines()[0].partition("aah: ")
    return OperatorError(said) if ours else error


__all__ = ["append_", "cached_attention", "decode", "supports", "write_"]
