"""A patched model's prefill against its base, and against what the attention share allows (Amdahl)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import AAHError
from ..evaluation.models import implementation
from ..families import family_of
from ..plan import CONFIG_KEY, coverage_of, plan_of


@dataclass(frozen=True)
class PrefillRow:
    """One length; seconds are medians of interleaved forward passes.

    Attributes:
        seq_len: tokens of the one sequence that is prefilled.
        coverage: causal coverage of the model's windows at that length.
        base_seconds, seconds: full attention (the family's own: SDPA, eager for gemma2 and gpt_oss) and the windows.
        attention_share: share of the base's time that its attention function takes.
        attention_ratio: the windows' time in the attention function over the base's.
        bound: speed-up if attention took exactly `coverage` of its time and nothing else changed.
        speedup: `base_seconds / seconds`.
    """

    seq_len: int
    coverage: float
    base_seconds: float
    seconds: float
    attention_share: float
    attention_ratio: float
    bound: float
    speedup: float

    @property
    def of_bound(self) -> float:
        """The speed-up as a share of the bound."""
        return self.speedup / self.bound

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_bound": self.of_bound}


def bench_prefill(
    model: PreTrainedModel,
    *,
    seq_lens: Sequence[int] = (2048, 4096, 8192),
    repeats: int = 5,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[PrefillRow]:
    """Time forward passes of a patched model without a cache, in turn with the same weights under full attention.

    Args:
        model: a patched model.
        seq_lens: lengths in tokens (random token ids: time does not depend on what they say).
        repeats: timed passes of each per length; one more warms up.

    Raises:
        AAHError: the model is not patched, or a length or `repeats` is less than 1.
    """
    plan = plan_of(model)
    if plan is None:
        raise AAHError("this model has no windows; patch it first (`patch_model`, or `aah patch`).")
    if repeats < 1 or min(seq_lens, default=0) < 1:
        raise AAHError(f"repeats is {repeats} and lengths are {list(seq_lens)}; both must be at least 1.")
    full = family_of(model).stock
    device = "cpu" if model.device.type == "meta" else model.device
    generator = torch.Generator().manual_seed(seed)
    done, total = 0, len(seq_lens) * 2 * (repeats + 1)
    for seq_len in seq_lens:
        ids = torch.randint(model.config.get_text_config().vocab_size, (1, seq_len), generator=generator).to(device)
        whole: dict[str, list[float]] = {full: [], CONFIG_KEY: []}
        inside: dict[str, list[float]] = {full: [], CONFIG_KEY: []}
        for turn in range(repeats + 1):
            for name in (full, CONFIG_KEY) if turn % 2 else (CONFIG_KEY, full):
                with torch.no_grad(), implementation(model, name), _clock(name) as clock:
                    start = _now(device)
                    model(input_ids=ids, use_cache=False, logits_to_keep=1)
                    if turn:
                        whole[name].append(_now(device) - start)
                        inside[name].append(sum(clock))
                done += 1
                if progress is not None:
                    progress("benchmark", done, total)
        base, ours = statistics.median(whole[full]), statistics.median(whole[CONFIG_KEY])
        share = statistics.median(a / w for a, w in zip(inside[full], whole[full]))
        coverage = coverage_of(plan, model, seq_len).causal
        yield PrefillRow(
            seq_len=seq_len,
            coverage=coverage,
            base_seconds=base,
            seconds=ours,
            attention_share=share,
            attention_ratio=statistics.median(inside[CONFIG_KEY]) / statistics.median(inside[full]),
            bound=1 / (1 - share + share * coverage),
            speedup=base / ours,
        )


def _now(device: torch.device | str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _clock(name: str) -> Iterator[list[float]]:
    """The seconds of every call of a registered attention function, while the `with` lasts."""
    seconds: list[float] = []
    function = ALL_ATTENTION_FUNCTIONS[name]

    def timed(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        start = _now(query.device)
        result = function(module, query, *args, **kwargs)
        seconds.append(_now(query.device) - start)
        return result

    ALL_ATTENTION_FUNCTIONS[name] = timed  # in this object's own table, which goes before the registered one
    try:
        yield seconds
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
