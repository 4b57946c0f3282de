"""The paper's nine numbers per query head, and the same for groups (method.md §3).

Six describe the activations that attention sees (after q/k norm and rotary embedding): mean of
absolute values and standard deviation of q, k and v. Three describe attention itself: entropy,
norm of the output, attention paid to the last key.

Activations are reduced to `Moments` where they lie, 9 numbers per head that determine the features
of every head and of every union of heads; only those travel to the CPU, where grouping happens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aah_hf.calibration.grouping import Groups, shares
from aah_hf.errors import CalibrationError

FEATURES = ("q_mean_abs", "q_std", "k_mean_abs", "k_std", "v_mean_abs", "v_std", "entropy", "output_norm", "usage")
"""Names of the columns of head and group features."""


@dataclass(frozen=True)
class Moments:
    """What q, k and v of one layer amount to, per query head.

    Attributes:
        mean_abs: [3, query_heads] float32, mean of absolute values of q, k, v.
        mean: [3, query_heads] float32.
        squares: [3, query_heads] float32, mean squared deviation from `mean`.
        count: [3], numbers behind each mean: batch · time · channels.
    """

    mean_abs: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class HeadStatistics:
    """How the heads of one layer attended in one step.

    Attributes:
        entropy: [query_heads], of the attention rows, over log(T): 0 to 1.
        output_norm: [query_heads], mean Euclidean norm of the output vectors.
        usage: [query_heads], attention paid to the last key, averaged over queries.
    """

    entropy: np.ndarray
    output_norm: np.ndarray
    usage: np.ndarray

    @staticmethod
    def zeros(query_heads: int) -> HeadStatistics:
        """What the paper starts from: nothing is known before the first step."""
        empty = np.zeros(query_heads, dtype=np.float32)
        return HeadStatistics(empty, empty, empty)


@torch.no_grad()
def moments(q: Tensor, k: Tensor, v: Tensor) -> Moments:
    """Reduces one layer's activations, over batch, time and channels.

    Args:
        q: [batch, query_heads, time, head_dim], any float dtype and device.
        k, v: [batch, kv_heads, time, head_dim] (the value's head_dim may differ). A query head's entries
            are those of the KV head that it reads.

    Raises:
        CalibrationError: query heads that are no multiple of the KV heads.
    """
    heads = q.shape[1]
    rows = []
    for x in (q, k, v):
        if x.ndim != 4 or heads % x.shape[1]:
            raise CalibrationError(
                f"q, k and v must be [batch, heads, time, head_dim] with query heads a multiple of KV heads, "
                f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
            )
        x = x.float()
        variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
        row = torch.stack([x.abs().mean(dim=(0, 2, 3)), mean, variance])
        rows.append(row.repeat_interleave(heads // x.shape[1], dim=1))
    mean_abs, mean, squares = torch.stack(rows, dim=1).cpu().numpy()  # one transfer
    return Moments(mean_abs, mean, squares, count=np.array([x[:, 0].numel() for x in (q, k, v)]))


def head_features(activations: Moments, attention: HeadStatistics) -> np.ndarray:
    """[query_heads, 9] float32, columns as in `FEATURES`; `attention` is that of the step before."""
    std = np.sqrt(activations.squares * _unbiased(activations.count[:, None]))
    return _columns(activations.mean_abs, std, attention.entropy, attention.output_norm, attention.usage)


def group_features(activations: Moments, attention: HeadStatistics, groups: Groups) -> np.ndarray:
    """[groups, 9] float32: the features of all members' activations taken together.

    Entropy, output norm and usage are means over members. A KV head that several members read counts
    once for each of them.
    """
    size = np.array([len(group) for group in groups])
    member = shares(groups, activations.mean.shape[1])
    mean = activations.mean @ member.T
    # law of total variance, with deviations taken from the group's mean so that nothing cancels
    deviation = activations.mean[:, None, :] - mean[:, :, None]
    variance = activations.squares @ member.T + (member * deviation**2).sum(axis=-1)
    std = np.sqrt(variance * _unbiased(activations.count[:, None] * size))
    rest = (member @ x for x in (attention.entropy, attention.output_norm, attention.usage))
    return _columns(activations.mean_abs @ member.T, std, *rest)


def _unbiased(count: np.ndarray) -> np.ndarray:
    return count / np.maximum(count - 1, 1)


def _columns(mean_abs: np.ndarray, std: np.ndarray, *rest: np.ndarray) -> np.ndarray:
    rows = [mean_abs[0], std[0], mean_abs[1], std[1], mean_abs[2], std[2], *rest]
    return np.array(rows, dtype=np.float32).T.copy()


def smooth(average: np.ndarray | None, value: np.ndarray, ema: float) -> np.ndarray:
    """`ema · average + (1 - ema) · value` in float32; without an average so far, the value."""
    if average is None:
        return value.astype(np.float32)
    return np.float32(ema) * average + np.float32(1 - ema) * value


@torch.no_grad()
def head_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[int | None],
    *,
    sink_tokens: int = 0,
    scale: float | None = None,
    output: Tensor | None = None,
    query_block: int = 128,
) -> HeadStatistics:
    """Entropy, output norm and usage of one layer's heads under their windows.

    Heads that share a window are measured together, over blocks of queries and only over the keys that
    they see: work follows causal coverage, memory is [batch, heads, query_block, keys seen].

    Args:
        q: [batch, query_heads, time, head_dim]; k, v: [batch, kv_heads, time, head_dim]. No padding.
        windows: keys per query for each query head, None for full attention.
        sink_tokens: first tokens that stay visible.
        scale: of the scores, default `head_dim ** -0.5`.
        output: [batch, query_heads, time, head_dim], the heads' outputs where they are known already;
            otherwise they are computed here.
        query_block: queries at a time.

    Raises:
        CalibrationError: another number of windows than of query heads.
    """
    batch, heads, time, _ = q.shape
    if len(windows) != heads:
        raise CalibrationError(f"{len(windows)} windows were given for {heads} query heads.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_head = torch.arange(heads, device=q.device) // (heads // k.shape[1])
    spans = [time if w is None else min(w, time) for w in windows]
    entropy = torch.zeros(heads, device=q.device)
    norm = torch.zeros(heads, device=q.device)
    usage = torch.zeros(heads, device=q.device)
    for span in sorted(set(spans)):
        members = torch.tensor([h for h, s in enumerate(spans) if s == span], device=q.device)
        for start in range(0, time, query_block):
            stop = min(start + query_block, time)
            rows = torch.arange(start, stop, device=q.device)
            first = max(0, start - span + 1)
            sinks = torch.arange(min(sink_tokens, first), device=q.device)
            keys = torch.cat([sinks, torch.arange(first, stop, device=q.device)])
            distance = rows[:, None] - keys[None, :]
            seen = (distance >= 0) & ((distance < span) | (keys < sink_tokens))
            block_k = k[:, kv_head[members]][:, :, keys].float()
            scores = q[:, members, start:stop].float() @ block_k.transpose(-1, -2) * scale
            probs = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
            entropy[members] -= (probs * torch.log(probs + 1e-9)).sum(dim=(0, 2, 3))
            if stop == time:
                usage[members] = probs[:, :, -1, -1].sum(dim=0)  # causal: only the last query sees the last key
            if output is None:
                block = probs @ v[:, kv_head[members]][:, :, keys].float()
                norm[members] += block.norm(dim=-1).sum(dim=(0, 2))
    if output is not None:
        norm = output.float().norm(dim=-1).sum(dim=(0, 2))
    rows_seen = batch * time
    # log(1) = 0: a single token has entropy 0 whatever it is divided by
    scaled = torch.stack([entropy / max(math.log(time), 1e-9), norm, usage]) / rows_seen
    return HeadStatistics(*scaled.cpu().numpy())
