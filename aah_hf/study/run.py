"""Runs of a study: each trained through transformers' Trainer, kept when finished, resumed when killed."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ..calibration.run import beyond
from ..errors import AAHError
from ..files import write_text
from ..plan import AAHConfig
from ..training.callback import AAHCallback
from ..training.state import STATE_FILE
from .config import StudyConfig
from .data import decoder, sequences_of, texts, tokenizer_of
from .results import RunResult, load_result, markdown, save_result

Progress = Callable[[str, int, int], None]
SETTINGS_FILE = "study.json"
INFERENCE_REPEATS = 7


@dataclass(frozen=True)
class Study:
    """A finished study.

    Attributes:
        config: what was run.
        results: regime by regime, seed by seed.
        out: folder with `table.md`, `curves.png`, `windows.png` and a folder per run.
        parameters: of the decoder.
        train_tokens, validation_tokens: of the text, as cut into sequences.
    """

    config: StudyConfig
    results: tuple[RunResult, ...]
    out: Path
    parameters: int
    train_tokens: int
    validation_tokens: int


def run_study(
    config: StudyConfig, out: str | Path, *, keep_models: bool = False, progress: Progress | None = None
) -> Study:
    """Train every regime under every seed, or go on where an earlier call was stopped.

    Under `accelerate launch` or `torchrun` all processes call this; rank 0 writes and reports.

    Args:
        config: see `StudyConfig`.
        out: folder of the study; runs that are finished in it are not repeated.
        keep_models: save each trained model (with its plan and controllers) as a checkpoint in its run's folder.
        progress: called with (run, steps done, steps).

    Raises:
        AAHError: unusable settings or text, or a folder that holds something else.
    """
    from .plots import plot_curves, plot_windows_grid

    out, processes = Path(out), process_state()
    if config.batch_size % (processes.num_processes * config.accumulate):
        raise AAHError(
            f"batch_size {config.batch_size} cannot be split over {processes.num_processes} processes × "
            f"{config.accumulate} micro-batches."
        )
    with processes.main_process_first():
        training_texts, validation_texts = texts(config)
        _claim(out, config)  # not before the settings have proved usable
        tokenizer = tokenizer_of(config, training_texts, out / "tokenizer")
    training, validation = sequences_of(config, tokenizer, training_texts, validation_texts)
    vocabulary = len(tokenizer)
    results: list[RunResult] = []
    for seed in range(config.seeds):  # seed by seed, so that a study cut short has whole rows to compare
        for spec in config.regimes:
            processes.wait_for_everyone()
            name = re.sub(r"[^\w.=-]+", "_", spec)
            folder = out / "runs" / f"{name}-seed{seed}"
            result = load_result(folder)
            if result is None:
                result = _Run(config, spec, seed, folder, processes, progress).finish(
                    training, validation, vocabulary, keep_models
                )
            elif progress is not None:
                progress(f"{spec}, seed {seed}", config.steps, config.steps)
            results.append(result)
    results.sort(key=lambda run: (config.regimes.index(run.regime), run.seed))
    if processes.is_main_process:
        write_text(out / "table.md", markdown(results))
        plot_curves(results, out / "curves.png")
        plot_windows_grid(results, out / "windows.png")
    processes.wait_for_everyone()
    return Study(
        config,
        tuple(results),
        out,
        decoder(config, vocabulary, 0).num_parameters(),
        len(training) * config.seq_len,
        len(validation) * config.seq_len,
    )


def process_state() -> PartialState:
    """Which of how many processes this is, on CPUs where there is no GPU."""
    return PartialState(cpu=not torch.cuda.is_available())


def _claim(out: Path, config: StudyConfig) -> None:
    """Make `out` the folder of this study.

    Raises:
        AAHError: it holds a study with other settings, or something else.
    """
    path = out / SETTINGS_FILE
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = sorted(key for key, value in config.identity().items() if before.get(key) != value)
        except (ValueError, AttributeError) as error:
            raise AAHError(f"{path} is damaged ({error}); choose another --out.") from error
        if changed:
            raise AAHError(
                f"{out} holds a study with another {', '.join(changed)}, and one table cannot show both; choose another "
                "--out, or delete it."
            )
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AAHError(f"{out} exists and holds no study; choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(config.identity(), indent=1))


@dataclass(frozen=True)
class _Run:
    config: StudyConfig
    spec: str
    seed: int
    folder: Path
    processes: PartialState
    progress: Progress | None

    def finish(
        self, training: Sequence[Tensor], validation: Sequence[Tensor], vocabulary: int, keep_model: bool
    ) -> RunResult:
        """Train to the end, measure, and leave only the result and the decision log (and the model, if kept)."""
        config, checkpoints = self.config, self.folder / "checkpoints"
        model = decoder(config, vocabulary, self.seed)
        regime = config.regime(self.spec, self.seed)
        windows = AAHCallback(regime, csv=self.folder / "decisions.csv")
        clock = _Clock(self.progress, f"{self.spec}, seed {self.seed}", config.steps)
        trainer = Trainer(
            model=model,
            args=self._arguments(checkpoints),
            train_dataset=_dataset(training),
            eval_dataset=_dataset(validation),
            callbacks=[clock, windows, clock.end],
        )
        trainer.remove_callback(PrinterCallback)  # stdout is for the table
        last = _last_checkpoint(checkpoints, config.steps)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        val_loss = trainer.evaluate()["eval_loss"]
        plan = AAHConfig.from_model(model)
        coverage = plan.coverage(model, config.seq_len)
        result = RunResult(
            regime=self.spec,
            seed=self.seed,
            val_loss=val_loss,
            acr=coverage.acr,
            causal=coverage.causal,
            kv=coverage.kv,
            train_tokens_per_s=config.batch_size * config.seq_len / clock.seconds_per_step(regime.control_interval),
            infer_tokens_per_s=config.seq_len / _forward_seconds(model, validation[0], trainer.args),
            curve=sorted(
                {int(e["step"]): e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}.items()
            ),
            windows=[list(layer) for layer in beyond(plan.windows, config.seq_len)],
            seconds=round(sum(clock.seconds), 2),
            resumed_at=0 if last is None else int(last.name.rpartition("-")[2]),
        )
        if self.processes.is_main_process:
            if keep_model:
                model.save_pretrained(self.folder / "model")
            save_result(result, self.folder)
            shutil.rmtree(checkpoints, ignore_errors=True)
        self.processes.wait_for_everyone()
        return result

    def _arguments(self, checkpoints: Path) -> TrainingArguments:
        config = self.config
        return TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size // (self.processes.num_processes * config.accumulate),
            gradient_accumulation_steps=config.accumulate,
            per_device_eval_batch_size=1,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            warmup_steps=config.warmup,
            lr_scheduler_type="cosine",
            logging_steps=config.eval_every,
            eval_strategy="steps",
            eval_steps=config.eval_every,
            save_strategy="steps",
            save_steps=max(10, config.steps // 10),
            save_total_limit=2,
            seed=self.seed,
            data_seed=self.seed,
            bf16=config.dtype == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        )


class _Clock(TrainerCallback):
    """Times training steps, from before our callback begins one to after it has ended and logged it."""

    def __init__(self, progress: Progress | None, name: str, steps: int) -> None:
        self.seconds: list[float] = []
        self.end = _ClockEnd(self)
        self.progress, self.name, self.steps = progress, name, steps
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = _now()

    def seconds_per_step(self, interval: int) -> float:
        """The median over whole rounds of `interval` steps, each with one decision, of a round's mean step.

        The first round, which also warms up, counts only if there is no other.
        """
        rounds = [self.seconds[i : i + interval] for i in range(0, len(self.seconds), interval)]
        whole = [statistics.fmean(r) for r in rounds if len(r) == interval] or [statistics.fmean(rounds[0])]
        return statistics.median(whole[1:] or whole)


class _ClockEnd(TrainerCallback):
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clock = self.clock
        clock.seconds.append(_now() - clock.started)
        if clock.progress is not None:
            clock.progress(clock.name, state.global_step, clock.steps)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _forward_seconds(model: Any, ids: Tensor, args: TrainingArguments) -> float:
    """Median time of a forward pass over one sequence under the final windows."""
    ids = ids[None].to(model.device)
    model.eval()
    times = []
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16, enabled=args.bf16):
        for _ in range(INFERENCE_REPEATS):
            start = _now()
            model(input_ids=ids)
            times.append(_now() - start)
    return statistics.median(times)


def _dataset(sequences: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in sequences]


def _last_checkpoint(folder: Path, steps: int) -> Path | None:
    """The newest checkpoint that was written to its end (our state is the last file that goes in).

    Not that of the last step: some steps must be left to be timed.
    """
    found = {
        int(path.parent.name.rpartition("-")[2]): path.parent for path in folder.glob(f"checkpoint-*/{STATE_FILE}")
    }
    return max(((step, path) for step, path in found.items() if step < steps), default=(0, None))[1]
