"""Looking into a model that runs: attention functions of our own for the time of a `with`, and nothing left behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention import score_rules
from ..errors import CalibrationError
from ..families import attention_modules
from ..ops import windowed_attention

Product = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
"""(module, q, k, v, mask, keyword arguments) -> attention output [1, seq_len, query_heads, head_dim]."""

TAP = "aah_tap"
"""Name under which transformers knows the function that looks up a module's own product."""

_PRODUCT = "_aah_product"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if kwargs.get("position_bias") is not None:
        raise CalibrationError("this model's attention uses `position_bias`, which calibration does not know.")
    return module.__dict__[_PRODUCT](module, query, key, value, attention_mask, kwargs), None


AttentionInterface.register(TAP, _attend)
AttentionMaskInterface.register(TAP, sdpa_mask)


@contextmanager
def products(model: nn.Module, per_layer: Sequence[Product]) -> Iterator[None]:
    """Run the attention layers of this model, and of no other, through functions of ours.

    The functions hang on the modules, not in a registry: two models in two threads do not mix.

    Raises:
        CalibrationError: the model is being looked at already.
    """
    modules = [module for _, module in attention_modules(model)]
    if any(_PRODUCT in module.__dict__ for module in modules):
        raise CalibrationError("this model is being calibrated already (in another thread?); wait for that to end.")
    configs: list[Any] = list({id(module.config): module.config for module in modules}.values())
    if any(config._attn_implementation == TAP for config in configs):
        raise CalibrationError("another model with the same config object is being calibrated; wait for that to end.")
    before = [config._attn_implementation for config in configs]
    try:
        for module, product in zip(modules, per_layer):
            module.__dict__[_PRODUCT] = product
        for config in configs:
            # not the public setter: it would overwrite the sub-configs of composite models as well
            config._attn_implementation_internal = TAP
        yield
    finally:
        for config, implementation in zip(configs, before):
            config._attn_implementation_internal = implementation
        for module in modules:
            module.__dict__.pop(_PRODUCT, None)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode and the random generators come back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    gpus = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        stack.enter_context(torch.no_grad())
        for kind in kinds:  # the caller's autocast would measure another model than the one that is patched
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def input_device(model: Any) -> torch.device:
    """Where token ids go; accelerate moves them on by itself where weights are offloaded (and `meta`)."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def forward(model: Any, ids: Tensor) -> None:
    """Run the model over one sequence [seq_len] for the sake of its attention layers."""
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    # the logits of 2048 tokens cost as much as a third of a small model, and nobody reads them
    extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(core.forward).parameters else {}
    model(input_ids=ids[None].to(input_device(model)), use_cache=False, **extra)


def full_product(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    """Full attention: SDPA, or the operator where a family does something to the scores."""
    if not score_rules(kwargs):
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0]
    return _operator(q, k, v, [None] * q.shape[1], 0, mask, kwargs)


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    windows: Sequence[int | None],
    sink_tokens: int,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    out = windowed_attention(
        q, k, v, windows, sink_tokens, scale=kwargs.get("scaling"), limit=native_limit(mask), **score_rules(kwargs)
    )
    return out.transpose(1, 2).contiguous()


def native_limit(mask: Tensor | None) -> int | None:
    """How many keys back a layer natively looks (sequences without padding); None when all the way."""
    return None if mask is None else int(mask[0, 0, -1].sum())


def windowed_products(windows: Sequence[Sequence[int | None]], sink_tokens: int) -> list[Product]:
    """Attention under a plan, without patching the model: one function per layer for `products`."""

    def product_of(layer: Sequence[int | None]) -> Product:
        def product(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
        ) -> Tensor:
            if all(w is None for w in layer):
                return full_product(module, q, k, v, mask, kwargs)
            return _operator(q, k, v, layer, sink_tokens, mask, kwargs)

        return product

    return [product_of(layer) for layer in windows]
