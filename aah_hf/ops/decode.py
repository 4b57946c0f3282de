"""Attention over a ragged ring cache, and appending to it: what one decoding step does in every layer.

The cache of a layer is one K and one V tensor [batch, slots, head_dim]. KV head `h` owns the slots
`offset[h] … offset[h + 1] - 1`, `cap` of them. A token's *rank* is its position minus `first`, the position of its row's
first real token, so padding takes no slots. The first `sink_tokens` ranks keep their slots, later ones go round in the
`cap - sink_tokens` slots behind them; a buffer that has not wrapped is linear. The slot rule is in `csrc/include/aah_cache.h`
for the native operator and in `slots` here for its pure PyTorch twin; tests/test_decode.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import OperatorError
from . import native
from .attention import check_windows, windowed_attention
from .reference import visible
from .sequences import Sequences


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

    Call `append_` afterwards, not before: a new token may take the slot of a key that an earlier one still sees. The
    native operator runs for CPU tensors that need no gradients; else pure PyTorch gathers the keys that are held and
    calls `windowed_attention`, which is differentiable, also through `append_`.

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
        OperatorError: shapes, dtypes or values do not fit together, or a KV head has too few slots for its windows.
    """
    _check_cache(k_new, v_new, k_cache, v_cache, offset, sink_tokens, past, first)
    if q.dim() != 4 or q.shape[0] != k_new.shape[0] or q.shape[2:] != k_new.shape[2:] or q.shape[1] % k_new.shape[1]:
        raise OperatorError(
            f"q is {tuple(q.shape)}; expected [{k_new.shape[0]}, a multiple of {k_new.shape[1]}, {k_new.shape[2]}, "
            f"{k_new.shape[3]}]."
        )
    if q.dtype != k_new.dtype:
        raise OperatorError(f"q is of type {q.dtype} and the keys of type {k_new.dtype}; they must be the same.")
    if softcap is not None and not softcap > 0:
        raise OperatorError(f"softcap is {softcap!r}; expected a number > 0, or None for no cap.")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise OperatorError(f"limit is {limit!r}; expected a window >= 1, or None.")
    if sink_logits is not None and tuple(sink_logits.shape) != (q.shape[1],):
        raise OperatorError(f"sink_logits has shape {tuple(sink_logits.shape)}; expected ({q.shape[1]},).")
    tensors = (q, k_new, v_new, k_cache, v_cache, *(() if sink_logits is None else (sink_logits,)))
    if not _is_native(*tensors):
        windows = check_windows(windows, q.shape[1])
        return _gathered(
            q,
            k_new,
            v_new,
            k_cache,
            v_cache,
            offset,
            windows,
            sink_tokens,
            past,
            first,
            scale,
            limit,
            softcap,
            sink_logits,
        )
    if not isinstance(windows, Tensor):
        windows = check_windows(windows, q.shape[1])
    try:
        out, _ = torch.ops.aah.decode.default(
            q.transpose(1, 2),
            k_new.transpose(1, 2),
            v_new.transpose(1, 2),
            k_cache,
            v_cache,
            offset,
            native.window_tensor(windows),
            first,
            None if sink_logits is None else sink_logits.to(native.accumulator(q.dtype)),
            past,
            sink_tokens,
            native.UNLIMITED if limit is None else min(limit, native.UNLIMITED),
            q.shape[-1] ** -0.5 if scale is None else scale,
            softcap or 0.0,
        )
    except RuntimeError as error:
        raise _refusal(error) from None
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

    Padding is not written. Of more new tokens than a ring has slots only the last ones are. Where gradients are needed
    the cache becomes part of the graph.

    Raises:
        OperatorError: shapes, dtypes or values do not fit together, or a head has fewer slots than sink tokens and
            is full. Nothing has been written then.
    """
    _check_cache(k_new, v_new, k_cache, v_cache, offset, sink_tokens, past, first)
    if _is_native(k_cache, v_cache, k_new, v_new):
        try:
            torch.ops.aah.cache_append_.default(
                k_cache, v_cache, k_new.transpose(1, 2), v_new.transpose(1, 2), offset, first, past, sink_tokens
            )
        except RuntimeError as error:
            raise _refusal(error) from None
        return
    borders, starts = _values(offset, first, k_cache.shape[1])
    new = k_new.shape[2]
    for head, begin in enumerate(borders[:-1]):
        cap = borders[head + 1] - begin
        for start in starts:
            if cap < sink_tokens and past + new - start > cap:
                raise OperatorError(_too_few(head, cap, past + new - start, sink_tokens))
    rank = torch.arange(past, past + new, device=k_new.device) - first.to(k_new.device)[:, None]  # [batch, new]
    for head, begin in enumerate(borders[:-1]):
        cap = borders[head + 1] - begin
        slot = slots(rank, cap, sink_tokens)
        last = rank[:, -1:] - (cap - sink_tokens)  # overwritten by a later one up to here
        rows, columns = ((slot >= 0) & ((rank < sink_tokens) | (rank > last))).nonzero(as_tuple=True)
        at = (rows, begin + slot[rows, columns])
        k_cache[at] = k_new[rows, head, columns]
        v_cache[at] = v_new[rows, head, columns]


def slots(rank: Tensor, cap: int, sink_tokens: int) -> Tensor:
    """Slot of each rank in a KV head of `cap` slots; -1 for padding and where nothing is kept."""
    ring = cap - sink_tokens
    fixed = torch.where((rank >= 0) & (rank < cap), rank, -1)
    if ring <= 0:
        return torch.where(rank < sink_tokens, fixed, -1)
    return torch.where(rank < sink_tokens, fixed, sink_tokens + (rank - sink_tokens) % ring)


# --- the pure PyTorch twin --------------------------------------------------------------------------------------


def _gathered(
    q, k_new, v_new, k_cache, v_cache, offset, windows, sink_tokens, past, first, scale, limit, softcap, sink_logits
) -> Tensor:
    """`windowed_attention` over [sinks, ring in order of position, new tokens], KV heads of equal size together.

    Dropping the keys between sinks and ring keeps all distances within the ring, and sinks stay the first tokens. Only a
    `limit` asks for a sink's true distance.
    """
    borders, starts = _values(offset, first, k_cache.shape[1])
    group = q.shape[1] // k_new.shape[1]
    heads_of: dict[int, list[int]] = {}
    for head, begin in enumerate(borders[:-1]):
        heads_of.setdefault(borders[head + 1] - begin, []).append(head)
    outputs, order = [], []
    for cap, heads in heads_of.items():
        queries = [head * group + i for head in heads for i in range(group)]
        for start in starts:
            _check_kept(past - start, cap, heads, [windows[h] for h in queries], sink_tokens, limit)
        rank, mask, sequences = _held(starts, past, q.shape[2], cap, sink_tokens, limit, q.device)
        cached = rank[:, : rank.shape[1] - q.shape[2]]
        begin = torch.tensor([borders[head] for head in heads], device=q.device)
        at = begin[None, :, None] + slots(cached, cap, sink_tokens).clamp_min(0)[:, None]  # [batch, heads, keys]
        rows = torch.arange(q.shape[0], device=q.device)[:, None, None]
        everything = len(heads_of) == 1
        outputs.append(
            windowed_attention(
                q if everything else q[:, queries],
                torch.cat([k_cache[rows, at], k_new if everything else k_new[:, heads]], dim=2),
                torch.cat([v_cache[rows, at], v_new if everything else v_new[:, heads]], dim=2),
                [windows[h] for h in queries],
                sink_tokens,
                scale=scale,
                softcap=softcap,
                sink_logits=sink_logits if sink_logits is None or everything else sink_logits[queries],
                sequences=sequences,
                limit=limit,
                mask=mask,
            )
        )
        order += queries
    if len(outputs) == 1:
        return outputs[0]
    back = torch.tensor(order, device=q.device).argsort()
    return torch.cat(outputs, dim=1)[:, back]


def _held(starts, past, new, cap, sink_tokens, limit, device) -> tuple[Tensor, Tensor | None, Sequences | None]:
    """Ranks of the keys that a KV head of `cap` slots holds and of the new tokens, [batch, keys + new].

    Rows are aligned on the right and filled with -1. Also the mask and the sequences that `windowed_attention` needs.
    """
    counts = [max(past - start, 0) for start in starts]
    ring = max(cap - sink_tokens, 0)
    held = [n if n <= cap else min(n, sink_tokens + ring) for n in counts]
    longest = max(held, default=0)
    column = torch.arange(longest, device=device)[None]
    count, kept = (torch.tensor(x, device=device)[:, None] for x in (counts, held))
    index = column - (longest - kept)  # number among the row's held keys; negative: fill
    cached = torch.where(index < sink_tokens, index, index + count - kept)
    start = torch.tensor(starts, device=device)[:, None]
    fresh = torch.arange(past, past + new, device=device)[None] - start
    rank = torch.cat([torch.where(index < 0, -1, cached), fresh.clamp_min(-1)], dim=1)
    valid = rank >= 0
    sequences = None if len(set(held)) <= 1 and max(starts, default=0) <= past else Sequences(valid)
    mask = None
    if limit is not None and held != counts and ring < limit - 1:  # moved together, sinks look nearer than they are
        mask = visible(fresh[:, None, :, None], rank[:, None, None, :], past + new, 0, limit=limit)
    return rank, mask, sequences


# --- checks -----------------------------------------------------------------------------------------------------


def _is_native(*tensors: Tensor) -> bool:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return all(t.device.type == "cpu" for t in tensors) and native.available() and native.supports(tensors[0]) is None


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


def _values(offset: Tensor, first: Tensor, capacity: int) -> tuple[list[int], list[int]]:
    borders, starts = offset.tolist(), first.tolist()
    if borders[0] < 0 or borders[-1] > capacity or borders != sorted(borders):
        raise OperatorError(f"offset is {borders}; expected rising numbers from 0 to at most the {capacity} slots.")
    if min(starts, default=0) < 0:
        raise OperatorError(f"first is {starts}; expected positions >= 0.")
    return borders, starts


def _check_kept(count, cap, heads, windows, sink_tokens, limit) -> None:
    if count <= cap:
        return
    widest = max(count + 1 if w is None else w for w in windows)
    widest = widest if limit is None else min(widest, limit)
    if cap < sink_tokens or widest - 1 > cap - sink_tokens:
        raise OperatorError(_too_few(heads[0], cap, count, sink_tokens, widest))


def _too_few(head: int, cap: int, count: int, sink_tokens: int, window: int = 1) -> str:
    return (
        f"KV head {head} has {cap} slots for {count} tokens: too few for {sink_tokens} sink tokens and a window of "
        f"{window}. It needs {sink_tokens + window - 1} slots, or one per token."
    )


__all__ = ["append_", "cached_attention", "slots"]
