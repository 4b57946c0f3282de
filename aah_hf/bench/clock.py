"""The time that a model spends in attention."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..families import family_of


def now(device: torch.device | str) -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def attention_clock(model: PreTrainedModel, name: str, cache: Cache | None = None) -> Iterator[list[float]]:
    """The seconds of every call of the attention function `name`, and of `cache.update`, while the `with` lasts."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
            start = now(second.device)  # the query after the module; the values after the keys
            result = function(first, second, *args, **kwargs)
            seconds.append(now(second.device) - start)
            return result

        return call

    if name in ALL_ATTENTION_FUNCTIONS:
        function = ALL_ATTENTION_FUNCTIONS[name]
    else:  # "eager" is not registered, every family brings its own
        function = sys.modules[family_of(model).attention_class().__module__].eager_attention_forward
    # in these objects' own tables, which go before what is registered and before the class
    ALL_ATTENTION_FUNCTIONS[name] = timed(function)
    if cache is not None:
        cache.update = timed(cache.update)  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if cache is not None:
            del cache.update
