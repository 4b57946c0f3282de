"""Paired quality of a patched model against its base on the same tokens.

Perplexity alone hides what short windows break, so KL divergence to the base model and the loss on
recalled answers are always measured beside it (method.md §8).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import AAHError

Logits = Callable[[Tensor], Tensor]
"""input_ids [1, seq_len] -> logits [1, seq_len, vocab], or [1, n, vocab] of the last n positions."""

CHUNK = 128  # positions whose log-probabilities exist in float32 at one time
RESAMPLES = 10_000


@dataclass(frozen=True)
class Quality:
    """What the patched model loses. Increases are shares: 0.01 is 1 %.

    Attributes:
        base_ppl, ppl: perplexity over all scored tokens.
        increases: per sequence, `exp(mean loss − mean base loss) − 1`.
        increase: their mean.
        interval: 95 % bootstrap interval of that mean over sequences (seeded).
        kl: mean KL(base ‖ patched) per scored token, in nats.
        base_recall_nll, recall_nll: mean loss of answer tokens in nats; None without answers.
        tokens: scored tokens.
        base_seconds, seconds: median time of one forward pass, the two models taking turns.
    """

    base_ppl: float
    ppl: float
    increases: tuple[float, ...]
    increase: float
    interval: tuple[float, float]
    kl: float
    base_recall_nll: float | None
    recall_nll: float | None
    tokens: int
    base_seconds: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "increases": list(self.increases), "interval": list(self.interval)}


def compare(
    base: Logits,
    patched: Logits,
    sequences: Sequence[Tensor],
    *,
    score_from: float = 0.5,
    answer_masks: Sequence[Tensor | None] | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Quality:
    """Run both models over the same sequences and compare their predictions token by token.

    Args:
        base, patched: see `Logits`; `last_logits` makes one from a model.
        sequences: token ids, each [seq_len].
        score_from: share of each sequence that only serves as context (default 0.5: the second half is
            scored, where windows differ from full attention).
        answer_masks: per sequence [seq_len] bool, True at tokens whose loss is recall, or None.
        seed: of the bootstrap.
        progress: called with ("compare", done, total) after every sequence.

    Raises:
        AAHError: no sequences, sequences without a token to score, masks or logits that do not fit.
    """
    masks = list(answer_masks) if answer_masks is not None else [None] * len(sequences)
    if not len(sequences) or len(masks) != len(sequences):
        raise AAHError(f"got {len(sequences)} sequences and {len(masks)} answer masks; expected as many, at least one.")
    if not 0 <= score_from < 1:
        raise AAHError(f"score_from is {score_from}; expected a share of the sequence, 0 <= score_from < 1.")
    rows: list[tuple] = []
    clocks: tuple[list[float], list[float]] = ([], [])
    for index, (ids, mask) in enumerate(zip(sequences, masks)):
        first = first_scored(len(ids), score_from)
        outputs: list[Tensor] = [torch.empty(0)] * 2
        for which in (0, 1) if index % 2 == 0 else (1, 0):  # taking turns: neither always runs on a warm cache
            start = time.perf_counter()
            with torch.no_grad():
                outputs[which] = (base, patched)[which](ids[None])
            if outputs[which].is_cuda:
                torch.cuda.synchronize(outputs[which].device)
            clocks[which].append(time.perf_counter() - start)
        rows.append(_score(outputs[0], outputs[1], ids, first, mask))
        if progress is not None:
            progress("compare", index + 1, len(sequences))
    base_loss, loss, kl, base_recall, recall = (np.array([row[i] for row in rows]) for i in range(5))
    tokens, answers = (np.array([row[i] for row in rows]) for i in (5, 6))
    increases = np.expm1((loss - base_loss) / tokens)
    asked = int(answers.sum())
    return Quality(
        base_ppl=math.exp(base_loss.sum() / tokens.sum()),
        ppl=math.exp(loss.sum() / tokens.sum()),
        increases=tuple(increases.tolist()),
        increase=float(increases.mean()),
        interval=bootstrap_interval(increases, seed),
        kl=float(kl.sum() / tokens.sum()),
        base_recall_nll=float(base_recall.sum() / asked) if asked else None,
        recall_nll=float(recall.sum() / asked) if asked else None,
        tokens=int(tokens.sum()),
        base_seconds=statistics.median(clocks[0]),
        seconds=statistics.median(clocks[1]),
    )


def last_logits(model: Any, score_from: float = 0.5) -> Logits:
    """A callable for `compare` that asks `model` only for the logits that are scored (where it can say so)."""

    def run(ids: Tensor) -> Tensor:
        keep = ids.shape[1] - first_scored(ids.shape[1], score_from) + 1
        device = "cpu" if model.device.type == "meta" else model.device  # offloaded: accelerate moves inputs itself
        return model(input_ids=ids.to(device), use_cache=False, logits_to_keep=keep).logits

    return run


def mean_kl(base: Tensor, other: Tensor) -> float:
    """Mean KL(base ‖ other) in nats over positions; both are logits [positions, vocab]."""
    total = 0.0
    for start in range(0, len(base), CHUNK):
        p = torch.log_softmax(base[start : start + CHUNK].float(), -1)
        q = torch.log_softmax(other[start : start + CHUNK].to(base.device).float(), -1)
        total += float((p.exp() * (p - q)).sum(-1).double().sum())
    return total / len(base)


def first_scored(seq_len: int, score_from: float) -> int:
    """Index of the first token whose loss counts; token 0 is never predicted."""
    if seq_len < 2:
        raise AAHError(f"a sequence of {seq_len} tokens has nothing to score; use at least 2.")
    return max(1, min(seq_len - 1, math.ceil(seq_len * score_from)))


def bootstrap_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values`, 10 000 resamples."""
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _score(base: Tensor, patched: Tensor, ids: Tensor, first: int, answers: Tensor | None) -> tuple:
    """(base loss, loss, KL, base answer loss, answer loss), in float64, then counts of tokens and answers."""
    needed = len(ids) - first + 1  # token t is predicted at position t - 1; the last position predicts nothing here
    for name, logits in (("base", base), ("patched", patched)):
        if logits.ndim != 3 or logits.shape[0] != 1 or not needed <= logits.shape[1] <= len(ids):
            raise AAHError(
                f"the {name} model returned logits of shape {tuple(logits.shape)}; expected [1, n, vocab] for the last "
                f"{needed} to {len(ids)} positions."
            )
    base, patched = base[0, -needed:-1], patched[0, -needed:-1]
    targets = ids[first:].to(base.device)
    asked = torch.zeros(len(targets), dtype=torch.bool) if answers is None else answers[first:].bool()
    asked = asked.to(base.device)
    sums = torch.zeros(5, dtype=torch.float64)
    for start in range(0, len(targets), CHUNK):
        part = slice(start, start + CHUNK)
        p = torch.log_softmax(base[part].float(), -1)
        q = torch.log_softmax(patched[part].to(base.device).float(), -1)
        picked = targets[part, None]
        base_loss, loss = -p.gather(1, picked)[:, 0].double(), -q.gather(1, picked)[:, 0].double()
        kl = (p.exp() * (p - q)).sum(-1).double()
        here = asked[part]
        sums += torch.stack([base_loss.sum(), loss.sum(), kl.sum(), base_loss[here].sum(), loss[here].sum()]).cpu()
    return (*sums.tolist(), len(targets), int(asked.sum()))


@dataclass(frozen=True)
class Limits:
    """From where on a plan's measured loss is worth a warning.

    The defaults separate calibrated plans from fixed windows of equal coverage on a 135M model.

    Args:
        increase: of perplexity, a share.
        kl: nats per token.
        recall: increase of the loss of recalled answers, nats per token.
    """

    increase: float = 0.05
    kl: float = 0.05
    recall: float = 0.5


def concerns(quality: Quality, limits: Limits | None = None) -> list[str]:
    """What a user should know before using the plan, in sentences; empty when all is well."""
    limits = limits or Limits()
    found = []
    if quality.increase > limits.increase:
        found.append(f"perplexity rises by {quality.increase:.1%} (limit {limits.increase:.0%})")
    if quality.kl > limits.kl:
        found.append(f"predictions drift from the full model by {quality.kl:.3f} nats a token (limit {limits.kl:g})")
    recall, base = quality.recall_nll, quality.base_recall_nll
    if recall is not None and base is not None and recall - base > limits.recall:
        found.append(
            f"recalling facts from far back costs {recall:.2f} nats a token instead of "
            f"{base:.2f} (limit +{limits.recall:g})"
        )
    return found
