"""What the runs of a study amount to: the paper's table with mean and spread, and what differs beyond the spread."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import AAHError
from ..files import write_text

RESULT_FILE = "result.json"
BASELINE = "full_attention"


@dataclass(frozen=True)
class RunResult:
    """One finished run.

    Attributes:
        regime: as named in `StudyConfig.regimes`.
        seed: of weights, data order and controllers.
        val_loss: nats per token on the validation text, at the end, under the windows in force.
        acr, causal, kv: coverages of those windows at the study's sequence length (method.md §2).
        train_tokens_per_s: of the median training step, decisions included in proportion.
        infer_tokens_per_s: of the median forward pass over one validation sequence.
        curve: (step, validation loss) points.
        windows: windows[layer][query_head] at the end.
        seconds: of training in the process that finished it.
        resumed_at: step that it was resumed at, 0 if it ran through.
    """

    regime: str
    seed: int
    val_loss: float
    acr: float
    causal: float
    kv: float
    train_tokens_per_s: float
    infer_tokens_per_s: float
    curve: list[tuple[int, float]]
    windows: list[list[int | None]]
    seconds: float
    resumed_at: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.val_loss, 700.0))


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation over seeds; the latter is None with one seed."""

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def text(self, digits: int) -> str:
        return f"{self.mean:,.{digits}f}" + ("" if self.spread is None else f" ± {self.spread:,.{digits}f}")


COLUMNS = (
    ("val_loss", "val. loss", 4),
    ("perplexity", "perplexity", 2),
    ("acr", "ACR", 3),
    ("causal", "causal cov.", 3),
    ("train_tokens_per_s", "tokens/s train", 0),
    ("infer_tokens_per_s", "tokens/s infer", 0),
)
"""(attribute of RunResult, heading, digits)."""


def table(results: Sequence[RunResult]) -> dict[str, dict[str, Figure]]:
    """table[regime][attribute], regimes in the order in which they first occur."""
    by_regime: dict[str, list[RunResult]] = {}
    for result in results:
        by_regime.setdefault(result.regime, []).append(result)
    return {
        regime: {name: Figure.of([getattr(run, name) for run in runs]) for name, _, _ in COLUMNS}
        for regime, runs in by_regime.items()
    }


def findings(results: Sequence[RunResult], baseline: str = BASELINE) -> str:
    """Which losses differ from full attention's by more than the spread over seeds, as one sentence.

    "Beyond the spread" means that the means differ by more than the two standard deviations over seeds together.
    That is a plain reading of few seeds, not a significance test, and the sentence says how many there were.
    """
    rows = {regime: figures["val_loss"] for regime, figures in table(results).items()}
    if baseline not in rows:
        return f"Without {baseline} among the regimes there is nothing to compare validation losses with."
    others = {regime: figure for regime, figure in rows.items() if regime != baseline}
    if not others:
        return f"Only {baseline} was run, so there is nothing to compare."
    base, counts = rows[baseline], {r: sum(run.regime == r for run in results) for r in rows}
    if any(figure.spread is None for figure in rows.values()):
        return (
            "With one seed there is no spread, so no difference between regimes can be told from chance; run at least "
            "two seeds."
        )
    better: list[str] = []
    worse: list[str] = []
    same: list[str] = []
    for regime, figure in others.items():
        assert figure.spread is not None and base.spread is not None
        difference = figure.mean - base.mean
        if abs(difference) <= figure.spread + base.spread:
            same.append(regime)
        else:
            (better if difference < 0 else worse).append(f"{regime} ({difference:+.4f})")
    seeds = min(counts.values())
    parts = [f"lower for {', '.join(better)}"] if better else []
    parts += [f"higher for {', '.join(worse)}"] if worse else []
    verdict = " and ".join(parts) if parts else "different for no regime"
    rest = f"; not distinguishable: {', '.join(same)}" if same else ""
    return (
        f"Beyond the spread over {seeds} seeds (difference of means against the sum of both standard deviations), "
        f"validation loss compared with {baseline} is {verdict}{rest}."
    )


def markdown(results: Sequence[RunResult]) -> str:
    """The table and the finding as Markdown."""
    lines = ["| regime | " + " | ".join(heading for _, heading, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for regime, figures in table(results).items():
        cells = (figures[name].text(digits) for name, _, digits in COLUMNS)
        lines.append(f"| {regime} | " + " | ".join(cells) + " |")
    seeds = len({run.seed for run in results})
    return "\n".join(lines) + f"\n\nMean ± standard deviation over {seeds} seed(s). {findings(results)}\n"


def save_result(result: RunResult, folder: Path) -> None:
    """Mark a run as finished."""
    write_text(folder / RESULT_FILE, json.dumps(asdict(result)))


def load_result(folder: Path) -> RunResult | None:
    """The result of a finished run, None where it is not finished.

    Raises:
        AAHError: the file is damaged; the message says to delete it.
    """
    path = folder / RESULT_FILE
    if not path.exists():
        return None
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if set(data) != {f.name for f in fields(RunResult)}:
            raise ValueError("its entries are others than expected")
        data["curve"] = [(int(step), float(loss)) for step, loss in data["curve"]]
        return RunResult(**data)
    except (ValueError, TypeError) as error:
        raise AAHError(f"{path} is damaged ({error}); delete it, and the run is repeated.") from error
