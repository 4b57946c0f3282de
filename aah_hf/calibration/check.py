"""The closing check: what a plan costs on held-out text, measured before the model is patched."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..evaluation.quality import Quality, compare, concerns, last_logits
from ..plan import AAHConfig
from .calibrate import calibration_text, plan_from_text
from .config import CalibrationConfig
from .statistics import Progress
from .taps import products, undisturbed, windowed_products
from .text import CalibrationText

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def calibrate_and_check(
    model: PreTrainedModel,
    calib_data: Any,
    *,
    calibration: CalibrationConfig | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> AAHConfig:
    """`calibrate`, then measure the plan on held-out text and warn where it is poor.

    The figures go into the plan's provenance under `check`. The model is left exactly as it was.

    Raises:
        As `calibrate`.
    """
    config = CalibrationConfig.of(calibration)
    text = calibration_text(model, calib_data, config, tokenizer=tokenizer)
    plan = plan_from_text(model, text, config, progress=progress)
    if not text.holdout and not text.holdout_recall:
        return plan
    quality = check(model, plan, text, progress=progress)
    found = concerns(quality)
    if found:
        remedy = (
            "The paper's untrained controller does not know this model: train it with "
            "`aah_hf.training.retrofit`, or use objective='output_error', which measures what windows cost."
            if config.objective == "paper"
            else f"Raise the budget (now {config.budget}), or calibrate on more text of the kind the model will see."
        )
        warnings.warn(
            f"the calibrated plan is poor on held-out text: {'; '.join(found)}. {remedy}",
            stacklevel=3,
        )
    figures = {
        key: value for key, value in quality.to_dict().items() if key not in ("increases", "seconds", "base_seconds")
    }
    return plan.with_provenance(check=figures)


def check(
    model: PreTrainedModel, plan: AAHConfig, text: CalibrationText, *, progress: Progress | None = None
) -> Quality:
    """Quality of `plan` on the held-out sequences of `text`, without patching `model`."""
    full = last_logits(model)

    def planned(ids):
        with products(model, windowed_products(plan.windows, plan.sink_tokens)):
            return full(ids)

    def base(ids):
        with products(model, windowed_products([[None]] * plan.num_layers, 0)):  # it may be patched already
            return full(ids)

    sequences = [*text.holdout, *(ids for ids, _ in text.holdout_recall)]
    answers = [None] * len(text.holdout) + [mask for _, mask in text.holdout_recall]
    with undisturbed(model):
        return compare(base, planned, sequences, answer_masks=answers, progress=progress)
