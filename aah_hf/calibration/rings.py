"""Squared output errors of all candidate windows in one pass over the keys, ring by ring (method.md §8)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

QUERY_BLOCK = 64

_LOWEST = -1e30  # instead of -inf for "no key": the difference of two of these is 0, not NaN


def query_blocks(seq_len: int, stride: int, measure_from: float) -> list[tuple[int, int]]:
    """(start, stop) of the blocks of queries that are measured; the last block is always one of them."""
    first = min(int(seq_len * measure_from), seq_len - 1) // QUERY_BLOCK * QUERY_BLOCK
    blocks = [(start, min(start + QUERY_BLOCK, seq_len)) for start in range(first, seq_len, QUERY_BLOCK)]
    return blocks[::-1][::stride][::-1]


def window_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Tensor,
    windows: Sequence[int],
    *,
    sink_tokens: int,
    scale: float,
    target: Tensor | None = None,
    limit: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    query_stride: int = 1,
    measure_from: float = 0.0,
) -> Tensor:
    """Squared output error of every candidate window and of full attention, per head and query.

    The keys of nested windows form rings of growing distance. Scores and exponentials are computed
    once, each ring's sums are added to those of the rings inside it, and sink tokens are the innermost
    ring of all. Every ring carries its own maximum, so a window that misses the strongest keys does
    not underflow. Work goes block by block over the queries: the largest tensor is
    [query_heads, 64, seq_len].

    Args:
        q: [query_heads, seq_len, head_dim]; k, v: [kv_heads, seq_len, head_dim].
        factors: [query_heads, head_dim, head_dim], see `output_factors`.
        windows: ascending.
        target: [query_heads, seq_len, head_dim], multiplied by the factors; what outputs are compared with.
            Default: full attention of these q, k and v.
        limit: the layer's own sliding window, which hides sink tokens too.
        softcap, sink_logits: as in `windowed_attention`.

    Returns:
        [windows + 1, query_heads, seq_len] float32; 0 at queries that `query_stride` and `measure_from` skip.
    """
    q, k, v = q.float() * scale, k.float().transpose(1, 2).contiguous(), v.float()
    heads, seq_len, dim = q.shape
    group = heads // k.shape[0]
    # zero rows in front: the rings of a block's first queries reach before the first key
    values = torch.zeros(heads, QUERY_BLOCK - 1 + seq_len, dim, dtype=torch.float32, device=q.device)
    torch.matmul(v.repeat_interleave(group, 0), factors.to(q.device), out=values[:, QUERY_BLOCK - 1 :])
    errors = torch.zeros(len(windows) + 1, heads, seq_len, dtype=torch.float32, device=q.device)
    work = torch.empty(2, heads * QUERY_BLOCK * (seq_len + QUERY_BLOCK), dtype=torch.float32, device=q.device)
    q = q.view(-1, group, seq_len, dim)
    for start, stop in query_blocks(seq_len, query_stride, measure_from):
        count = sum(w < stop for w in windows)  # windows that may hide something from this block
        if target is None and (not count or windows[0] + sink_tokens >= stop):
            continue
        rows = q[:, :, start:stop].reshape(len(q), -1, dim)
        outputs = _nested_outputs(
            rows,
            k[:, :, :stop],
            values,
            windows[:count],
            sink_tokens,
            limit,
            stop - start,
            work,
            softcap=softcap,
            sink_logits=sink_logits,
        )
        wanted = outputs[-1].clone() if target is None else target[:, start:stop].to(q.device)
        squares = [output.sub_(wanted).square_().sum(-1) for output in outputs]
        for index, row in enumerate(errors):
            row[:, start:stop] = squares[min(index, count)]  # windows beyond the block are full attention
    return errors


def _nested_outputs(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    windows: Sequence[int],
    sinks: int,
    limit: int | None,
    block: int,
    work: Tensor,
    *,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> list[Tensor]:
    """Attention outputs [query_heads, block, dim] of one block of queries under every window, then full attention.

    Args:
        rows: [kv_heads, group · block, head_dim] queries, scaled; keys: [kv_heads, head_dim, stop], those
            up to the block's last query.
        values: [query_heads, QUERY_BLOCK − 1 + seq_len, dim].
        windows: ascending, below `stop`.
        work: two scratch buffers; fresh ones for every ring would be dominated by page faults.
    """
    heads, stop = len(values), keys.shape[2]
    pad, width = block - 1, stop + block - 1
    scores = work[0, : heads * block * width].view(heads, block, width)
    scores[:, :, :pad] = -torch.inf
    torch.bmm(rows, keys, out=scores.view(len(keys), -1, width)[:, :, pad:])
    if softcap is not None:
        scores[:, :, pad:].div_(softcap).tanh_().mul_(softcap)
    # A row stride of width + 1 shifts each query's scores by one against the query before it: columns turn into
    # distances (column c is distance stop - 1 - c), a ring is a slice, and keys after the query are never read.
    by_distance = scores.as_strided((heads, block, stop), (block * width, width + 1, 1))
    if limit is not None and limit < stop:
        by_distance[..., : stop - limit] = -torch.inf

    outputs: list[Tensor] = []
    top = torch.full((heads, block, 1), _LOWEST, dtype=rows.dtype, device=rows.device)
    total, summed = torch.zeros_like(top), rows.new_zeros(heads, block, values.shape[2])
    if sink_logits is not None:  # a ring that everybody sees, of one key without a value
        top = sink_logits.to(top)[:, None, None].expand_as(top).clone()
        total = torch.ones_like(top)
    if sinks:
        sink_scores = scores[:, :, pad : pad + sinks].clone()
        positions = torch.arange(stop - block, stop, device=rows.device)
        later = torch.arange(sink_scores.shape[2], device=rows.device) > positions[:, None]
        sink_scores.masked_fill_(later, -torch.inf)
        scores[:, :, pad : pad + sinks] = -torch.inf  # from here on they belong to no ring
        both = torch.maximum(top, sink_scores.amax(-1, keepdim=True))
        weights = sink_scores.sub_(both).exp_()
        total = total * (top - both).exp_() + weights.sum(-1, keepdim=True)
        top = both
        first = QUERY_BLOCK - 1
        summed = torch.bmm(weights, values[:, first : first + weights.shape[2]])

    edges = [0, *windows, stop]
    for near, far in pairwise(edges):
        ring = by_distance[..., stop - far : stop - near]  # distances far - 1 … near
        columns = far - near + pad
        weights = work[1, : heads * block * columns].view(heads, block, columns)
        weights[..., :pad] = 0  # two triangles of neighbouring rings
        weights[..., columns - pad :] = 0
        slanted = weights.as_strided(ring.shape, (block * columns, columns + 1, 1))
        ring_top = ring.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        torch.sub(ring, ring_top, out=slanted)
        slanted.exp_()
        first = stop - block - far + 1 + QUERY_BLOCK - 1  # key at distance far - 1 of the block's first query
        both = torch.maximum(top, ring_top)
        old, new = (top - both).exp_(), (ring_top - both).exp_()
        total = total * old + slanted.sum(-1, keepdim=True) * new
        summed = summed * old + torch.bmm(weights, values[:, first : first + columns]) * new
        top = both
        outputs.append(summed / total)
    return outputs
