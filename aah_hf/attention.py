"""AAHAttention, and the attention function that runs it inside transformers.

`AAHAttention` is a mixin without a `forward`: a family's own attention class keeps doing projections,
norms, RoPE and the cache, and calls the function registered here for the attention product. So state
dicts, device hooks and whatever a family's forward is called tomorrow stay the family's own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from .cache_attention import Step, attend, check_fits
from .cache_layer import CacheView
from .errors import AAHError, OperatorError, PlanError
from .families import FAMILIES
from .masks import AAHMask, aah_mask
from .ops import windowed_attention
from .plan import CONFIG_KEY, AAHConfig

logger = logging.get_logger(__name__)

PREVIOUS = "aah_previous_implementation"
"""Attribute of a patched attention module: the implementation that unpatching brings back."""

NEXT_CALL = "aah_next_call"
"""Attribute of a patched attention module: a function that takes the module's next call in place of this one. It
takes itself away first, so a call that gradient checkpointing repeats is not seen twice."""

FAR_BEYOND = 4
"""A plan warns once when it runs at more than this many times the length it was calibrated at."""

# keyword arguments that models pass down and that do not change the attention product (`sliding_window` arrives
# through the mask as well, packing is read by AAHMask.note_packing), or that `score_rules` and `_refuse` look at
_KNOWN = frozenset(
    [
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "past_key_values",
        "cache",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "sliding_window",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "labels",
        "logits_to_keep",
        "is_causal",
        "softcap",
        "s_aux",
        "position_bias",
        "head_mask",
    ]
)


@dataclass(frozen=True)
class LayerWindows:
    """One layer's part of a plan, as its attention module carries it."""

    windows: tuple[int | None, ...]
    sink_tokens: int
    calibrated_at: int | None = None

    def covers(self, length: int) -> bool:
        """Whether no head hides anything in a sequence of `length` tokens."""
        return all(w is None or w + self.sink_tokens >= length for w in self.windows)

    def __str__(self) -> str:
        counts = Counter("full" if w is None else str(w) for w in self.windows)
        return ", ".join(f"{name}×{n}" for name, n in counts.items())


class AAHAttention:
    """What every patched attention module is an instance of; its windows are in `aah_layer`."""

    aah_layer: LayerWindows

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        windows = f"windows=[{self.aah_layer}], sink_tokens={self.aah_layer.sink_tokens}"
        return f"{own}, {windows}" if own else windows


_CLASSES: dict[type, type] = {}  # by class, not by name: somebody's own subclass may be called like its parent


def aah_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a family's attention class that is an AAHAttention; one per family, importable by name."""
    if base not in _CLASSES:
        doc = f"{base.__name__} whose query heads have windows of their own."
        name = f"AAH{base.__name__}"
        _CLASSES[base] = type(name, (AAHAttention, base), {"__module__": __name__, "__doc__": doc})
    return _CLASSES[base]


def __getattr__(name: str) -> Any:
    """Unpickling a patched module in a fresh process asks for its class before anything was patched."""
    for family in FAMILIES.values():
        if name == f"AAH{family.attention}":
            return aah_class(family.attention_class())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def adopt(module: Any, plan: AAHConfig, layer: int) -> None:
    """Make a family's attention module an AAHAttention that runs layer `layer` of `plan`."""
    if not isinstance(module, AAHAttention):
        module.__class__ = aah_class(type(module))
    module.aah_layer = LayerWindows(plan.windows[layer], plan.sink_tokens, plan.calibrated_at)


def set_windows(module: Any, windows: tuple[int | None, ...]) -> None:
    """Other windows for a module that has some already; the model's plan must follow (`patching.renew_plan`)."""
    if module.aah_layer.windows != windows:
        module.aah_layer = replace(module.aah_layer, windows=windows)


def release(module: Any) -> None:
    """Undo `adopt`: the module is again an instance of its family's own class, nothing more."""
    if isinstance(module, AAHAttention):
        del module.aah_layer
        module.__dict__.pop(PREVIOUS, None)
        module.__dict__.pop(NEXT_CALL, None)
        _, module.__class__ = type(module).__bases__


def aah_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AAHMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers under "aah".

    Args:
        module: the attention module; must be an AAHAttention.
        query: [batch, query_heads, q_len, head_dim], after q/k-norm and RoPE.
        key, value: [batch, kv_heads, kv_len, head_dim], after the cache update; of an AAHCache its view.
        attention_mask: AAHMask, or the caller's own 4D mask (bool or additive), which is ANDed.

    Returns:
        ([batch, q_len, query_heads, head_dim], None).

    Raises:
        AAHError: the module has no windows, or an argument asks for something the operator does not do.
    """
    take = module.__dict__.get(NEXT_CALL)
    if take is not None:
        return take(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    layer = getattr(module, "aah_layer", None)
    if layer is None:
        raise PlanError(
            f"{type(module).__name__} was asked to run attention {CONFIG_KEY!r} but has no windows. Patch the model "
            "with `patch_model(model, config=AAHConfig.from_model(model))`. (Two models that share one config "
            "object cannot be patched separately: build the second from a copy.)"
        )
    _refuse(kwargs, module)
    if isinstance(key, CacheView):
        return _through_cache(module, query, key, attention_mask, dropout, scaling, **kwargs)
    if attention_mask is None:
        if query.shape[2] != key.shape[2]:
            raise OperatorError(
                f"{query.shape[2]} queries over {key.shape[2]} keys came without a mask, so their positions are "
                "unknown (continuous batching does this). Use `generate()`, or "
                "`model.set_attn_implementation('sdpa')` (or 'eager') for full attention."
            )
        attention_mask = aah_mask(query.shape[0], query.shape[2], key.shape[2], device=query.device)

    mask = attention_mask
    start: int | Tensor
    dense: Tensor | None
    if isinstance(mask, Tensor):
        dense, start, kv_start, limit, sequences = mask, _start_by_mask(mask, query, key), 0, None, None
    else:
        mask.note_packing(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
        dense, start, kv_start, limit, sequences = mask.dense, mask.q_start, mask.kv_start, mask.limit, mask.sequences
    end = kv_start + key.shape[2] if isinstance(start, Tensor) else start + query.shape[2]
    _warn_far_beyond(layer, end)

    rules = score_rules(kwargs)
    # SDPA has no argument for those, and a family's own eager attention would build T×T scores
    if not rules and layer.covers(end) and (isinstance(mask, Tensor) or not mask.leaks):
        stock = mask if isinstance(mask, Tensor) else mask.stock()
        return sdpa_attention_forward(module, query, key, value, stock, dropout=dropout, scaling=scaling, **kwargs)

    if torch.is_autocast_enabled(query.device.type):
        # rotary embedding leaves q and k in float32 there, v comes from a half precision matmul
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = windowed_attention(
        query,
        key,
        value,
        layer.windows,
        layer.sink_tokens,
        scale=scaling,
        q_start=start,
        kv_start=kv_start,
        sequences=sequences,
        limit=limit,
        mask=dense,
        dropout=dropout,
        **rules,
    )
    return out.transpose(1, 2).contiguous(), None


def score_rules(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a family does to the scores, as arguments of `windowed_attention`.

    gemma2 caps them (`softcap`), gpt_oss has a learned logit per query head (`s_aux`).
    """
    names = {"softcap": "softcap", "s_aux": "sink_logits"}
    return {ours: kwargs[theirs] for theirs, ours in names.items() if kwargs.get(theirs) is not None}


@torch.compiler.disable  # see AAHCache.update
def _through_cache(
    module: Any,
    query: Tensor,
    view: CacheView,
    mask: AAHMask | Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over an AAHCache, which stores the new tokens when it was used."""
    layer, q_len = module.aah_layer, query.shape[2]
    if mask is None:
        mask = aah_mask(query.shape[0], q_len, view.past + q_len, view.past, device=query.device)
    check_fits(view.layer, layer.windows, layer.sink_tokens, mask)
    if isinstance(mask, AAHMask):
        mask.note_packing(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"), single=True)
    step = Step.of(mask, view)
    if view.past == 0:  # nothing is cached yet: the same as without a cache
        out, _ = aah_attention_forward(module, query, view.keys, view.values, mask, dropout, scaling, **kwargs)
    else:
        _warn_far_beyond(layer, view.past + q_len)
        out = attend(view, query.to(view.keys.dtype), step, scale=scaling, dropout=dropout, **score_rules(kwargs))
        out = out.transpose(1, 2).contiguous()
    view.store(step.rows)
    return out, None


def _start_by_mask(mask: Tensor, query: Tensor, key: Tensor) -> int | Tensor:
    """Position of the first query, read off a caller's 4D mask [batch, heads, q_len, kv_len].

    The last query's own key is the last that it sees; the number of keys says nothing, because a static
    cache hands over its whole buffer.
    """
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or mask.shape[2] != q_len or mask.shape[3] != kv_len:
        raise OperatorError(
            f"the 4D attention mask has shape {tuple(mask.shape)} and there are {q_len} queries and {kv_len} keys; "
            f"expected [{batch} or 1, {heads} or 1, {q_len}, {kv_len}]."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise OperatorError(
            f"the 4D attention mask is of type {mask.dtype}; expected bool (True is seen) or a floating type (added)."
        )

    def seen(part: Tensor) -> Tensor:
        return part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min

    start: int | Tensor = 0
    if q_len != kv_len:
        start = (seen(mask[:, :, -1]) * torch.arange(1, kv_len + 1, device=mask.device)).amax().clamp(min=q_len) - q_len
    if torch.compiler.is_compiling():
        return start
    start = int(start)
    _warn_once_of_4d_masks()
    if bool(seen(mask.diagonal(start + 1, 2, 3)).any()):
        raise OperatorError(
            "the 4D attention mask lets a query see the key after it (image tokens of multimodal models do), and "
            "per-head windows are causal. Pass `mask.tril()` if that is what you mean."
        )
    return start


def _warn_once_of_4d_masks() -> None:
    logger.warning_once(
        "A 4D attention mask does not say what is padding or where a document begins, so sink tokens are the first "
        "keys of each row. Pass a 2D mask (padding) or position_ids that restart at 0 (packing) where that matters."
    )


def _refuse(kwargs: dict[str, Any], module: nn.Module) -> None:
    if kwargs.get("output_attentions"):
        raise AAHError(
            "output_attentions=True is not available with per-head windows: the weights are never built. "
            "Load the model with attn_implementation='eager' to look at them."
        )
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise AAHError(f"{type(module).__name__} passes `{name}` to attention, which per-head windows do not do.")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise AAHError("per-head windows are causal and the model asked for bidirectional attention (is_causal=False).")
    unknown = sorted(name for name, value in kwargs.items() if name not in _KNOWN and value is not None)
    if unknown:
        raise AAHError(
            f"{type(module).__name__} passes arguments to attention that aah_hf does not know: {unknown}. They may "
            "change the result, so they are not ignored; please report the model and the transformers version."
        )


def _warn_far_beyond(layer: LayerWindows, length: int) -> None:
    if (
        layer.calibrated_at is not None
        and length > FAR_BEYOND * layer.calibrated_at
        and not torch.compiler.is_compiling()
    ):
        logger.warning_once(
            f"This model's windows were calibrated at {layer.calibrated_at} tokens and it now runs at more than "
            f"{FAR_BEYOND}× that. Quality there was not measured: calibrate again with a longer `seq_len`."
        )


def register() -> None:
    """Make "aah" known to transformers, the function and its mask (without which padding would be lost)."""
    AttentionInterface.register(CONFIG_KEY, aah_attention_forward)
    AttentionMaskInterface.register(CONFIG_KEY, aah_mask)
