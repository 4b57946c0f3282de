"""A regime over all layers of a model, step by step (method.md §5, §6).

The same object serves calibration data, a training loop and the retrofit; they differ in how attention is run.

    run.begin()                                   # layers that need not look at activations have advanced
    for each layer:  out = run.attend(layer, q, k, v, attention under run.windows[layer])
    run.end()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from ..errors import CalibrationError
from ..plan import AAHConfig
from .controller import Controller
from .features import Moments, head_statistics, moments
from .grouping import Level, group_of
from .regimes import (
    LayerState,
    RegimeConfig,
    Step,
    advance,
    decides,
    executed_windows,
    needs_features,
    observe,
)
from .weights import Controllers

Windows = tuple[int | None, ...]


class RegimeRun:
    """States of all layers under one regime.

    Args:
        regime: what to do.
        layers, query_heads: of the model.
        controllers: one per layer; None draws untrained ones from the regime's seed where the regime needs any.
        sink_tokens: first tokens that stay visible.

    Attributes:
        states: per layer, what it carries from step to step.
        steps: per layer, what it does in the current step.
        controllers: None where the regime has no controller.
        seq_len: tokens of the last sequence that a decision saw, None before.
        pending: layers that have yet to look at activations before their attention in this step.
        observing: whether the next step decides, so that this one's attention must be looked at.
    """

    def __init__(
        self,
        regime: RegimeConfig,
        layers: int,
        query_heads: int,
        controllers: Controllers | None = None,
        sink_tokens: int = 0,
    ) -> None:
        if regime.windows != "controller":
            if controllers is not None:
                raise CalibrationError(f"regime {regime.name!r} has no controller; pass controllers=None.")
        elif controllers is None:
            controllers = Controllers.untrained(regime, layers)
        else:
            controllers.check_fits(regime, layers)
        self.regime, self.controllers, self.sink_tokens = regime, controllers, sink_tokens
        self.states = [LayerState.start(query_heads, layer) for layer in range(layers)]
        self.steps: list[Step] = [Step((None,) * query_heads, (), "not started") for _ in range(layers)]
        self.seq_len: int | None = None
        self.pending: set[int] = set()
        self.observing = False
        self._before: tuple[list[LayerState], list[Step]] | None = None

    @property
    def step(self) -> int:
        """Steps taken so far; all layers keep the same count between `end` and `begin`."""
        return self.states[0].step

    @property
    def windows(self) -> tuple[Windows, ...]:
        """windows[layer][query_head] in force."""
        return tuple(step.windows for step in self.steps)

    @property
    def looks(self) -> bool:
        """Whether the current step looks at activations: before attention, after it, or both."""
        return bool(self.pending) or self.observing

    @property
    def decided(self) -> bool:
        """Whether the step just taken was one in which decisions are renewed (the first step counts)."""
        last = self.step - 1
        return last == 0 or decides(last, self.regime)

    def begin(self) -> None:
        """Start a step. Where no layer has to look at activations, it is all done here."""
        if self._before is not None:
            raise CalibrationError("the step before was not ended; call end() or abandon().")
        self._before = list(self.states), list(self.steps)
        needed = needs_features(self.states[0], self.regime)
        self.observing = needs_features(replace(self.states[0], step=self.step + 1), self.regime)
        self.pending = set(range(len(self.states))) if needed else set()
        if not needed:
            for layer in range(len(self.states)):
                self._advance(layer, None)

    def end(self) -> None:
        """Finish the step.

        Raises:
            CalibrationError: a layer has not run attention; the step is undone then.
        """
        if self.pending:
            missing = sorted(self.pending)
            self.abandon()
            raise CalibrationError(
                f"layers {missing} ran no attention in this step, so nothing could be decided for them: a step is a "
                "forward pass of the whole model."
            )
        self._before, self.observing = None, False

    def abandon(self) -> None:
        """Undo the step that was begun, if there is one."""
        if self._before is not None:
            self.states, self.steps = self._before
        self._before, self.observing, self.pending = None, False, set()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        run: Callable[[Windows], Tensor],
        *,
        scale: float | None = None,
        limit: int | None = None,
    ) -> Tensor:
        """Decide if that is due, run attention, and look at it if the next step decides.

        Args:
            layer: index.
            q: [batch, query_heads, time, head_dim]; k, v: [batch, kv_heads, time, head_dim].
            run: windows of the query heads -> output [batch, query_heads, time, head_dim].
            scale: of the scores.
            limit: the layer's own sliding window.
        """
        if layer in self.pending:
            self.decide(layer, moments(q, k, v), q.shape[2])
        out = run(self.steps[layer].windows)
        if self.observing:
            self.look(layer, q, k, v, out, scale=scale, limit=limit)
        return out

    def decide(self, layer: int, activations: Moments, seq_len: int) -> None:
        """Advance a layer by what its q, k and v amount to in this step."""
        self._advance(layer, activations)
        self.pending.discard(layer)
        self.seq_len = seq_len

    def look(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, scale: float | None, limit: int | None
    ) -> None:
        """Remember how the heads attended; shapes as in `attend`."""
        seen = self.steps[layer].windows
        if limit is not None:
            seen = tuple(limit if w is None else min(w, limit) for w in seen)
        found = head_statistics(q, k, v, seen, sink_tokens=self.sink_tokens, scale=scale, output=out)
        self.states[layer] = observe(self.states[layer], found)

    def choice(self, layer: int) -> np.ndarray:
        """[3, query_heads] float64: chosen index, smoothed index and group of each head; -1 is none."""
        state, heads = self.states[layer], len(self.states[layer].attention.entropy)
        groups = state.levels[0].groups if state.levels else ()
        rows = [state.index, state.executed, group_of(groups) if groups else None]
        return np.stack([np.full(heads, -1.0) if row is None else np.asarray(row, dtype=np.float64) for row in rows])

    def follow(self, layer: int, choice: np.ndarray, seq_len: int) -> None:
        """Advance a layer by the `choice` that another process made for it in this step."""
        state, (index, executed, group) = self.states[layer], choice
        due, warm = decides(state.step, self.regime), state.step < self.regime.warmup_steps
        members = tuple(tuple(np.flatnonzero(group == g).tolist()) for g in range(int(group.max()) + 1))
        levels = (Level(members, np.zeros((len(members), 9), dtype=np.float32)),) if members else ()
        chosen = index[0] >= 0
        smoothed = executed.astype(np.float32) if chosen else None
        self.states[layer] = replace(
            state,
            step=state.step + 1,
            decisions=state.decisions + due,
            levels=levels,
            index=index.astype(np.int64) if chosen else None,
            executed=smoothed,
        )
        hidden: Windows = (None,) * len(index)
        if smoothed is not None and not warm and self.regime.windows != "full":
            hidden = executed_windows(smoothed, self.regime)
        elif self.regime.windows == "fixed" and not warm:
            hidden = (self.regime.fixed_window,) * len(index)
        self.steps[layer] = Step(hidden, members if self.regime.groups != "heads" else (), "followed")
        self.pending.discard(layer)
        self.seq_len = seq_len

    def plan(self, **provenance: object) -> AAHConfig:
        """The windows in force as a plan, with the regime and the groups."""
        grouped = [step.groups for step in self.steps]
        return AAHConfig(
            self.windows,
            self.sink_tokens,
            groups=tuple(tuple(group_of(groups)) for groups in grouped) if all(grouped) else None,
            provenance={
                "objective": "paper",
                "regime": self.regime.to_dict(),
                "steps": self.step,
                "decisions": self.states[0].decisions,
                **({} if self.seq_len is None else {"seq_len": self.seq_len}),
                **provenance,
            },
        )

    def _advance(self, layer: int, activations: Moments | None) -> None:
        controller = None if self.controllers is None else self.controllers[layer]
        assert controller is None or isinstance(controller, Controller)
        self.states[layer], self.steps[layer] = advance(self.states[layer], activations, controller, self.regime)


def beyond(windows: Sequence[Windows], seq_len: int) -> tuple[Windows, ...]:
    """Windows that cover `seq_len` tokens as None, full attention, which is what they are there."""
    return tuple(tuple(None if w is None or w >= seq_len else w for w in layer) for layer in windows)
