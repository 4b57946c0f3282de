"""A patched model against its base, as `aah eval` and the demo report it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..coverage import Coverage, measure
from ..errors import AAHError
from ..families import family_of
from ..plan import AAHConfig, coverage_of, head_counts, plan_of, text_config
from .quality import Logits, Quality, compare, last_logits

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """Quality on ordinary text and on recall text (either may be missing), and what the plan covers."""

    text: Quality | None
    recall: Quality | None
    coverage: Coverage

    def to_dict(self) -> dict[str, Any]:
        """One flat JSON object; increases are shares (0.01 is 1 %), times are of one forward pass."""
        main = self.text or self.recall
        assert main is not None  # evaluate() refuses to run on nothing
        result: dict[str, Any] = {
            "ppl": main.ppl,
            "base_ppl": main.base_ppl,
            "increase": main.increase,
            "increase_ci95": list(main.interval),
            "kl": main.kl,
            "recall_nll": self.recall.recall_nll if self.recall else None,
            "base_recall_nll": self.recall.base_recall_nll if self.recall else None,
            "recall_increase": self.recall.increase if self.recall else None,
            "recall_increase_ci95": list(self.recall.interval) if self.recall else None,
            "coverage": {"acr": self.coverage.acr, "causal": self.coverage.causal, "kv": self.coverage.kv},
            "kv_bytes": self.coverage.kv_bytes,
            "seconds": main.seconds,
            "base_seconds": main.base_seconds,
            "tokens": sum(q.tokens for q in (self.text, self.recall) if q),
            "sequences": len(self.text.increases) if self.text else 0,
            "recall_sequences": len(self.recall.increases) if self.recall else 0,
            "seq_len": self.coverage.seq_len,
        }
        return result


def evaluate(
    model: PreTrainedModel,
    sequences: Sequence[Tensor] = (),
    recall: Sequence[tuple[Tensor, Tensor]] = (),
    *,
    base: Logits | PreTrainedModel | None = None,
    score_from: float = 0.5,
    progress: Progress | None = None,
) -> Evaluation:
    """Compare `model` with full attention (or with `base`) on token sequences.

    Args:
        model: any causal language model; a patched one runs with its windows.
        sequences: ordinary text, token ids [seq_len] each.
        recall: (token ids, answer mask), see `recall_sequences`.
        base: what to compare with. Default: the same weights with full attention.
        score_from: share of each sequence that is only context.
        progress: called with (stage, done, total).

    Raises:
        AAHError: nothing to evaluate on.
    """
    if not sequences and not recall:
        raise AAHError("there is nothing to evaluate on: pass token sequences, recall sequences, or both.")
    reference = base if base is not None else full_attention(model, score_from)
    if isinstance(reference, PreTrainedModel):
        reference = last_logits(reference, score_from)
    patched = last_logits(model, score_from)

    def run(name: str, ids: Sequence[Tensor], answers: Sequence[Tensor] | None) -> Quality | None:
        if not ids:
            return None
        report = None if progress is None else lambda _, done, total: progress(name, done, total)
        return compare(reference, patched, ids, score_from=score_from, answer_masks=answers, progress=report)

    text = run("scoring text", sequences, None)
    asked = run("scoring recall text", [ids for ids, _ in recall], [mask for _, mask in recall])
    length = len(sequences[0]) if sequences else len(recall[0][0])
    return Evaluation(text, asked, coverage_of(plan_of(model), model, length))


def full_attention(model: PreTrainedModel, score_from: float = 0.5) -> Logits:
    """Logits of a model's weights with full attention, whatever it is patched with."""
    run, stock = last_logits(model, score_from), family_of(model).stock

    def full(ids: Tensor) -> Tensor:
        with implementation(model, stock):
            return run(ids)

    return full


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run a model with another attention implementation for the time of a `with`."""
    before = text_config(model)._attn_implementation
    if before != name:
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if before != name:
            model.set_attn_implementation(before)


def uniform_of_coverage(model: PreTrainedModel, causal: float, seq_len: int, sink_tokens: int) -> AAHConfig:
    """One fixed window for all heads whose causal coverage is at least `causal`: the baseline to beat."""
    low, high = 1, seq_len
    while low < high:
        middle = (low + high) // 2
        if measure(((middle,),), seq_len, kv_heads=1, sink_tokens=sink_tokens).causal >= causal:
            high = middle
        else:
            low = middle + 1
    layers, heads, _ = head_counts(model)
    return AAHConfig(((low,) * heads,) * layers, sink_tokens, provenance={"objective": "uniform"})


def control_plan(model: PreTrainedModel, text: str) -> AAHConfig:
    """A plan from the command line: `uniform:W`, or `shuffled:SEED` of the model's own windows.

    Raises:
        AAHError: neither of the two, or nothing to shuffle.
    """
    kind, _, value = text.partition(":")
    if kind not in ("uniform", "shuffled") or not value.isdecimal():
        raise AAHError(f"windows are {text!r}; expected uniform:W (one window for all heads) or shuffled:SEED.")
    if kind == "uniform":
        plan = plan_of(model)
        return AAHConfig.uniform(model, int(value), sink_tokens=plan.sink_tokens if plan else 4)
    return AAHConfig.from_model(model).shuffled(int(value))
