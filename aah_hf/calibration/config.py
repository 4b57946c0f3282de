"""CalibrationConfig: everything that decides how a plan is made, as one immutable value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import CalibrationError
from .allocation import GRANULARITIES, Budget, check_granularity
from .regimes import REGIMES, RegimeConfig

OBJECTIVES = ("output_error", "paper")
COARSE = (128, 256, 512, 1024)
FINE = (32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792)
CANDIDATE_NAMES = {"coarse": COARSE, "fine": FINE}

MAX_SEQ_LEN = 2**20
MAX_SEQUENCES = 4096
MAX_SINK_TOKENS = 65536
MAX_CANDIDATES = 64


@dataclass(frozen=True)
class CalibrationConfig:
    """How windows are chosen.

    Args:
        budget: upper bound on a coverage at `seq_len`; a plain number means causal coverage. The default,
            half of the KV cache, is a starting point that was measured on a 135M model.
        candidates: windows to choose from: "coarse" (128 doubling), "fine" (14 steps from 32 to 1792), or
            ascending integers. Both names go on by doubling where `seq_len` is longer; full attention is
            always a candidate too, and candidates of at least `seq_len` mean just that.
        granularity: what shares one window: "kv_head" (what lets a cache shrink), "head" or "layer".
        objective: "output_error" of method.md §8, or "paper": the paper's own controller (method.md §3-6), which
            has no budget; `budget`, `candidates`, `granularity` and `refine` then stay at their defaults.
        regime: for objective "paper", a name of `aah_hf.calibration.REGIMES` (default "shallow_freeze") or a
            `RegimeConfig`; a name takes the paper's four candidates at `seq_len`, see `paper.offline`.
        refine: how often to measure again with the plan in force and choose anew, with errors weighted by
            what they do to the predictions (default 1; 0 takes a third of the time and costs quality).
        seq_len: tokens of a calibration sequence (default 2048). Windows are chosen for this length.
        num_sequences: sequences to measure, recall text included (default 4; two already rank heads as
            eight do, more guard against unusual ones).
        sink_tokens: first tokens that stay visible to every query (default 4).
        recall_fraction: share of the sequences that are recall text (facts scattered through a haystack,
            asked at its end; default 0.75: it loses most). Needs a tokenizer; without one the data is used alone.
        holdout_sequences: sequences of the data that are kept aside to check the patched model with, and as
            many of recall text (default 1; 0 skips the check).
        seed: of the recall text and of everything else that is drawn.

    Raises:
        CalibrationError: a setting is out of range or does not fit another, with the valid choices.
    """

    budget: Budget | float = field(default_factory=lambda: Budget.kv(0.5))
    candidates: str | tuple[int, ...] = "fine"
    granularity: str = "kv_head"
    objective: str = "output_error"
    refine: int = 1
    seq_len: int = 2048
    num_sequences: int = 4
    sink_tokens: int = 4
    recall_fraction: float = 0.75
    holdout_sequences: int = 1
    seed: int = 0
    regime: str | RegimeConfig | None = None

    def __post_init__(self) -> None:
        budget = Budget.of(self.budget)
        object.__setattr__(self, "budget", budget)
        _choice("granularity", self.granularity, GRANULARITIES)
        _choice("objective", self.objective, OBJECTIVES)
        self._check_regime()
        check_granularity(budget, self.granularity)
        _integer("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        _integer("num_sequences", self.num_sequences, 1, MAX_SEQUENCES)
        _integer("sink_tokens", self.sink_tokens, 0, MAX_SINK_TOKENS)
        _integer("holdout_sequences", self.holdout_sequences, 0, MAX_SEQUENCES)
        _integer("refine", self.refine, 0, 10)
        _integer("seed", self.seed, 0, 2**63 - 1)
        number = isinstance(self.recall_fraction, (int, float)) and not isinstance(self.recall_fraction, bool)
        if not number or not 0 <= self.recall_fraction <= 1:
            raise CalibrationError(f"recall_fraction is {self.recall_fraction!r}; expected a share from 0 to 1.")
        if isinstance(self.candidates, str):
            _choice("candidates", self.candidates, tuple(CANDIDATE_NAMES))
        else:
            object.__setattr__(self, "candidates", _windows(self.candidates))
        if self.objective != "paper" and len(self.windows()) == 1:
            raise CalibrationError(
                f"no candidate window is shorter than seq_len={self.seq_len} (candidates: {self.candidates!r}), so "
                "there is nothing to choose. Pass shorter candidates, such as "
                f"candidates=({max(1, self.seq_len // 4)}, {max(1, self.seq_len // 2)}), or a longer seq_len."
            )
        shortest = self.windows()[0]
        if shortest is not None and shortest + self.sink_tokens >= self.seq_len:
            raise CalibrationError(
                f"{self.sink_tokens} sink tokens and a window of {shortest} cover all of seq_len={self.seq_len}, so no "
                "candidate hides anything. Lower sink_tokens (default 4), or use a longer seq_len."
            )

    def _check_regime(self) -> None:
        if self.objective != "paper":
            if self.regime is not None:
                raise CalibrationError(
                    f"regime {self.regime!r:.60} belongs to objective='paper', and the objective is {self.objective!r}."
                )
            return
        if self.regime is None:
            object.__setattr__(self, "regime", "shallow_freeze")
        if not isinstance(self.regime, RegimeConfig):
            _choice("regime", self.regime, REGIMES)
        defaults = {f.name: f.default for f in fields(self)} | {"budget": Budget.kv(0.5)}
        for name in ("budget", "candidates", "granularity", "refine"):
            if getattr(self, name) != defaults[name]:
                raise CalibrationError(
                    f"{name} has no effect with objective='paper', whose controller decides without a budget. Leave it "
                    "out; candidate windows are set with regime=regime(name, candidate_windows=...)."
                )

    @classmethod
    def of(cls, value: CalibrationConfig | None) -> CalibrationConfig:
        """The settings as they are; None means the defaults."""
        if value is not None and not isinstance(value, CalibrationConfig):
            raise CalibrationError(
                f"calibration is a {type(value).__name__}; pass a CalibrationConfig, such as CalibrationConfig(budget=0.5)."
            )
        return value or cls()

    def windows(self) -> tuple[int | None, ...]:
        """The candidates at `seq_len`: ascending integers below it, then None (full attention)."""
        if isinstance(self.candidates, str):
            steps = list(CANDIDATE_NAMES[self.candidates])
            doubled = 2048
            while doubled < self.seq_len:
                steps.append(doubled)
                doubled *= 2
        else:
            steps = list(self.candidates)
        return (*(w for w in steps if w < self.seq_len), None)

    def recall_sequences(self) -> int:
        """How many of `num_sequences` are recall text."""
        return int(self.num_sequences * self.recall_fraction + 0.5)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, for a plan's provenance."""
        budget = Budget.of(self.budget)
        if self.objective == "paper":  # the regime itself is recorded by whoever runs it
            shared = ("objective", "seq_len", "sink_tokens", "recall_fraction", "holdout_sequences", "seed")
            return {name: getattr(self, name) for name in shared}
        return {
            "objective": self.objective,
            "budget": {"kind": budget.kind, "value": budget.value} | ({"at": budget.at} if budget.at else {}),
            "candidates": [w for w in self.windows() if w is not None],
            "granularity": self.granularity,
            "seq_len": self.seq_len,
            "refine": self.refine,
            "sink_tokens": self.sink_tokens,
            "recall_fraction": float(self.recall_fraction),
            "holdout_sequences": self.holdout_sequences,
            "seed": self.seed,
        }


def _choice(name: str, value: Any, valid: Sequence[str]) -> None:
    if value not in valid:
        raise CalibrationError(f"{name} is {value!r}; choose one of {', '.join(valid)}.")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CalibrationError(f"{name} is {value!r}; expected an integer from {low} to {high}.")


def _windows(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not 1 <= len(value) <= MAX_CANDIDATES:
        raise CalibrationError(
            f"candidates is {value!r}; expected {', '.join(map(repr, CANDIDATE_NAMES))} or up to {MAX_CANDIDATES} "
            "ascending windows."
        )
    steps = [w for w in value if w is not None]  # None, full attention, is a candidate in any case
    for window in steps:
        _integer("a candidate window", window, 1, MAX_SEQ_LEN)
    if not steps or steps != sorted(set(steps)):
        raise CalibrationError(f"candidates are {tuple(value)}; expected different windows in ascending order.")
    return tuple(steps)
