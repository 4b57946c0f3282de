"""Patched models as ordinary Hugging Face checkpoints.

The plan is `config.aah`; `config.json` also says `"attn_implementation": "aah"`. Loading builds the
family's own model, whose attention modules become AAHAttention before weights are read. The functions
here are installed around transformers' own by hooks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from . import attention
from .errors import AAHError, CalibrationError, PlanError
from .families import attention_modules
from .plan import CONFIG_KEY, AAHConfig, plan_of, text_config

if TYPE_CHECKING:
    from .calibration.weights import Controllers

logger = logging.get_logger(__name__)

CONTROLLERS = "aah_controllers"
"""Attribute of a model: the controllers that chose its windows (method.md §5), where there are any."""


def adopt_model(model: PreTrainedModel, plan: AAHConfig) -> None:
    """Check `plan` against `model`, then turn its attention modules into AAHAttention. All or nothing."""
    modules = attention_modules(model)
    plan.check_fits(model)
    for layer, (_, module) in enumerate(modules):
        attention.adopt(module, plan, layer)


def config_to_dict(original: Any, self: PreTrainedConfig) -> dict[str, Any]:
    """A config that carries a plan also writes which attention implementation it runs with."""
    output = original(self)
    if getattr(self, CONFIG_KEY, None) is not None and self._attn_implementation is not None:
        output["attn_implementation"] = self._attn_implementation
    return output


def config_from_dict(original: Any, cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """Restore the implementation of a config that kept its plan and lost the key, and say so.

    Raises:
        PlanError: the key is no string; transformers would run full attention with some of these.
    """
    stored = config_dict.get("attn_implementation")
    requested = kwargs.get("attn_implementation") or stored
    planned = config_dict.get(CONFIG_KEY) is not None
    hidden = config_dict.get("_attn_implementation")  # transformers never writes it and goes by it all the same
    if planned and hidden is not None and hidden != stored:
        raise PlanError(
            f"config.json says `_attn_implementation` {hidden!r:.60} beside `attn_implementation` {stored!r:.60}; which "
            "one counts is not certain. Remove the first, and pass attn_implementation=... when loading for another one."
        )
    if planned and stored is not None and not (isinstance(stored, str) and stored):
        raise PlanError(
            f"`attn_implementation` in config.json is {stored!r}; expected {CONFIG_KEY!r} (or another implementation's "
            "name, for full attention). Was the file edited by hand?"
        )
    if planned and requested is None:
        logger.warning(
            f"This config holds a plan for per-head windows (`{CONFIG_KEY}`) but not the key `attn_implementation`; it "
            "was probably re-saved without aah_hf. It is loaded with its windows; pass attn_implementation='sdpa' "
            "(or 'eager') for full attention."
        )
        config_dict = {**config_dict, "attn_implementation": CONFIG_KEY}
    return original(cls, config_dict, **kwargs)


def adopt_after_init(original: Any, self: PreTrainedModel) -> None:
    """A model whose config asks for "aah" gets its windows as soon as its modules exist."""
    original(self)
    config = text_config(self)
    if config._attn_implementation != CONFIG_KEY or self.config is not config:
        return
    data = getattr(config, CONFIG_KEY, None)
    if data is None:
        raise PlanError(
            f"attn_implementation={CONFIG_KEY!r} was requested, but the config holds no plan. Load the model without "
            "it and call `patch_model(model, calib_data)`."
        )
    adopt_model(self, AAHConfig.from_dict(data))


def save_with_card(original: Any, self: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """After an ordinary save, write the model card of a patched model (never over somebody's own README)."""
    from .report.card import remove_card, write_card

    is_main = args[0] if args else kwargs.get("is_main_process", True)
    patched = text_config(self)._attn_implementation == CONFIG_KEY
    if patched:
        _check_plan_in_force(self)
    with _unpacked_gguf(self) if patched else nullcontext():
        result = original(self, save_directory, *args, **kwargs)
    if is_main:
        _save_controllers(self, save_directory)
        try:
            write_card(self, save_directory) if patched else remove_card(save_directory)
        except (AAHError, OSError, UnicodeError) as error:  # the checkpoint itself is complete
            logger.warning(f"The model was saved, but its model card was not: {error}")
    return result


def attach_controllers(model: PreTrainedModel, controllers: Controllers | None) -> None:
    """Let `save_pretrained` write these controllers beside the model; None lets it write none.

    They hang on the model without being a submodule of it: state dict and parameters stay the family's own.
    """
    if controllers is None:
        model.__dict__.pop(CONTROLLERS, None)
    else:
        model.__dict__[CONTROLLERS] = controllers


def _save_controllers(model: PreTrainedModel, directory: Any) -> None:
    """Write the model's controllers, or remove those of another plan that was saved here before."""
    from .calibration.weights import CONTROLLER_FILE, load_controllers, save_controllers

    controllers, path = model.__dict__.get(CONTROLLERS), Path(directory) / CONTROLLER_FILE
    if controllers is not None:
        save_controllers(controllers, directory)
    elif path.exists():
        plan = plan_of(model)
        try:  # a checkpoint that was loaded and is saved over itself keeps them
            belong = plan is not None and load_controllers(path).regime.to_dict() == plan.provenance.get("regime")
        except CalibrationError:
            belong = False
        if not belong:
            path.unlink()


def _check_plan_in_force(model: PreTrainedModel) -> None:
    """Refuse to save a plan that is not what the model runs (a config edited in place, layers removed)."""
    plan = AAHConfig.from_model(model)
    plan.check_fits(model)
    for layer, (name, module) in enumerate(attention_modules(model)):
        if module.aah_layer.windows != plan.windows[layer] or module.aah_layer.sink_tokens != plan.sink_tokens:
            raise PlanError(
                f"`config.{CONFIG_KEY}` says other windows for {name} than it runs with, so nothing was saved. A plan "
                "cannot be edited in place: put a new one into force with `patch_model(model, config=...)`."
            )


@contextmanager
def _unpacked_gguf(model: Any) -> Iterator[None]:
    """Let a model that was read from a GGUF file be saved.

    Where transformers (5.17 to 5.24) has no kernel for such weights it unpacks them into ordinary tensors, keeps
    the quantizer attached all the same, and then refuses to save "a quantized model".
    """
    quantizer = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    packed = any(type(m).__name__.startswith("Gguf") for m in model.modules())
    if method != "gguf" or packed or not all(p.is_floating_point() for p in model.parameters()):
        yield
        return
    hidden = model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    try:
        yield
    finally:
        model.hf_quantizer = quantizer
        if hidden is not None:
            model.config.quantization_config = hidden
