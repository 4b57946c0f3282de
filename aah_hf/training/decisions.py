"""What was decided, step by step: values for a training log and rows of a CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calibration.grouping import group_of
from ..calibration.run import RegimeRun
from ..coverage import measure
from ..errors import CalibrationError
from ..files import replacing

COLUMNS = (
    "step", "layer", "regime", "path", "seq_len", "acr", "causal_coverage", "windows", "histogram", "groups", "levels",
    "logits", "margins",
)  # fmt: skip


@dataclass(frozen=True)
class LayerDecision:
    """One layer's decision.

    Attributes:
        step: training step, counted from 0.
        layer: index.
        regime: its name.
        path: what happened, in the words of the paper's implementation.
        seq_len: tokens that the coverages are for.
        acr, causal_coverage: of this layer (method.md §2).
        windows: keys per query of each query head, None for full attention.
        groups: the level-0 group of each head; empty where heads are not grouped.
        levels: groups on each level of the hierarchy, level 0 first.
        logits: [level][group][candidate]; empty where nothing was scored.
        margins: [level][group], by how much the best candidate won.
    """

    step: int
    layer: int
    regime: str
    path: str
    seq_len: int
    acr: float
    causal_coverage: float
    windows: tuple[int | None, ...]
    groups: tuple[int, ...]
    levels: tuple[int, ...]
    logits: list[list[list[float]]]
    margins: list[list[float]]

    def row(self) -> dict[str, Any]:
        """The CSV row: lists are JSON, full attention is null; six significant digits."""
        record = {name: getattr(self, name, None) for name in COLUMNS}
        record["histogram"] = histogram([self.windows])
        for name in ("windows", "groups", "levels", "histogram"):
            record[name] = json.dumps(record[name])
        for name in ("logits", "margins"):
            record[name] = json.dumps(_rounded(record[name]))
        return record


def decisions_of(run: RegimeRun, seq_len: int, sink_tokens: int = 0) -> list[LayerDecision]:
    """What every layer does in the step just taken, with the scores where it decided in it."""
    found = []
    for layer, (state, step) in enumerate(zip(run.states, run.steps)):
        coverage = measure([step.windows], seq_len, kv_heads=len(step.windows), sink_tokens=sink_tokens)
        decision = step.decision
        found.append(
            LayerDecision(
                step=run.step - 1,
                layer=layer,
                regime=run.regime.name,
                path=step.path,
                seq_len=seq_len,
                acr=coverage.acr,
                causal_coverage=coverage.causal,
                windows=step.windows,
                groups=tuple(group_of(step.groups)) if step.groups else (),
                levels=tuple(len(level.groups) for level in state.levels),
                logits=[] if decision is None else [level.tolist() for level in decision.logits],
                margins=[] if decision is None else [level.tolist() for level in decision.margins],
            )
        )
    return found


def histogram(windows: Sequence[Sequence[int | None]]) -> dict[str, int]:
    """Heads per window, ascending, full attention last as "full"."""
    counts = Counter(w for layer in windows for w in layer)
    ordered = sorted(counts, key=lambda w: (w is None, w or 0))
    return {"full" if w is None else str(w): counts[w] for w in ordered}


def summary(decisions: Sequence[LayerDecision]) -> dict[str, float]:
    """Numbers for a training log, over all layers: coverages, share of heads per window, groups, levels, margin."""
    count = len(decisions)
    heads = sum(len(d.windows) for d in decisions)
    values = {
        "aah/acr": sum(d.acr for d in decisions) / count,
        "aah/causal_coverage": sum(d.causal_coverage for d in decisions) / count,
        "aah/levels": sum(len(d.levels) for d in decisions) / count,
        "aah/groups": sum(max(d.groups, default=-1) + 1 for d in decisions) / count,
    }
    values |= {f"aah/window_{w}": n / heads for w, n in histogram([d.windows for d in decisions]).items()}
    margins = [margin for d in decisions if d.margins for margin in d.margins[0]]
    if margins:
        values["aah/margin"] = sum(margins) / len(margins)
    return values


class DecisionLog:
    """A CSV file with one row per layer and decision.

    Args:
        path: of the file; a step's rows are appended at once.
        keep_steps: of an existing file keep the rows of steps below this, and write over the rest: 0 starts anew,
            a resumed training passes the step it goes on from.

    Raises:
        CalibrationError: the file to continue is no decision log.
    """

    def __init__(self, path: str | os.PathLike, keep_steps: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_decisions(self.path) if int(row["step"]) < keep_steps] if keep_steps else []
        with replacing(self.path) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)

    def write(self, decisions: Sequence[LayerDecision]) -> None:
        """Append the rows of one step."""
        text = io.StringIO(newline="")
        csv.DictWriter(text, COLUMNS).writerows(decision.row() for decision in decisions)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


def read_decisions(path: str | os.PathLike) -> list[dict[str, str]]:
    """The rows of a decision log as text; none where there is no file. A last row cut short by a kill is dropped.

    Raises:
        CalibrationError: it is another kind of file.
    """
    path = Path(path)
    if not path.exists():
        return []
    csv.field_size_limit(2**24)  # the logits of a layer are one field
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise CalibrationError(f"{path} is no decision log (its columns are {reader.fieldnames}); move it away.")
        return [row for row in reader if None not in row.values() and row["step"].isdigit()]


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.6g}") if abs(values) != float("inf") else None
