"""How much the model's predictions suffer from errors of early and of late layers.

The error curves say how far a head's output moves against the residual stream, not what that does to the
predictions. On a 135M model a unit of error in the last layers costs two and a half times as much KL
divergence as one in the first layers, and a plan that ignores it keeps too long windows early on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from ..evaluation.quality import last_logits, mean_kl
from .statistics import ErrorCurves, Progress
from .taps import products, undisturbed, windowed_products

BLOCKS = 4
SCORE_FROM = 0.75  # predictions of the last quarter of a sequence: all windows matter there, and logits are large
RANGE = 4.0


def depth_weights(
    model: nn.Module,
    sequences: Sequence[Tensor],
    windows: Sequence[Sequence[int | None]],
    curves: ErrorCurves,
    *,
    progress: Progress | None = None,
) -> np.ndarray:
    """KL divergence per unit of output error, for four blocks of layers.

    Each block in turn runs with its part of `windows` while the other layers see everything.

    Args:
        sequences: token ids, each [seq_len]; one or two are enough.
        windows: windows[layer][query_head], a first choice.
        curves: what that choice was made from.
        progress: called with stage "weigh" after every run.

    Returns:
        [layers] factors for the errors, of mean 1; within a factor of 4 of their median, and 1 where nothing
        could be measured.
    """
    layers = len(windows)
    blocks = [block for block in np.array_split(np.arange(layers), min(BLOCKS, layers)) if len(block)]
    column = {window: index for index, window in enumerate(curves.candidates)}
    chosen = np.array([[column[w] for w in row] for row in windows])
    errors = np.take_along_axis(curves.errors, chosen[..., None], axis=2)[..., 0].sum(axis=1) / curves.tokens
    run, divergence, done = last_logits(model, SCORE_FROM), np.zeros(len(blocks)), 0
    full = [[None] * len(row) for row in windows]
    with undisturbed(model):
        for ids in sequences:
            with products(model, windowed_products(full, curves.sink_tokens)):
                base = run(ids[None])
            for index, block in enumerate(blocks):
                part = [windows[layer] if layer in block else full[layer] for layer in range(layers)]
                with products(model, windowed_products(part, curves.sink_tokens)):
                    divergence[index] += mean_kl(base[0, :-1], run(ids[None])[0, :-1]) / len(sequences)
                done += 1
                if progress is not None:
                    progress("weigh", done, len(sequences) * len(blocks))

    caused = np.array([errors[block].sum() for block in blocks])
    # below this, rounding makes up the divergence: full attention in the block, or a model that ignores attention
    known = (caused > 0) & (divergence > 1e-6)
    ratio = np.divide(divergence, caused, out=np.ones(len(blocks)), where=known)
    middle = float(np.median(ratio[known])) if known.any() else 1.0
    ratio = np.clip(np.where(known, ratio, middle), middle / RANGE, middle * RANGE)
    weights = np.concatenate([np.full(len(block), ratio[index]) for index, block in enumerate(blocks)])
    return weights / weights.mean()


def spread(sequences: Sequence[Tensor], count: int) -> list[Tensor]:
    """`count` of the sequences, evenly from the first to the last (data first, recall text last)."""
    picked = np.unique(np.linspace(0, len(sequences) - 1, min(count, len(sequences))).round().astype(int))
    return [sequences[index] for index in picked]
