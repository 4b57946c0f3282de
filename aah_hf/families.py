"""Model families as data: one table row per family, and why others are refused.

A family is supported when its attention module hands q, k and v (after norms, RoPE and the cache)
to transformers' attention interface and adds nothing that per-head windows would have to know.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .errors import UnsupportedModelError
from .plan import text_config


@dataclass(frozen=True)
class Family:
    """One supported model family.

    Attributes:
        model_type: `config.model_type` of the decoder.
        module: transformers module that defines it, below `transformers.models`.
        attention: name of its attention class.
        residual_tap: submodule of a decoder layer whose *input* is the residual stream right after the
            attention output was added (calibration measures errors relative to it).
        output_norm: submodule of a decoder layer, an RMSNorm, that the attention output goes through before it
            is added; None where it is added as it is.
        stock: transformers' implementation of its full attention. Not "sdpa" where SDPA has no argument for what
            the family does to its scores (transformers 5.17 runs gemma2 through it all the same, uncapped).
    """

    model_type: str
    module: str
    attention: str
    residual_tap: str = "post_attention_layernorm"
    output_norm: str | None = None
    stock: str = "sdpa"

    def attention_class(self) -> type[nn.Module]:
        return getattr(importlib.import_module(f"transformers.models.{self.module}"), self.attention)


_GEMMA = ("pre_feedforward_layernorm", "post_attention_layernorm")

FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama", "llama.modeling_llama", "LlamaAttention"),
        Family("mistral", "mistral.modeling_mistral", "MistralAttention"),
        Family("mixtral", "mixtral.modeling_mixtral", "MixtralAttention"),
        Family("qwen2", "qwen2.modeling_qwen2", "Qwen2Attention"),
        Family("qwen2_moe", "qwen2_moe.modeling_qwen2_moe", "Qwen2MoeAttention"),
        Family("qwen3", "qwen3.modeling_qwen3", "Qwen3Attention"),
        Family("qwen3_moe", "qwen3_moe.modeling_qwen3_moe", "Qwen3MoeAttention"),
        Family("smollm3", "smollm3.modeling_smollm3", "SmolLM3Attention"),
        Family("granite", "granite.modeling_granite", "GraniteAttention"),
        Family("olmo2", "olmo2.modeling_olmo2", "Olmo2Attention", "mlp", "post_attention_layernorm"),
        Family("olmo3", "olmo3.modeling_olmo3", "Olmo3Attention", "mlp", "post_attention_layernorm"),
        Family("glm4", "glm4.modeling_glm4", "Glm4Attention", output_norm="post_self_attn_layernorm"),
        Family("gemma2", "gemma2.modeling_gemma2", "Gemma2Attention", *_GEMMA, stock="eager"),
        Family("gemma3_text", "gemma3.modeling_gemma3", "Gemma3Attention", *_GEMMA),
        Family("gpt_oss", "gpt_oss.modeling_gpt_oss", "GptOssAttention", stock="eager"),
    )
}

_LATENT = "its attention compresses keys and values (MLA) and has no plain KV heads"
REFUSED: dict[str, str] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "llama4_text": "its layers use chunked attention",
    "gpt2": "it has absolute positions and a fused q/k/v projection; only RoPE decoders are supported",
}


def family_of(model_or_config: Any) -> Family:
    """The table row of a model.

    Raises:
        UnsupportedModelError: the family is not in the table; the message says why, where known.
    """
    model_type = str(getattr(text_config(model_or_config), "model_type", None))
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = REFUSED.get(model_type, "it has not been checked")
    raise UnsupportedModelError(
        f"model family {model_type!r} is not supported: {reason}. Supported: {', '.join(sorted(FAMILIES))}."
    )


def attention_modules(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the attention module of every layer, in layer order.

    Raises:
        UnsupportedModelError: the family is unsupported, the model is multimodal or bidirectional, or it holds
            other attention modules than the family's own (custom code), or not exactly one per layer.
    """
    family = family_of(model)
    if text_config(model) is not model.config:
        raise UnsupportedModelError(
            f"{type(model).__name__} is multimodal, and per-head windows are only for text: image tokens may see each "
            f"other in both directions. Load its decoder alone, as a text model of type {family.model_type!r}."
        )
    base = family.attention_class()
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, base):
            found[int(module.layer_idx)] = name, module  # type: ignore[arg-type]
    layers = int(text_config(model).num_hidden_layers)
    if sorted(found) != list(range(layers)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {family.attention} modules for layers {sorted(found)} and its config says "
            f"{layers} layers: the model was modified or uses custom code."
        )
    for name, module in found.values():
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError(
                f"{name} of {type(model).__name__} is bidirectional (is_causal=False), and per-head windows are causal."
            )
    return [found[index] for index in range(layers)]


def decoder_layers(model: Any) -> Iterator[nn.Module]:
    """The decoder layer around each attention module, in layer order."""
    modules = dict(model.named_modules())
    for name, _ in attention_modules(model):
        yield modules[name.rpartition(".")[0]]
