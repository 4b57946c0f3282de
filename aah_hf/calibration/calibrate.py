"""calibrate(): text → token sequences → error curves → windows. The model is only looked at, never changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ..coverage import Windows, measure
from ..errors import CalibrationError
from ..families import attention_modules
from ..plan import AAHConfig, element_bytes, head_counts, head_dim, text_config
from .allocation import allocate
from .config import CalibrationConfig
from .paper import decide_offline, offline
from .sensitivity import depth_weights, spread
from .statistics import ErrorCurves, Progress, output_error_curves
from .text import CalibrationText, prepare

QUERY_STRIDE = 2
"""Every second block of 64 queries is measured: their curves are alike, and it saves a quarter of the time."""

MEASURE_FROM = 0.5
"""The first half of a sequence is context: windows are chosen for queries that have something far to look at."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def calibrate(
    model: PreTrainedModel,
    calib_data: Any,
    *,
    calibration: CalibrationConfig | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> AAHConfig:
    """Choose a window for every query head of `model`, from its own behaviour on `calib_data`.

    The model is left exactly as it was: weights, mode, config, hooks and random generators.

    Args:
        model: a supported causal language model, patched or not (it is measured with full attention).
        calib_data: a list of strings (with `tokenizer`), token-id tensors, dict batches, a DataLoader, a
            datasets.Dataset, or the path of a .txt or .jsonl file.
        calibration: default `CalibrationConfig()`.
        tokenizer: for text, and for recall text beside token ids.
        progress: called with (stage, done, total).

    Raises:
        CalibrationError: unusable data or settings, or a budget that cannot be met.
        UnsupportedModelError: the model's family is not supported.
    """
    config = CalibrationConfig.of(calibration)
    attention_modules(model)  # refuses what cannot be patched before any text is read
    text = calibration_text(model, calib_data, config, tokenizer=tokenizer)
    return plan_from_text(model, text, config, progress=progress)


def calibration_text(
    model: PreTrainedModel, calib_data: Any, config: CalibrationConfig, *, tokenizer: Any = None
) -> CalibrationText:
    """The sequences that `calibrate` measures, and the held-out ones that the patched model is checked with."""
    if tokenizer is not None and not callable(tokenizer):
        raise CalibrationError(
            f"tokenizer is {tokenizer!r}; pass the object, AutoTokenizer.from_pretrained(...), not its name."
        )
    longest = getattr(text_config(model), "max_position_embeddings", None)
    if longest is not None and config.seq_len > longest:
        raise CalibrationError(
            f"seq_len is {config.seq_len} and the model was made for at most {longest} positions; lower seq_len."
        )
    # a DataLoader draws from torch's random generator even when it does not shuffle
    with torch.random.fork_rng(devices=[]):
        return prepare(calib_data, config, tokenizer=tokenizer, vocab_size=_vocab_size(model))


def plan_from_text(
    model: PreTrainedModel, text: CalibrationText, config: CalibrationConfig, *, progress: Progress | None = None
) -> AAHConfig:
    """Measure `text` and choose windows within the budget.

    A first choice from the curves under full attention; then, with `config.refine`, weights for the depth of
    the layers, and curves measured with the choice in force, on three quarters of the sequences (method.md §8).
    """
    start = time.perf_counter()
    layers, heads, kv_heads = head_counts(model)
    if config.objective == "paper":
        rules = offline(config.regime or "shallow_freeze", seq_len=config.seq_len, seed=config.seed)
        plan = decide_offline(
            model, text.measure, rules, sink_tokens=config.sink_tokens, seq_len=config.seq_len, progress=progress
        )
        return plan.with_provenance(**config.to_dict(), **_facts(model, text, config, plan.windows, start))

    def observe(sequences: Sequence[Tensor], plan: Windows | None) -> ErrorCurves:
        return output_error_curves(
            model,
            sequences,
            config.windows(),
            sink_tokens=config.sink_tokens,
            plan=plan,
            query_stride=QUERY_STRIDE,
            measure_from=MEASURE_FROM,
            progress=progress,
        )

    def choose(curves: ErrorCurves, weights: np.ndarray) -> tuple[tuple[int | None, ...], ...]:
        return allocate(
            curves.errors * weights[:, None, None],
            curves.candidates,
            config.budget,
            seq_len=config.seq_len,
            sink_tokens=config.sink_tokens,
            kv_heads=kv_heads,
            granularity=config.granularity,
            key_bytes=2 * head_dim(model) * element_bytes(model),
        )

    # a budget that no choice can meet is refused here, before minutes of measuring
    nothing = np.zeros((layers, heads, len(config.windows())))
    choose(ErrorCurves(nothing, config.windows(), config.sink_tokens, 1), np.ones(layers))

    curves = observe(text.measure, None)
    weights = np.ones(len(curves.errors))
    windows = choose(curves, weights)
    if config.refine:
        weights = depth_weights(model, spread(text.measure, 2), windows, curves, progress=progress)
        windows = choose(curves, weights)
    for _ in range(config.refine):
        curves = observe(spread(text.measure, max(2, 3 * len(text.measure) // 4)), windows)
        windows = choose(curves, weights)
    index = {w: i for i, w in enumerate(curves.candidates)}
    error = sum(curves.errors[layer, head, index[w]] for layer, row in enumerate(windows) for head, w in enumerate(row))
    provenance = {
        **config.to_dict(),
        "depth_weights": [round(float(weight), 4) for weight in weights],
        "relative_error": float(error / curves.tokens),
        **_facts(model, text, config, windows, start),
    }
    return AAHConfig(windows=windows, sink_tokens=config.sink_tokens, provenance=provenance)


def _facts(
    model: PreTrainedModel, text: CalibrationText, config: CalibrationConfig, windows: Windows, start: float
) -> dict[str, Any]:
    """What every plan's provenance says of the data, the model and the versions."""
    reached = measure(windows, config.seq_len, kv_heads=head_counts(model)[2], sink_tokens=config.sink_tokens)
    return {
        "num_sequences": len(text.measure),
        "recall_sequences": text.recall_count,
        "tokens": text.tokens,
        "data_sha256": text.sha256,
        "coverage": {"acr": reached.acr, "causal": reached.causal, "kv": reached.kv},
        "model_class": type(model).__name__,
        "model_type": text_config(model).model_type,
        "versions": {"aah_hf": _own_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "seconds": round(time.perf_counter() - start, 3),
    }


def _vocab_size(model: PreTrainedModel) -> int | None:
    embeddings = model.get_input_embeddings()
    size = getattr(embeddings, "num_embeddings", None)
    return size if isinstance(size, int) else getattr(text_config(model), "vocab_size", None)


def _own_version() -> str:
    from .. import __version__  # at call time: the package imports this module while it loads

    return __version__
