"""One layer of AAHCache: ring buffers of different sizes for the KV heads of a layer, in one tensor each for K and V."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .cache_rows import Rows, kept, ring
from .coverage import kept_keys, kv_windows
from .errors import CacheError
from .ops import decode, native

GROWTH = (5, 4)
"""A buffer that is too small grows to 5/4 of what it must hold: at most 1.25 times the stored bytes are allocated."""

RECORD_LIMIT = 1024
"""Tokens that can be taken back while past states are recorded (assisted decoding verifies far fewer at once)."""

RECORD_KEEP = 32
"""Tokens of that allowance that stay allocated from one round of assisted decoding to the next."""


class CacheView:
    """What `AAHCache.update` returns in the place of key and value tensors: the new ones, and where the old ones are.

    The new tokens are not in the cache while attention runs, because a full ring would overwrite keys that their own
    queries still see; attention calls `store` when it is done.

    Attributes:
        layer: the cache layer.
        keys, values: [batch, kv_heads, q_len, head_dim] of the new tokens.
        past: tokens seen before them.
        native: whether the native operators (ops/decode.py) can take these tensors and the cache's.
    """

    def __init__(self, layer: AAHCacheLayer, keys: Tensor, values: Tensor, finish: Callable[[], None] | None) -> None:
        self.layer, self.keys, self.values, self.past = layer, keys, values, layer.past
        self.native = _one_kind(keys, values, layer.keys, layer.values)
        self._finish = finish

    @property
    def shape(self) -> torch.Size:
        """Shape of the key tensor that an ordinary cache would have returned."""
        batch, heads, length, head_dim = self.keys.shape
        return torch.Size((batch, heads, self.past + length, head_dim))

    def store(self, rows: Rows) -> None:
        """Keep the new tokens. `rows` are the layer's after them (`Rows.advance`)."""
        self.layer.append(self.keys, self.values, rows, native_call=self.native and rows.regular)
        if self._finish is not None:
            self._finish()

    # any other attention function takes the views for tensors, one way or another
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _not_tensors()

    def __getitem__(self, index: Any) -> Any:
        raise _not_tensors()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _not_tensors()


def _one_kind(*tensors: Tensor | None) -> bool:
    first = tensors[0]
    assert first is not None
    alike = all(t is not None and t.dtype == first.dtype and t.shape[-1] == first.shape[-1] for t in tensors)
    return alike and decode.supports(*tensors) is None  # type: ignore[arg-type]


def _not_tensors() -> CacheError:
    return CacheError(
        "another attention function than per-head windowed attention was given the keys and values of an AAHCache, "
        "which works only with the attention implementation 'aah' of a patched model. Use transformers' DynamicCache "
        "with any other."
    )


class AAHCacheLayer(CacheLayerMixin):
    """Keys and values of one layer.

    `keys` and `values` are [batch, slots, head_dim]; KV head h owns the slots `offset[h] … offset[h + 1] - 1`, laid
    out as cache_rows.py says. So batch operations are one index_select, and one call serves all heads.

    Args:
        windows: the layer's windows, one per query head, without the model's own sliding window.
        kv_heads: KV heads of the layer.
        sink_tokens: first real tokens of each row that are kept.
        limit: the model's own sliding window in this layer.
        rollback: tokens that `crop` can take back once a ring is full.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self, windows: tuple[int | None, ...], kv_heads: int, sink_tokens: int, limit: int | None, rollback: int
    ) -> None:
        super().__init__()
        self.windows, self.kv_heads, self.sink_tokens, self.limit = windows, kv_heads, sink_tokens, limit
        # the window that a head really has, and what its KV head must keep for it
        self.seen = tuple(w if limit is None else limit if w is None else min(w, limit) for w in windows)
        self.widest = kv_windows(self.seen, kv_heads)
        self.keep = tuple(None if w is None else kept_keys(sys.maxsize, w, sink_tokens) for w in self.widest)
        # KV heads by what they keep; those that keep alike hold the same positions in the same slots
        self.alike: dict[int | None, list[int]] = {}
        for head, keep in enumerate(self.keep):
            self.alike.setdefault(keep, []).append(head)
        self.rollback = rollback
        self.record_past = False
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.device: torch.device | None = None
        self.past = 0
        self.rows = Rows.empty(0)
        self.offset: tuple[int, ...] = (0,) * (self.kv_heads + 1)
        # ring slots hold the absolute positions from `_low[h]` on; only rollback looks further back than attention
        self._low = [0] * self.kv_heads
        self._allowance, self._since_crop = self.rollback, 0
        self.pending = False

    def extra_repr(self) -> str:
        return ", ".join("full" if k is None else str(k) for k in self.keep)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(keeps {self.extra_repr()})"

    # --- transformers' protocol ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers for the batch, dtypes, head sizes and device of [batch, kv_heads, length, head_dim]."""
        self.device = key_states.device
        batch = key_states.shape[0]
        self.keys = key_states.new_zeros(batch, 0, key_states.shape[-1])
        self.values = value_states.new_zeros(batch, 0, value_states.shape[-1])
        self.rows = Rows.empty(batch)
        self.is_initialized = True

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, finish: Callable[[], None] | None = None, **kw: Any
    ) -> tuple[CacheView, CacheView]:
        """New keys and values [batch, kv_heads, q_len, head_dim] as views that attention stores when it is done.

        Raises:
            CacheError: the shapes are not those of the cache, or an earlier forward pass did not finish.
        """
        if self.pending:
            raise CacheError(
                "the keys and values of an earlier update were never stored: a forward pass was interrupted, or "
                "`update` was called by hand. Call `cache.reset()` and process the sequence again."
            )
        if (
            key_states.dim() != 4
            or key_states.shape[1] != self.kv_heads
            or key_states.shape[:3] != value_states.shape[:3]
        ):
            raise CacheError(
                f"keys have shape {tuple(key_states.shape)} and values {tuple(value_states.shape)}; expected "
                f"[batch, {self.kv_heads} KV heads, length, head_dim]."
            )
        if torch.is_autocast_enabled(key_states.device.type):
            # rotary embedding leaves keys in float32 there, and attention would cast them
            dtype = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        for new, old in ((key_states, self.keys), (value_states, self.values)):
            if new.shape[0] != old.shape[0] or new.shape[-1] != old.shape[-1]:
                raise CacheError(
                    f"the cache holds [batch, head_dim] = {[old.shape[0], old.shape[-1]]} and the new tokens are "
                    f"{[new.shape[0], new.shape[-1]]}. To go on with more rows than were cached, call "
                    "`cache.batch_repeat_interleave(n)` first."
                )
        self.pending = True
        view = CacheView(self, key_states, value_states, finish)
        return view, view

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Masks are made for the whole sequence: what was dropped is not visible to anyone."""
        return self.past + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens ever seen, padding included; not the tokens kept."""
        return self.past

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget everything, and free the buffers."""
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._batch(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self._batch(torch.arange(len(self.rows))[indices])

    def _batch(self, indices: Tensor) -> None:
        assert self.keys is not None and self.values is not None
        self.keys = self.keys.index_select(0, indices.to(self.keys.device))
        self.values = self.values.index_select(0, indices.to(self.values.device))
        self.rows = self.rows.select(indices.tolist())

    def activate_past_recording(self) -> None:
        """Keep what leaves the windows until the next `crop`, for at most RECORD_LIMIT tokens."""
        self.record_past, self._since_crop = True, 0

    def end_recording(self) -> None:
        """Give up what past recording held on to."""
        self.record_past, self._since_crop, self._allowance = False, 0, self.rollback
        if self.is_initialized:
            self._fit(self._longest(), shrink=True)

    def most_crop(self) -> int:
        """How many tokens `crop` can take back now."""
        most = self.past
        begin = min(self.rows.first, default=0) + self.sink_tokens
        for keep, low in zip(self.keep, self._low):
            if keep is not None and low > begin:
                most = min(most, self.past - (keep - self.sink_tokens) - low)
        return most

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise CacheError where `crop` would."""
        count = -tokens_to_remove
        if not 0 <= count <= self.most_crop():
            raise CacheError(_crop_message(count, self.past, self.most_crop()))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 only ends what past recording held on to."""
        self.check_crop(tokens_to_remove)
        if not self.is_initialized:
            return
        self.past += tokens_to_remove
        self.rows = self.rows.crop(self.past)
        self._low = [min(low, self.past) for low in self._low]  # of rows that have lost all but sink tokens
        self._since_crop = 0
        if self.record_past:
            self._allowance = max(self.rollback, min(self._allowance, RECORD_KEEP))
        self._fit(self._longest(), shrink=True)

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = self.keys.to("cpu", non_blocking=True), self.values.to("cpu", non_blocking=True)

    # --- storage --------------------------------------------------------------------------------------------------

    def stored(self) -> int:
        """Bytes of the keys and values that queries still see: `coverage()`'s formula for every row."""
        if not self.is_initialized:
            return 0
        assert self.keys is not None and self.values is not None
        lengths = [self.past - first for first in self.rows.first]
        count = sum(kept_keys(n, w, self.sink_tokens) for n in lengths for w in self.widest)
        return count * sum(t.shape[-1] * t.element_size() for t in (self.keys, self.values))

    def allocated(self) -> int:
        """Bytes of the buffers."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values) if t is not None)

    def append(self, keys: Tensor, values: Tensor, rows: Rows, native_call: bool = False) -> None:
        """Store new tokens [batch, kv_heads, q_len, head_dim] at the positions `past …`; `rows` are those after them."""
        q_len = keys.shape[2]
        end = self.past + q_len
        if self.record_past:
            self._since_crop += q_len
            wanted = min(self._since_crop, RECORD_LIMIT)
            if wanted > self._allowance:
                self._allowance = min(max(wanted, 2 * self._allowance, RECORD_KEEP), RECORD_LIMIT)
        self._fit(end - min(rows.first, default=end))
        assert self.keys is not None and self.values is not None
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if native_call:
            offset, first = native.kept_ints(self.offset), native.kept_ints(rows.first)
            decode.write_(self.keys, self.values, keys, values, offset, first, self.past, self.sink_tokens)
        else:
            self._write(keys, values, rows)
        self.past, self.rows = end, rows
        self._low = [max(low, end - (self.cap(h) - self.sink_tokens)) for h, low in enumerate(self._low)]
        self.pending = False

    def _write(self, keys: Tensor, values: Tensor, rows: Rows) -> None:
        """The general way to put new tokens into their slots: any device and rows, differentiable."""
        assert self.keys is not None and self.values is not None
        end = self.past + keys.shape[2]
        for where, first, sinks in rows.groups():
            new_sinks = [(slot, p - self.past) for slot, p in enumerate(sinks) if p >= self.past]
            for head in range(self.kv_heads):
                base, cap = self.offset[head], self.cap(head)
                begin = max(self.past - first, self.sink_tokens, end - first - (cap - self.sink_tokens))
                for slot, position, count in ring(begin, end - first, cap, self.sink_tokens):
                    at, take = base + slot, first + position - self.past
                    self.keys[where, at : at + count] = keys[where, head, take : take + count].to(self.keys.dtype)
                    self.values[where, at : at + count] = values[where, head, take : take + count].to(self.values.dtype)
                for slot, take in new_sinks:
                    self.keys[where, base + slot] = keys[where, head, take].to(self.keys.dtype)
                    self.values[where, base + slot] = values[where, head, take].to(self.values.dtype)

    def tight(self) -> AAHCacheLayer:
        """A layer that holds what queries still see of this one, in buffers of just that size."""
        other = copy.copy(self)
        other._allowance = 0
        other._fit(other._longest(), shrink=True, slack=False)
        return other

    def adopt(self, keys: Tensor, values: Tensor, *, rows: Rows, past: int, offset: tuple[int, ...]) -> None:
        """Take over the buffers of a tight layer."""
        self.lazy_initialization(keys[:, None], values[:, None])
        self.keys, self.values, self.rows, self.past, self.offset = keys, values, rows, past, offset
        self._low = [past - (self.cap(head) - self.sink_tokens) for head in range(self.kv_heads)]

    def slots(self, buffer: Tensor, heads: list[int]) -> Tensor:
        """[batch, heads, cap, head_dim] of KV heads that keep alike."""
        cap = self.cap(heads[0])
        if heads == list(range(heads[0], heads[-1] + 1)):
            return buffer[:, self.offset[heads[0]] : self.offset[heads[-1] + 1]].unflatten(1, (len(heads), cap))
        return torch.stack([buffer[:, self.offset[h] : self.offset[h] + cap] for h in heads], 1)

    def pieces(self, head: int, first: int, sinks: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """What `head` still shows of a row, as (slot, relative position, length) in order of position."""
        return kept(
            max(0, self.past - first),
            self.keep[head],
            self.cap(head),
            self.sink_tokens,
            tuple(p - first for p in sinks),
        )

    def cap(self, head: int) -> int:
        """Slots of a KV head."""
        return self.offset[head + 1] - self.offset[head]

    def _longest(self) -> int:
        return self.past - min(self.rows.first, default=self.past)

    def _fit(self, length: int, shrink: bool = False, slack: bool = True) -> None:
        """Give every KV head the slots that rows of up to `length` tokens need, growing geometrically."""
        caps, changed = [], False
        for head, keep in enumerate(self.keep):
            cap = self.cap(head)
            most = None if keep is None else keep + self._allowance
            need = length if most is None else min(length, most)
            room = need * GROWTH[0] // GROWTH[1] if slack else need
            room = room if most is None else min(room, most)
            fits = cap >= need and not (shrink and cap > room)
            caps.append(cap if fits else room)
            changed |= not fits
        if changed:
            self._move(caps)

    def _move(self, caps: list[int]) -> None:
        """Lay the stored tokens out anew in `caps` slots per KV head."""
        assert self.keys is not None and self.values is not None
        offset = (0, *accumulate(caps))
        low, longest = list(self._low), self._longest()
        moves: list[tuple[slice | list[int], Tensor | slice, Tensor | slice]] = []
        for head, cap in enumerate(caps):
            source, target, before = self.offset[head], offset[head], self.cap(head)
            if longest <= min(cap, before):  # neither ring has wrapped: every slot is its position
                if longest:
                    moves.append((slice(None), slice(source, source + longest), slice(target, target + longest)))
                continue
            low[head] = max(low[head], self.past - (cap - self.sink_tokens))
            for where, first, sinks in self.rows.groups():
                begin = max(self.sink_tokens, low[head] - first)
                band = torch.arange(begin, max(begin, self.past - first)) - self.sink_tokens
                slots = [
                    torch.cat([torch.arange(len(sinks)), self.sink_tokens + band % max(1, size - self.sink_tokens)])
                    for size in (before, cap)
                ]
                moves.append((where, source + slots[0], target + slots[1]))
        buffers = []
        for old in (self.keys, self.values):
            new = old.new_zeros(old.shape[0], offset[-1], old.shape[-1])
            for where, take, put in moves:
                if isinstance(take, slice) or isinstance(where, slice):
                    new[where, put] = old[where, take]
                else:
                    rows = torch.tensor(where)[:, None]
                    new[rows, put] = old[rows, take]
            buffers.append(new)
        self.keys, self.values = buffers
        self.offset, self._low = offset, low


def _crop_message(count: int, past: int, most: int) -> str:
    if count < 0:
        return f"crop takes the number of tokens to remove as a negative number, got {-count}."
    if count > past:
        return f"crop was asked to remove {count} tokens and only {past} were seen."
    return (
        f"crop was asked to remove {count} tokens and this cache can take back {most}: what their predecessors saw "
        f"was overwritten. Make it with AAHCache(model, rollback={count}), or call `activate_past_recording()` first."
    )
