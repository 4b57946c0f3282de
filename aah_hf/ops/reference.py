"""The truth: which keys a query sees, and attention over exactly those keys in float64.

Every backend is tested against this file. It is written to be read, not to be fast: it builds
the whole [batch, query_heads, q_len, kv_len] mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def visible(
    query_pos: Tensor,
    key_pos: Tensor,
    window: int | Tensor,
    sink_tokens: int,
    *,
    key_rank: Tensor | None = None,
    limit: int | None = None,
) -> Tensor:
    """The rule of attention: may the query at `query_pos` see the key at `key_pos`?

    A query sees itself and the keys before it that lie in its window (`window` keys, itself
    included: FlashAttention's `window_size=(window - 1, 0)`) or are sink tokens, the first
    `sink_tokens` real tokens of its own sequence.

    Args:
        query_pos: absolute positions of the queries, any shape that broadcasts with `key_pos`.
        key_pos: absolute positions of the keys.
        window: keys per query, >= 1; a window of at least the sequence length is full attention.
        sink_tokens: how many first real tokens stay visible.
        key_rank: number of real tokens of the same sequence before each key. Default: `key_pos`
            (no padding, one sequence per row).
        limit: the model's own sliding window, which hides sink tokens too.

    Returns:
        A boolean tensor of the broadcast shape.
    """
    distance = query_pos - key_pos
    rank = key_pos if key_rank is None else key_rank
    seen = (distance >= 0) & ((distance < window) | (rank < sink_tokens))
    return seen if limit is None else seen & (distance < limit)


def visibility(
    windows: Sequence[int] | Tensor,
    q_len: int,
    kv_len: int,
    sink_tokens: int = 0,
    *,
    q_start: int = 0,
    kv_start: int = 0,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    limit: int | None = None,
) -> Tensor:
    """The whole mask, [batch or 1, query_heads, q_len, kv_len], from the rule above.

    Args:
        windows: one window per query head.
        q_len, kv_len: number of queries and of keys.
        sink_tokens: first real tokens of each sequence that every later query sees.
        q_start: position of the first query, >= `kv_start`.
        kv_start: position of the first key (a native sliding cache has dropped earlier ones).
        valid: [batch, kv_start + kv_len] bool, False at padding. Padding is never seen and sees nothing.
        documents: [batch, kv_start + kv_len] integers; tokens see only their own document (packing).
        limit: the model's own sliding window.
    """
    total = kv_start + kv_len
    device = valid.device if valid is not None else documents.device if documents is not None else None
    windows = torch.as_tensor(windows, device=device)
    q_pos = torch.arange(q_start, q_start + q_len, device=device)
    k_pos = torch.arange(kv_start, total, device=device)
    real = torch.ones(1, total, dtype=torch.bool, device=device) if valid is None else valid[:, :total]
    docs = torch.zeros_like(real, dtype=torch.long) if documents is None else documents[:, :total]
    same = docs[:, :, None] == docs[:, None, :]
    earlier = torch.arange(total, device=device)[None, :] < torch.arange(total, device=device)[:, None]
    rank = (same & earlier & real[:, None, :]).sum(-1)  # real tokens of the same document before each token

    seen = visible(
        q_pos[None, None, :, None],
        k_pos[None, None, None, :],
        windows[None, :, None, None],
        sink_tokens,
        key_rank=rank[:, None, None, kv_start:],
        limit=limit,
    )
    allowed = same[:, q_start : q_start + q_len, kv_start:] & real[:, None, kv_start:]
    allowed = allowed & real[:, q_start : q_start + q_len, None]
    return seen & allowed[:, None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[int] | Tensor,
    sink_tokens: int = 0,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    q_start: int = 0,
    kv_start: int = 0,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    limit: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Windowed attention in float64, differentiable through autograd.

    Args:
        q: [batch, query_heads, q_len, head_dim]; k, v: [batch, kv_heads, kv_len, head_dim].
        scale: default `head_dim ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)` (gemma2) before masking.
        sink_logits: [query_heads], a learned logit that takes probability but has no value (gpt_oss).
        mask: [batch or 1, query_heads or 1, q_len, kv_len]; bool (True is seen) or added to the scores.
        The rest as in `visibility`.

    Returns:
        (out [batch, query_heads, q_len, head_dim], log-sum-exp [batch, query_heads, q_len]), float64.
        A query that sees no key gives a zero row and a log-sum-exp of its sink logit, or -inf.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visibility(
        windows,
        q.shape[2],
        k.shape[2],
        sink_tokens,
        q_start=q_start,
        kv_start=kv_start,
        valid=valid,
        documents=documents,
        limit=limit,
    ).to(q.device)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.double()
        seen = seen & (mask > torch.finfo(mask.dtype).min)
    scores = scores.masked_fill(~seen, -math.inf)
    if sink_logits is not None:
        column = sink_logits.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    # a softmax over nothing is NaN and so is its gradient: such rows get finite scores and are zeroed after
    nothing = (scores == -math.inf).all(-1)
    scores = scores.masked_fill(nothing[..., None], 0.0)
    lse = torch.logsumexp(scores, dim=-1)
    probs = torch.exp(scores - lse[..., None])[..., : k.shape[2]].masked_fill(~seen, 0.0)
    return probs @ v, lse.masked_fill(nothing, -math.inf)
