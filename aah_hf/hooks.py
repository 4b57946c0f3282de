"""Every wrap of somebody else's function, in one table.

A wrap is installed once, checks that the function still takes the arguments it relies on, and can be
removed. Nothing else in this package replaces an attribute of another library.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from . import checkpoint, generation
from .errors import AAHError


@dataclass(frozen=True)
class Hook:
    """`wrapper(original, *args, **kwargs)` runs in the place of `owner.name`.

    Attributes:
        parameters: arguments of the original that the wrapper relies on; checked when installing.
        why: the reason, for whoever debugs a stack trace that ends here.
    """

    owner: type
    name: str
    wrapper: Callable
    parameters: tuple[str, ...]
    why: str


HOOKS = (
    Hook(
        PreTrainedConfig,
        "to_dict",
        checkpoint.config_to_dict,
        ("self",),
        "config.json must name the attention implementation, which transformers honours on load and drops on save",
    ),
    Hook(
        PreTrainedConfig,
        "from_dict",
        checkpoint.config_from_dict,
        ("cls", "config_dict"),
        "a config re-saved without aah_hf keeps the plan and loses the implementation: it would load as full attention",
    ),
    Hook(
        PreTrainedModel,
        "post_init",
        checkpoint.adopt_after_init,
        ("self",),
        "a model built from a config with a plan gets its AAHAttention modules, and the plan is validated, before weights load",
    ),
    Hook(
        PreTrainedModel,
        "save_pretrained",
        checkpoint.save_with_card,
        ("self", "save_directory", "is_main_process"),
        "a patched checkpoint gets a model card that says what was patched and how to load it",
    ),
    Hook(
        GenerationMixin,
        "_prepare_cache_for_generation",
        generation.prepare_cache,
        ("self", "generation_config", "model_kwargs"),
        "generate() of a patched model gets the cache that drops what no query sees any more",
    ),
    Hook(
        GenerationMixin,
        "init_continuous_batching",
        generation.refuse_continuous_batching,
        ("self",),
        "continuous batching would replace per-head windows with full attention",
    ),
)

_MARK = "__aah_original__"


def install() -> None:
    """Install every hook of the table that is not installed yet.

    Raises:
        AAHError: this version of the library lacks a function or an argument that a hook needs.
    """
    for hook in HOOKS:
        static = inspect.getattr_static(hook.owner, hook.name, None)
        original = getattr(static, "__func__", static)  # a classmethod wraps its function
        if original is None:
            raise AAHError(_mismatch(hook, "it is gone"))
        if hasattr(original, _MARK):
            continue
        missing = [p for p in hook.parameters if p not in inspect.signature(original).parameters]
        if missing:
            raise AAHError(_mismatch(hook, f"it no longer takes {missing}"))
        wrapped = _wrap(hook, original)
        setattr(hook.owner, hook.name, classmethod(wrapped) if isinstance(static, classmethod) else wrapped)


def remove() -> None:
    """Put every original function back (saving and loading of patched models then stop working)."""
    for hook in HOOKS:
        static = inspect.getattr_static(hook.owner, hook.name)
        original = getattr(getattr(static, "__func__", static), _MARK, None)
        if original is not None:
            setattr(hook.owner, hook.name, classmethod(original) if isinstance(static, classmethod) else original)


def _wrap(hook: Hook, original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook.wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    return wrapped


def _mismatch(hook: Hook, what: str) -> str:
    return (
        f"aah_hf relies on {hook.owner.__name__}.{hook.name} of transformers (because {hook.why}), and in version "
        f"{transformers_version} {what}. Supported: transformers >= 5.17, < 6."
    )
