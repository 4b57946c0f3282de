"""The paper's mechanism inside transformers' Trainer, with its decisions in the log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..calibration.regimes import RegimeConfig
from ..calibration.weights import Controllers
from ..errors import CalibrationError
from .adaptive import AdaptiveWindows
from .decisions import DecisionLog, LayerDecision, decisions_of, summary
from .state import STATE_FILE


class AAHCallback(TrainerCallback):
    """Trains a model under a regime of the paper (method.md §5, §6) and logs what it decides.

        trainer = Trainer(model, args, ..., callbacks=[AAHCallback(regime("shallow_freeze", seq_len=1024))])

    Windows change from step to step; every checkpoint that the Trainer saves carries those in force as its plan, the
    controllers beside it, and what a resumed training needs. After each step that decides, the next entry of the
    Trainer's log has `aah/acr`, `aah/causal_coverage`, `aah/window_<w>` (share of heads), `aah/groups`, `aah/levels`
    and `aah/margin`; `csv` gets one row per layer, see `LayerDecision`. With `add_to(trainer)` instead of
    `callbacks=[...]` reporters such as TensorBoard get the entries too.

    Works under accelerate and torchrun (rank 0 decides and logs); `nn.DataParallel` is refused.

    Args:
        regime: what to do.
        csv: path of the decision log; None writes none.
        sink_tokens: first tokens that stay visible; the paper's mechanism is 0.
        controllers: to go on with; default untrained ones.
        resume_from: folder of the checkpoint that training is resumed from, where that is not
            `<output_dir>/checkpoint-<step>`.

    Attributes:
        windows: the `AdaptiveWindows`, None before training has begun.
        last: decisions of the last step that decided.
    """

    def __init__(
        self,
        regime: RegimeConfig,
        *,
        csv: str | os.PathLike | None = None,
        sink_tokens: int = 0,
        controllers: Controllers | None = None,
        resume_from: str | os.PathLike | None = None,
    ) -> None:
        if not isinstance(regime, RegimeConfig):
            raise CalibrationError(
                f"regime is {regime!r:.60}; pass a configuration, such as regime('shallow_freeze', seq_len=1024)."
            )
        self.regime, self.csv, self.sink_tokens = regime, csv, sink_tokens
        self.controllers, self.resume_from = controllers, resume_from
        self.windows: AdaptiveWindows | None = None
        self.last: list[LayerDecision] = []
        self._log: DecisionLog | None = None
        self._news: dict[str, float] = {}

    def add_to(self, trainer: Trainer) -> AAHCallback:
        """Join a trainer ahead of its reporters, so that they see our entries."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise CalibrationError(
                f"the Trainer would split batches over {args.n_gpu} devices with nn.DataParallel, whose copies cannot "
                "keep windows. Start the script with `accelerate launch` or `torchrun` instead."
            )
        self.windows = AdaptiveWindows(model, self.regime, sink_tokens=self.sink_tokens, controllers=self.controllers)
        if state.global_step:
            folder = _checkpoint(args, state) if self.resume_from is None else Path(self.resume_from)
            if not (folder / STATE_FILE).exists():
                raise CalibrationError(
                    f"training resumes at step {state.global_step} and {folder} holds no {STATE_FILE}: say where the "
                    "checkpoint lies with AAHCallback(resume_from=...)."
                )
            self.windows.restore(folder)
        if self.csv is not None and state.is_world_process_zero:
            self._log = DecisionLog(self.csv, keep_steps=state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started().begin_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        windows = self._started()
        windows.end_step()
        if not windows.run.decided or not state.is_world_process_zero:
            return
        self.last = decisions_of(windows.run, windows.seq_len, self.sink_tokens)
        self._news = summary(self.last)
        if self._log is not None:
            self._log.write(self.last)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not self._news or logs is None or "loss" not in logs:
            return
        logs.update(self._news)
        if state.log_history and state.log_history[-1].get("loss") == logs["loss"]:
            state.log_history[-1].update(self._news)  # the Trainer copied its entry before it asked us
        self._news = {}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._started().save_state(_checkpoint(args, state))

    def _started(self) -> AdaptiveWindows:
        if self.windows is None:
            raise CalibrationError("AAHCallback was not there when training began; add it before trainer.train().")
        return self.windows


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer keeps the checkpoint of this step."""
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
