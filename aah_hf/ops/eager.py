"""Windowed attention in pure PyTorch: any device and dtype, forward and backward, no T×T mask.

The work follows causal coverage: heads that share a window go together, their queries in blocks,
each block against the sink tokens and the key slice that its window needs. Backward recomputes block
by block from q, k and v, so that memory stays linear in the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import visible
from .sequences import Run, Sequences


@dataclass(frozen=True)
class Options:
    """What all blocks of one call share; see `windowed_attention` for the meaning."""

    sink_tokens: int = 0
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    limit: int | None = None


@dataclass(frozen=True)
class Block:
    """Some rows' queries of some heads against the keys they may see. All indices count from the tensors' start.

    `mask` is True (or an added bias) where a key is seen, [rows or 1, 1 or heads, queries, keys]; None means
    every key, unless `causal` says lower triangle. `may_be_empty` marks masks that can hide all keys of a query.
    """

    rows: tuple[int, ...] | None
    heads: tuple[int, ...]
    queries: slice
    keys: tuple[slice, ...]
    mask: Tensor | None = None
    causal: bool = False
    may_be_empty: bool = False


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[int],
    options: Options,
    *,
    sink_logits: Tensor | None = None,
    q_start: int | Tensor = 0,
    kv_start: int = 0,
    sequences: Sequences | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention output [batch, query_heads, q_len, head_dim]; arguments are already validated."""
    blocks = tuple(_blocks(q, k, windows, options, q_start, kv_start, sequences, mask))
    inputs = [t for t in (q, k, v, sink_logits) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return _Blockwise.apply(q, k, v, sink_logits, blocks, options)
    return _run(q, k, v, sink_logits, blocks, options)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink_logits, blocks, options):
        ctx.save_for_backward(q, k, v, sink_logits)
        ctx.blocks, ctx.options = blocks, options
        ctx.rng = _rng_state(q.device) if options.dropout else None
        return _run(q, k, v, sink_logits, blocks, options)

    @staticmethod
    @once_differentiable  # a second derivative raises instead of being silently wrong
    def backward(ctx, dout):
        q, k, v, sink_logits = ctx.saved_tensors
        # blocks of several heads add into the same keys: accumulate in at least single precision
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
        dlogits = None if sink_logits is None else torch.zeros_like(sink_logits, dtype=wide)
        with _replayed_rng(ctx.rng, q.device):
            for block in ctx.blocks:
                heads = _index(block.heads, q.device)
                parts = [_take(q, block), *_keys(k, block, q), *_keys(v, block, q)]
                if sink_logits is not None:
                    parts.append(sink_logits[heads])
                with torch.enable_grad():
                    parts = [p.detach().requires_grad_() for p in parts]
                    n = len(block.keys)
                    logits = parts[-1] if sink_logits is not None else None
                    out = _attend(
                        parts[0], torch.cat(parts[1 : 1 + n], 2), torch.cat(parts[1 + n : 1 + 2 * n], 2), logits, block,
                        ctx.options,
                    )  # fmt: skip
                    grads = torch.autograd.grad(out, parts, _take(dout, block), allow_unused=True)
                _add(dq, block, block.heads, block.queries, grads[0])
                kv_heads = _kv_heads(block, q, k)
                for piece, gk, gv in zip(block.keys, grads[1 : 1 + n], grads[1 + n : 1 + 2 * n]):
                    _add(dk, block, kv_heads, piece, gk)
                    _add(dv, block, kv_heads, piece, gv)
                if dlogits is not None:
                    dlogits[heads] += grads[-1]
        return (
            dq.to(q.dtype),
            dk.to(k.dtype),
            dv.to(v.dtype),
            None if dlogits is None else dlogits.to(sink_logits),
            None,
            None,
        )


def _run(
    q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, blocks: Sequence[Block], options: Options
) -> Tensor:
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for block in blocks:
        logits = None if sink_logits is None else sink_logits[_index(block.heads, q.device)]
        result = _attend(
            _take(q, block), torch.cat(_keys(k, block, q), 2), torch.cat(_keys(v, block, q), 2), logits, block, options
        )
        if block.rows is None:
            out[:, _index(block.heads, q.device), block.queries] = result
        else:
            out[_index(block.rows, q.device)[:, None], _index(block.heads, q.device), block.queries] = result
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, block: Block, options: Options) -> Tensor:
    """Attention of one block; q [rows, heads, queries, head_dim], k and v [rows, heads, keys, head_dim]."""
    mask, seen = block.mask, None
    if block.may_be_empty and mask is not None:
        # SDPA turns a row without keys into NaN: let it see everything and zero its output and gradient
        seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).any(-1, keepdim=True)
        mask = mask | ~seen if mask.dtype == torch.bool else mask.masked_fill(~seen, 0.0)
    if options.softcap is None and sink_logits is None:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=options.dropout, is_causal=block.causal, scale=options.scale
        )
    else:
        out = _attend_with_logits(q, k, v, sink_logits, mask, block.causal, options)
    return out if seen is None else torch.where(seen, out, 0.0)


def _attend_with_logits(q, k, v, sink_logits, mask, causal, options: Options) -> Tensor:
    """The cases SDPA has no argument for: capped scores (gemma2) and learned sink logits (gpt_oss)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (
        q.to(wide) @ k.to(wide).transpose(-1, -2) * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    )
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    probs = F.dropout(torch.softmax(scores, -1)[..., : k.shape[2]], options.dropout)
    return (probs @ v.to(wide)).to(q.dtype)


def _blocks(q, k, windows, options, q_start, kv_start, sequences, mask) -> Iterator[Block]:
    groups: dict[int, list[int]] = {}
    for head, window in enumerate(windows):
        groups.setdefault(window, []).append(head)
    total = kv_start + k.shape[2]
    runs = (Run((), 0, total),) if sequences is None else sequences.runs
    for window, members in groups.items():
        heads = tuple(members)
        if runs is None or mask is not None or isinstance(q_start, Tensor):
            yield from _masked(q, k, window, heads, options, q_start, kv_start, sequences, mask)
            continue
        for run in runs:
            first, last = max(run.start, q_start), min(run.end, q_start + q.shape[2])
            if first < last:
                yield from _banded(q, window, heads, options, q_start, kv_start, run, first, last)


def _banded(q, window, heads, options, q_start, kv_start, run: Run, first: int, last: int) -> Iterator[Block]:
    """Queries first … last - 1 (absolute) of one contiguous sequence, split by what limits their sight."""
    rows = None if len(run.rows) in (0, q.shape[0]) else run.rows
    sinks, limit = options.sink_tokens, options.limit
    if limit is not None and limit <= window:
        window, sinks, limit = limit, 0, None
    start, low = run.start, max(run.start, kv_start)
    block = 64 if window <= 128 else 128 if window <= 512 else 256

    def make(a: int, b: int, keys: list[tuple[int, int]], mask=None, causal=False) -> Block:
        pieces = tuple(slice(x - kv_start, y - kv_start) for x, y in keys)
        return Block(rows, heads, slice(a - q_start, b - q_start), pieces, mask, causal)

    def rule(a: int, b: int, keys: list[tuple[int, int]], sinks: int, limit: int | None) -> Tensor | None:
        if b - a == 1 and limit is None:
            return None  # a lone query was given just the keys that it sees
        positions = torch.cat([torch.arange(x, y, device=q.device) for x, y in keys]) - start
        return visible(torch.arange(a, b, device=q.device)[:, None] - start, positions, window, sinks, limit=limit)

    # 1. until window and sinks touch, a query sees everything before it
    everything = min(last, start + window + sinks, start + limit if limit is not None else last)
    if first < everything and first == low:
        yield make(first, everything, [(low, everything)], causal=True)
    else:
        for a in range(first, everything, block):
            b = min(a + block, everything)
            yield make(a, b, [(low, b)], rule(a, b, [(low, b)], sinks, None))

    # 2. a band and all sinks; every block has the same mask but for a shorter last one
    # 3. where the model's own window hides the sinks one by one
    # 4. a band alone
    at = max(first, everything)
    with_sinks = last if limit is None else max(at, min(last, start + limit))
    fading = last if limit is None else max(with_sinks, min(last, start + limit + sinks))
    for begin, end, kept, hidden in (
        (at, with_sinks, sinks, None),
        (with_sinks, fading, sinks, limit),
        (fading, last, 0, None),
    ):
        mask, shape = None, None
        for a in range(begin, end, block):
            b = min(a + block, end)
            band = (max(low, a - window + 1), b)
            keys = [(low, min(start + kept, band[0])), band] if low < min(start + kept, band[0]) else [band]
            if shape != (b - a, len(keys)) or hidden is not None:
                mask, shape = rule(a, b, keys, kept, hidden), (b - a, len(keys))
            yield make(a, b, keys, mask)


def _masked(q, k, window, heads, options, q_start, kv_start, sequences, mask) -> Iterator[Block]:
    """Padding inside a sequence, a caller's own mask, or a query position known only on the device.

    Correct for anything, and slower: every block reads all keys.
    """
    kv_len, block = k.shape[2], 256
    key_pos = torch.arange(kv_start, kv_start + kv_len, device=q.device)
    if sequences is not None:
        sequences = sequences.to(q.device)
        rank = sequences.rank[:, None, None, kv_start : kv_start + kv_len]
    for a in range(0, q.shape[2], block):
        b = min(a + block, q.shape[2])
        query_pos = (torch.arange(a, b, device=q.device) + q_start)[:, None]
        seen = visible(
            query_pos,
            key_pos,
            window,
            options.sink_tokens,
            key_rank=None if sequences is None else rank,
            limit=options.limit,
        )
        seen = seen if seen.dim() == 4 else seen[None, None]
        if sequences is not None:
            at = query_pos[:, 0]
            valid = sequences.valid
            seen = seen & valid[:, None, None, kv_start : kv_start + kv_len] & valid[:, None, at, None]
            if sequences.documents is not None:
                docs = sequences.documents
                seen = seen & (docs[:, None, at, None] == docs[:, None, None, kv_start : kv_start + kv_len])
        if mask is not None:
            part = mask[:, list(heads) if mask.shape[1] > 1 else slice(None), a:b, :kv_len]
            seen = seen & part if part.dtype == torch.bool else part.masked_fill(~seen, -torch.inf)
        yield Block(None, heads, slice(a, b), (slice(0, kv_len),), seen, may_be_empty=True)


def _index(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def _kv_heads(block: Block, q: Tensor, k: Tensor) -> tuple[int, ...]:
    group = q.shape[1] // k.shape[1]
    return tuple(head // group for head in block.heads)


def _gather(t: Tensor, block: Block, heads: tuple[int, ...], where: slice) -> Tensor:
    t = t[:, :, where]
    if block.rows is not None:
        return t[_index(block.rows, t.device)[:, None], _index(heads, t.device)]
    return t if heads == tuple(range(t.shape[1])) else t[:, _index(heads, t.device)]


def _take(t: Tensor, block: Block) -> Tensor:
    return _gather(t, block, block.heads, block.queries)


def _keys(t: Tensor, block: Block, q: Tensor) -> list[Tensor]:
    heads = _kv_heads(block, q, t)
    return [_gather(t, block, heads, piece) for piece in block.keys]


def _add(target: Tensor, block: Block, heads: tuple[int, ...], where: slice, value: Tensor) -> None:
    rows = block.rows if block.rows is not None else tuple(range(target.shape[0]))
    index = (_index(rows, target.device)[:, None], _index(heads, target.device)[None])
    target[:, :, where].index_put_(index, value.to(target.dtype), accumulate=True)


def _rng_state(device: torch.device):
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


class _replayed_rng:
    """Backward draws the dropout masks of forward again, then puts the generators back."""

    def __init__(self, state, device: torch.device) -> None:
        self.state, self.device = state, device

    def __enter__(self) -> None:
        if self.state is not None:
            self.now = _rng_state(self.device)
            self._set(self.state)

    def __exit__(self, *exc) -> None:
        if self.state is not None:
            self._set(self.now)

    def _set(self, state) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)
