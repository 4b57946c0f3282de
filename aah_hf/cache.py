"""AAHCache: a KV cache that keeps, per KV head, exactly what its query heads can still see."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from .cache_layer import AAHCacheLayer
from .errors import CacheError, PlanError
from .plan import AAHConfig, head_counts, native_windows, plan_of


class AAHCache(Cache):
    """Cache for a patched model: exact results, and memory that stops growing once every window is full.

    KV head h keeps its first `sink_tokens` real tokens and the last `max(window of its query heads) - 1`, which is
    `min(T, s + w - 1)` keys of a sequence of T tokens (KV coverage, method.md §2). `generate()` of a patched model uses
    it by default. By hand: `model(ids, past_key_values=AAHCache(model), use_cache=True)`.

    Args:
        config: the patched model, or its config.
        plan: the plan to keep keys for, where `config` carries none.
        rollback: tokens that `crop` can take back once a window is full. Default 0; assisted and prompt-lookup
            decoding raise it by themselves.
        offloading: keep all layers but the running one on the CPU (for a model on a GPU).

    Raises:
        PlanError: there is no plan, or it does not fit the model (layers, query heads), or the model carries
            another one.
        CacheError: `rollback` is not an integer >= 0.
    """

    layers: list[AAHCacheLayer]  # type: ignore[assignment]

    def __init__(
        self,
        config: PreTrainedModel | PreTrainedConfig,
        *,
        plan: AAHConfig | None = None,
        rollback: int = 0,
        offloading: bool = False,
    ) -> None:
        own = plan_of(config)
        if plan is None:
            plan = own if own is not None else AAHConfig.from_model(config)
        if own is not None and (own.windows, own.sink_tokens) != (plan.windows, plan.sink_tokens):
            raise PlanError(
                f"the model carries another plan than the one given (sink tokens {own.sink_tokens} and "
                f"{plan.sink_tokens}): a cache for other windows would drop keys that are still seen. Leave `plan` out."
            )
        plan.check_fits(config)
        if not isinstance(rollback, int) or isinstance(rollback, bool) or rollback < 0:
            raise CacheError(f"rollback is {rollback!r}; expected an integer >= 0.")
        _, _, kv_heads = head_counts(config)
        self.plan, self.kv_heads = plan, kv_heads
        layers = [
            AAHCacheLayer(windows, kv_heads, plan.sink_tokens, limit, rollback)
            for windows, limit in zip(plan.windows, native_windows(config))
        ]
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self.offloading, self.only_non_sliding = offloading, False
        self._streams: dict[torch.device, Any] = {}
        self._changing = False

    def __repr__(self) -> str:
        lines = [f"  ({index}): keeps {layer.extra_repr()}" for index, layer in enumerate(self.layers)]
        head = (
            f"AAHCache({self.get_seq_length()} tokens seen, {self.plan.sink_tokens} sink tokens, stored "
            f"{self.nbytes() / 2**20:.2f} MiB, allocated {self.nbytes('allocated') / 2**20:.2f} MiB; keys per KV head:"
        )
        return "\n".join([head, *lines, ")"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_streams": {}}  # a CUDA stream can neither be copied nor pickled

    def nbytes(self, kind: Literal["stored", "allocated"] = "stored") -> int:
        """Bytes of keys and values of all layers and rows.

        Args:
            kind: "stored" counts what queries still see, `coverage(model, T).kv_bytes` for a row of T tokens;
                "allocated" counts the buffers, at most 1.25 times that while they grow and equal once they are full
                (rows of unequal length fill the buffers of the longest).
        """
        if kind not in ("stored", "allocated"):
            raise CacheError(f"kind is {kind!r}; choose 'stored' or 'allocated'.")
        return sum(getattr(layer, kind)() for layer in self.layers)

    @torch.compiler.disable  # positions are numbers here: traced, every token would be compiled for itself
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Views for the attention function, which stores the new tokens when it has used them.

        Raises:
            CacheError: a forward pass was interrupted before, or the layer or the shapes are not the model's.
        """
        if layer_idx >= len(self.layers):
            raise CacheError(f"layer {layer_idx} was asked of a cache that was made for {len(self.layers)} layers.")
        if layer_idx == 0:
            self.check_whole()
        layer = self.layers[layer_idx]
        finish = None
        if self.offloading:
            self._fetch(layer_idx, key_states.device)
            finish = layer.offload
        return layer.update(key_states, value_states, finish=finish)

    def check_whole(self) -> None:
        """Raise unless all layers hold the same tokens (an exception inside a forward pass leaves them apart)."""
        lengths = {layer.past for layer in self.layers}
        if len(lengths) > 1 or self._changing or any(layer.pending for layer in self.layers):
            raise CacheError(
                f"a forward pass or a change of the cache was interrupted, so its layers do not fit together "
                f"({min(lengths)} to {max(lengths)} tokens seen). Call `cache.reset()` and process the sequence again."
            )

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change of all layers that is refused, or else leaves the cache invalid if it does not come to its end."""
        self.check_whole()
        self._changing = True
        yield
        self._changing = False

    def reset(self) -> None:
        """Forget everything, and free the buffers; also makes a cache usable again that an exception left invalid."""
        super().reset()
        self._changing = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in the order `beam_idx` [batch], for beam search.

        Raises:
            CacheError: these are no rows of the cache.
        """
        rows = self._checked_rows("reorder_cache", beam_idx)
        with self._change():
            super().reorder_cache(rows)  # type: ignore[arg-type]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, next to each other.

        Raises:
            CacheError: `repeats` is not an integer >= 1.
        """
        count = _integer("batch_repeat_interleave", repeats)
        if count < 1:
            raise CacheError(f"batch_repeat_interleave was given {repeats!r}; expected an integer >= 1.")
        with self._change():
            super().batch_repeat_interleave(count)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows `indices` (numbers, or a bool per row).

        Raises:
            CacheError: these are no rows of the cache, or none is left.
        """
        rows = self._checked_rows("batch_select_indices", indices)
        with self._change():
            super().batch_select_indices(rows)

    def _checked_rows(self, name: str, indices: Any) -> Tensor:
        """`indices` as row numbers on the CPU; an empty cache has no rows yet, so any will do."""
        try:
            given = torch.as_tensor(indices).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise CacheError(f"{name} was given {indices!r}; expected row numbers, or a bool per row.") from error
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or not len(given):
            raise CacheError(
                f"{name} was given {given.dtype} of shape {tuple(given.shape)}: {given.tolist()}; expected at least one "
                "row number, or a bool per row."
            )
        if not self.layers[0].is_initialized:
            return given
        batch = len(self.layers[0].rows)
        if given.dtype == torch.bool:
            if len(given) != batch or not given.any():
                raise CacheError(
                    f"{name} was given {given.tolist()} and the cache holds {batch} rows, of which some must stay."
                )
            return given.nonzero()[:, 0]
        if int(given.min()) < -batch or int(given.max()) >= batch:
            raise CacheError(f"{name} was given rows {given.tolist()} and the cache holds {batch}.")
        return given.long() % batch

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens, in all layers or, on error, in none.

        Raises:
            CacheError: the number is positive or no integer, or keys that the remaining tokens need were overwritten
                already (see `rollback`).
        """
        count = _integer("crop", tokens_to_remove)  # transformers 5.17 counts in a tensor
        self.check_whole()
        # the layer that can take back least would refuse first
        layers = sorted(self.layers, key=lambda layer: layer.most_crop())
        layers[0].check_crop(count)
        with self._change():
            for layer in layers:
                layer.crop(count)

    def stop_recording(self) -> None:
        """End past recording (assisted decoding starts it and leaves it on) and free what it held."""
        for layer in self.layers:
            layer.end_recording()

    def save(self, path: str | Path) -> None:
        """Write the cache to a .safetensors file, to go on with a long prompt in another process.

        Raises:
            CacheError: nothing was cached yet, a forward pass was interrupted, keys or values are not finite, or the
                file cannot be written.
        """
        from .cache_io import save_cache

        save_cache(self, path)

    @classmethod
    def load(
        cls, path: str | Path, config: PreTrainedModel | PreTrainedConfig, *, device: torch.device | str | None = None
    ) -> AAHCache:
        """Read a cache that `save` wrote.

        Args:
            config: the patched model (its layers' devices are used) or its config.
            device: where the buffers go; default the model's devices, the CPU for a bare config.

        Raises:
            CacheError: the file is not such a cache, is damaged, or belongs to another model or plan; or there is no
                such device.
        """
        from .cache_io import load_cache

        return load_cache(cls, path, config, device)

    def _fetch(self, layer_idx: int, device: torch.device) -> None:
        """This layer's buffers on their device, and the next layer's on their way."""
        layer, after = self.layers[layer_idx], self.layers[(layer_idx + 1) % len(self.layers)]
        if device.type != "cuda":
            layer.prefetch()
            return
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        torch.cuda.current_stream(device).wait_stream(stream)
        layer.prefetch()
        # what the default stream still copies to the CPU must be there before it is fetched again
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            after.prefetch()


def _integer(name: str, value: Any) -> int:
    """`value` as an integer; a tensor of one integer is one."""
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CacheError(f"{name} was given {value!r}; expected an integer.") from error
