"""AAHCache to and from a .safetensors file: a long prompt is processed once and reused in other processes.

The file holds what queries still see, without the slack of growing buffers, and says for which plan. It may come from a
stranger: every number is checked before a tensor is read.
"""

from __future__ import annotations

import errno
import json
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .cache_layer import AAHCacheLayer
from .cache_rows import Rows
from .errors import CacheError
from .families import attention_modules
from .files import replacing
from .plan import head_dim

FORMAT = "aah_hf.cache"
VERSION = 1
MAX_TOKENS = 2**31
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save_cache(cache: Any, path: str | Path) -> None:
    """See `AAHCache.save`. The file appears whole or not at all."""
    cache.check_whole()
    layers: list[AAHCacheLayer] = cache.layers
    if not all(layer.is_initialized for layer in layers) or not layers[0].past:
        raise CacheError("the cache holds nothing yet; run the model with it before saving it.")
    tensors, offsets = {}, []
    for index, layer in enumerate(layers):
        tight = layer.tight()
        assert tight.keys is not None and tight.values is not None
        if wrong := _wrong_tensors(tight.keys, tight.values):
            raise CacheError(f"the cache cannot be saved: in layer {index} {wrong}.")
        tensors[f"{index}.keys"] = tight.keys.detach().contiguous()
        tensors[f"{index}.values"] = tight.values.detach().contiguous()
        offsets.append(tight.offset)
    about = {
        "version": VERSION,
        "windows": cache.plan.windows,
        "sink_tokens": cache.plan.sink_tokens,
        "limits": [layer.limit for layer in layers],
        "kv_heads": cache.kv_heads,
        "past": layers[0].past,
        "first": layers[0].rows.first,
        "sinks": layers[0].rows.sinks,
    }
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with replacing(path) as unfinished:
            save_file(tensors, unfinished, metadata={"format": FORMAT, "cache": json.dumps(about)})
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CacheError(
            f"cannot write the cache to {path}: {reason}. Pass the path of a file in a folder that exists."
        ) from error


def load_cache(cls: type, path: str | Path, config: Any, device: torch.device | str | None) -> Any:
    """See `AAHCache.load`."""
    cache = cls(config)
    path = Path(path)
    if not path.is_file():
        raise CacheError(f"there is no cache file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            about = _about(file.metadata() or {}, path)
            rows, past = _rows(about, cache, path)
            devices = _devices(config, len(cache.layers), device)
            for index, (layer, where) in enumerate(zip(cache.layers, devices)):
                _fill(layer, file, index, rows, past, head_dim(config), where, path)
    except SafetensorError as error:
        raise CacheError(f"{path} is not a whole safetensors file: {error}.") from error
    return cache


def _about(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise CacheError(f"{path} was not written by AAHCache.save.")
    try:
        about = json.loads(metadata["cache"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CacheError(f"{path} does not say what it holds: {error}.") from error
    version = about.get("version") if isinstance(about, dict) else None
    if version != VERSION:
        raise CacheError(f"{path} has format version {version!r} and this aah_hf reads {VERSION}.")
    return about


def _rows(about: dict[str, Any], cache: Any, path: Path) -> tuple[Rows, int]:
    plan = cache.plan
    for name, own in (
        ("windows", [list(layer) for layer in plan.windows]),
        ("sink_tokens", plan.sink_tokens),
        ("limits", [layer.limit for layer in cache.layers]),
        ("kv_heads", cache.kv_heads),
    ):
        if about.get(name) != own:
            raise CacheError(
                f"{path} was saved for another model or plan: its {name} differ from this model's. Process the prompt "
                "again with this model."
            )
    try:
        return _checked_rows(about["past"], about["first"], about["sinks"], plan.sink_tokens), about["past"]
    except (KeyError, TypeError, ValueError) as error:
        raise CacheError(f"{path} is damaged: its rows make no sense ({error}).") from error


def _checked_rows(past: Any, first: Any, sinks: Any, sink_tokens: int) -> Rows:
    _integers([past], 1, MAX_TOKENS)
    _integers(first, 0, past)
    if not 0 < len(first) == len(sinks):
        raise ValueError(f"{len(first)} rows, and sink tokens of {len(sinks)}")
    for begin, row in zip(first, sinks):
        _integers(row, begin, past - 1)
        # a row's first real token is its first sink token
        head = [begin] if sink_tokens and begin < past else []
        if len(row) > sink_tokens or row != sorted(set(row)) or row[:1] != head:
            raise ValueError(f"sink tokens {row[:10]} of a row that begins at {begin} of {past}")
    return Rows(tuple(first), tuple(map(tuple, sinks)))


def _fill(
    layer: AAHCacheLayer, file: Any, index: int, rows: Rows, past: int, size: int, device: torch.device, path: Path
) -> None:
    longest = past - min(rows.first)
    caps = [longest if keep is None else min(longest, keep) for keep in layer.keep]
    tensors = []
    for name in (f"{index}.keys", f"{index}.values"):
        shape = list(file.get_slice(name).get_shape()) if name in file.keys() else None  # noqa: SIM118
        if shape != [len(rows), sum(caps), size]:
            raise CacheError(
                f"{path} is damaged: tensor {name!r} has shape {shape}, expected {[len(rows), sum(caps), size]}."
            )
        tensors.append(file.get_tensor(name))
    if wrong := _wrong_tensors(*tensors):
        raise CacheError(f"{path} is damaged: in layer {index} {wrong}.")
    layer.adopt(*(tensor.to(device) for tensor in tensors), rows=rows, past=past, offset=(0, *accumulate(caps)))


def _wrong_tensors(keys: torch.Tensor, values: torch.Tensor) -> str | None:
    """What no model in a floating type stores."""
    if keys.dtype != values.dtype or keys.dtype not in DTYPES:
        return f"keys are of type {keys.dtype} and values of {values.dtype}; expected one type of {list(DTYPES)}"
    if not (keys.isfinite().all() and values.isfinite().all()):
        return "some keys or values are not finite"
    return None


def _integers(values: Any, low: int, high: int) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{value!r} is no integer from {low} to {high}")


def _devices(config: Any, layers: int, device: torch.device | str | None) -> list[torch.device]:
    if device is not None:
        try:
            return [torch.empty(0, device=device).device] * layers
        except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
            raise CacheError(f"device is {device!r}, which is not one of this machine: {error}.") from error
    if not isinstance(config, torch.nn.Module):
        return [torch.device("cpu")] * layers
    found = [next(module.parameters()).device for _, module in attention_modules(config)]
    return [torch.device("cpu") if d.type == "meta" else d for d in found]  # weights that accelerate keeps on disk
