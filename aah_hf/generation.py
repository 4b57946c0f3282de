"""What `generate()` does differently for a patched model; installed around transformers' own functions by hooks.py."""

from __future__ import annotations

import os
from typing import Any

from transformers import DynamicCache
from transformers.utils import logging

from .cache import AAHCache
from .errors import AAHError, CacheError
from .plan import CONFIG_KEY, head_counts, plan_of, text_config

logger = logging.get_logger(__name__)

ENVIRONMENT = "AAH_HF_KV_CACHE"
"""`0` makes `generate()` use transformers' DynamicCache for patched models too; so does cache_implementation="dynamic"."""

_CACHE_NAMES = ("cache", "past_key_values")  # transformers renamed the argument in 5.18 or later


def shrinking_cache_is_default() -> bool:
    """`AAH_HF_KV_CACHE`, checked."""
    value = os.environ.get(ENVIRONMENT, "1") or "1"
    if value not in {"0", "1"}:
        raise AAHError(
            f"{ENVIRONMENT} is {value!r}; expected 1 (generate with an AAHCache) or 0 (with a DynamicCache)."
        )
    return value == "1"


def prepare_cache(
    original: Any, self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Put an AAHCache where `generate()` of a patched model would have made a DynamicCache.

    A cache that the caller passed is never replaced (they hold on to it), nor is one that was asked for by name.
    """
    given = next((model_kwargs[name] for name in _CACHE_NAMES if model_kwargs.get(name) is not None), None)
    result = original(self, generation_config, model_kwargs, *args, **kwargs)
    if isinstance(given, AAHCache):
        given.check_whole()
        if not generation_config.is_assistant:  # an assistant model is called round after round and rolled back
            _check_prompt_is_longer(given, generation_config, model_kwargs)
            given.stop_recording()
    if given is not None or generation_config.cache_implementation is not None or not shrinking_cache_is_default():
        return result
    if text_config(self)._attn_implementation != CONFIG_KEY or _exits_early(self):
        return result
    for name in _CACHE_NAMES:
        made = model_kwargs.get(name)
        if type(made) is DynamicCache and not made.offloading and made.get_seq_length() == 0:
            model_kwargs[name] = AAHCache(self)
            if generation_config.is_assistant:
                model_kwargs[name].activate_past_recording()
    return result


def _check_prompt_is_longer(cache: AAHCache, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """transformers cuts what is cached off the prompt, and off its end where the cache holds more."""
    mask = model_kwargs.get("attention_mask")
    # it covers cached and new tokens even if only the new ones were passed; one of ones only leaves just its length
    length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
    seen = cache.get_seq_length()
    if length is not None and 0 < length <= seen and (mask is None or mask.dim() == 2):
        raise CacheError(
            f"the cache holds {seen} tokens and the prompt has {length}, so there is no token to go on with. Pass the "
            "whole sequence, cached tokens and at least one new one (or the new ones and the mask of all), or crop or "
            "reset the cache."
        )


def _exits_early(model: Any) -> bool:
    """Whether only the plan's first layers run now (`assistant_early_exit`), which a DynamicCache serves as well."""
    plan = plan_of(model)
    return plan is not None and len(plan.windows) > head_counts(model)[0]


def refuse_continuous_batching(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Continuous batching replaces attention implementations that it does not know, in silence where it can."""
    if text_config(self)._attn_implementation == CONFIG_KEY:
        raise AAHError(
            "continuous batching (generate_batch, `transformers serve --continuous-batching`, cache_implementation="
            "'paged') has a paged cache and attention of its own and would run full attention. Use generate() with a "
            "padded batch, or model.set_attn_implementation('sdpa') to serve the base model with full attention."
        )
    return original(self, *args, **kwargs)
