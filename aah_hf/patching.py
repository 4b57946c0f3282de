"""`patch_model` and `unpatch_model`: the only functions that change a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.utils import logging

from . import attention
from .checkpoint import adopt_model, attach_controllers
from .errors import AAHError, PlanError, UnsupportedModelError
from .families import attention_modules, family_of
from .plan import CONFIG_KEY, AAHConfig, text_config

if TYPE_CHECKING:
    from .calibration import CalibrationConfig

logger = logging.get_logger(__name__)


def patch_model(
    model: Any,
    calib_data: Any = None,
    *,
    config: AAHConfig | None = None,
    calibration: CalibrationConfig | None = None,
    tokenizer: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Any:
    """Give every attention head of a model its own causal window, in place.

    Weights, state-dict keys and the model object stay; `unpatch_model` brings the original back. A model
    that is patched already gets the new plan instead of the old one.

    Args:
        model: a transformers model of a supported family, or a PEFT model around one.
        calib_data: text to choose the windows by: a list of strings (with `tokenizer`), token-id tensors,
            dict batches, a DataLoader, a `datasets.Dataset`, or a path to .txt or .jsonl.
        config: a finished plan, instead of `calib_data`.
        calibration: how to calibrate (budget, candidate windows, granularity, ...). The default, KV
            coverage 0.5 per KV head, is a starting point measured on a 135M model.
        tokenizer: for strings, and for the built-in recall text that is mixed in.
        progress: called with (stage, done, total) during calibration.

    Returns:
        The same model.

    Raises:
        AAHError: arguments that do not go together, an unsupported family, a plan for another model,
            too little calibration text, a budget that no windows can meet. Nothing is changed then.
    """
    if (calib_data is None) == (config is None):
        got = "neither" if config is None else "both"
        raise AAHError(
            f"patch_model needs exactly one of calib_data and config, got {got}: text to calibrate on, or a finished plan."
        )
    if config is not None and (calibration is not None or not isinstance(config, AAHConfig)):
        raise AAHError(
            "`calibration` says how to choose windows from calib_data and cannot be combined with `config`."
            if calibration is not None
            else f"config must be an AAHConfig, not {type(config).__name__}; use AAHConfig(windows=...)."
        )
    base = unwrap(model)
    attention_modules(base)
    controllers = None
    if config is None:
        from .calibration import Controllers, calibrate_and_check

        config = calibrate_and_check(base, calib_data, calibration=calibration, tokenizer=tokenizer, progress=progress)
        controllers = Controllers.of_plan(config)
    config.check_fits(base)
    set_plan(base, config)
    attach_controllers(base, controllers)
    return model


def unpatch_model(model: Any) -> Any:
    """Bring back the model that came in: its own attention classes, implementation and config.

    A model that was loaded from a patched checkpoint returns to SDPA (gemma2 and gpt_oss, which SDPA cannot
    serve, to eager attention).

    Raises:
        PlanError: the model is not patched.
    """
    base = unwrap(model)
    if not is_patched(base):
        raise PlanError(f"{type(base).__name__} is not patched, so there is nothing to undo.")
    config, modules = text_config(base), [module for _, module in attention_modules(base)]
    base.set_attn_implementation(getattr(modules[0], attention.PREVIOUS, family_of(base).stock))
    for module in modules:
        attention.release(module)
    config.__dict__.pop(CONFIG_KEY, None)
    attach_controllers(base, None)
    return model


def is_patched(model: Any) -> bool:
    """Whether the model's attention modules carry windows (whichever implementation is selected now)."""
    return any(isinstance(module, attention.AAHAttention) for module in unwrap(model).modules())


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside `model`, which may be wrapped by PEFT or torch.compile.

    Raises:
        UnsupportedModelError: there is none, or its family is not supported.
    """
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"expected a transformers model, got {type(model).__name__}. Load one with AutoModelForCausalLM.from_pretrained."
        )
    family_of(inner)
    return inner


def renew_plan(model: PreTrainedModel, plan: AAHConfig) -> None:
    """Other windows for a patched model, as often as every training step: no module is rebuilt.

    Raises:
        PlanError: the model is not patched, or the plan belongs to another one. Nothing is changed then.
    """
    config = text_config(model)
    if getattr(config, CONFIG_KEY, None) is None or not is_patched(model):
        raise PlanError(f"{type(model).__name__} is not patched; put its first plan in force with patch_model.")
    adopt_model(model, plan)
    setattr(config, CONFIG_KEY, plan.to_dict())


def set_plan(model: PreTrainedModel, plan: AAHConfig) -> None:
    """Put `plan` into force; on any failure the model stays as it was. Controllers of an earlier plan are dropped."""
    config = text_config(model)
    before, old = config._attn_implementation, None
    if is_patched(model):
        logger.info("This model was patched already; its plan is replaced.")
        old = AAHConfig.from_model(model)
    elif before == CONFIG_KEY:
        raise PlanError(
            "this model shares its config object with a patched model, so both would save one plan. Give it a config "
            "of its own: build it from copy.deepcopy(config), or load it with from_pretrained."
        )
    dormant = getattr(
        config, CONFIG_KEY, None
    )  # of a patched checkpoint that was loaded with attn_implementation="sdpa"
    try:
        adopt_model(model, plan)
        if old is None:
            for _, module in attention_modules(model):
                setattr(module, attention.PREVIOUS, before)
        setattr(config, CONFIG_KEY, plan.to_dict())
        model.set_attn_implementation(CONFIG_KEY)
        if config._attn_implementation != CONFIG_KEY:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not let transformers set its attention implementation."
            )
    except BaseException:  # also a keyboard interrupt must not leave a model half patched
        if old is None:
            for _, module in attention_modules(model):
                attention.release(module)
        else:
            adopt_model(model, old)
        if dormant is None:
            config.__dict__.pop(CONFIG_KEY, None)
        else:
            setattr(config, CONFIG_KEY, dormant)
        config._attn_implementation = before
        raise
    attach_controllers(model, None)
