"""Attention over an AAHCache, and what the cache needs to know about a forward pass.

Every KV head that keeps the same positions is laid out as `[sink tokens][last w - 1 keys][new tokens]`. Distances
inside the band and to the new tokens are then the true ones, sink tokens are the first keys, and everything between is
something that no query sees: `windowed_attention` with its own rule is exact on it. Rows of unequal length are
aligned at the new tokens; what stands before a shorter row is padding.

A few new tokens on the CPU go to `aah::decode` instead, which reads the buffers where they are, all KV heads in one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cache_layer import AAHCacheLayer, CacheView
from .errors import CacheError, OperatorError
from .masks import AAHMask
from .ops import Sequences, decode, native, windowed_attention

MOST_DECODED = 16
"""New tokens up to which the operator for decoding is faster than the one for prefill over gathered keys."""


class Step:
    """One forward pass as the cache sees it; layers that keep alike share what is computed here.

    Attributes:
        rows: the rows after the new tokens.
        valid: [batch, past + q_len] bool, False at padding; None where there is none behind the rows' first tokens.
        dense: a caller's own mask [batch or 1, heads or 1, q_len, past + q_len].
    """

    def __init__(self, mask: AAHMask | Tensor, view: CacheView) -> None:
        layer, q_len = view.layer, view.keys.shape[2]
        self.past, self.q_len, end = view.past, q_len, view.past + q_len
        self.dense = mask if isinstance(mask, Tensor) else mask.dense
        if self.dense is not None and (self.dense.dim() != 4 or self.dense.shape[2:] != (q_len, end)):
            raise OperatorError(
                f"the 4D attention mask has shape {tuple(self.dense.shape)}; expected [batch or 1, heads or 1, {q_len}, "
                f"{end}]: one column for every token seen, cached ones included."
            )
        sequences = None if isinstance(mask, Tensor) else mask.sequences
        # under a native window of 1 every token is alone, which looks like documents
        if sequences is not None and sequences.documents is not None and layer.limit != 1:
            raise CacheError(
                "packed documents (position_ids that restart at 0, or cu_seq_lens_q) cannot go into an AAHCache, whose "
                "sink tokens are those of one sequence per row. Pass use_cache=False, or pad the documents."
            )
        valid = None if sequences is None else sequences.valid[:, :end]
        self.rows = layer.rows.advance(valid, view.past, q_len, layer.sink_tokens)
        self.started = layer.rows
        if valid is not None:
            first = torch.tensor(self.rows.first, device=valid.device)[:, None]
            if torch.equal(valid, torch.arange(end, device=valid.device) >= first):
                valid = None
        self.valid = valid
        # what decode.py is made for: rows that are their padding, then tokens without a gap
        self.decodes = q_len <= MOST_DECODED and self.dense is None and valid is None and self.rows.regular
        self._shared: dict[tuple, Any] = {}

    @classmethod
    def of(cls, mask: AAHMask | Tensor, view: CacheView) -> Step:
        """The step of this forward pass; made by its first layer."""
        if isinstance(mask, Tensor):
            return cls(mask, view)
        key = (view.layer.rows, view.past, view.layer.sink_tokens, view.keys.device)
        if mask.step is None or mask.step[0] != key:
            mask.step = (key, cls(mask, view))
        return mask.step[1]

    def positions(self, layer: AAHCacheLayer, head: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """What a KV head shows of every row, [batch, kept] each, aligned at the end.

        Returns:
            (slots, absolute positions); a position of -1 is no key.
        """
        key = (layer.keep[head], layer.cap(head), device)
        if key not in self._shared:
            rows = []
            for first, sinks in zip(self.started.first, self.started.sinks):
                pieces = layer.pieces(head, first, sinks)
                slots = [torch.arange(slot, slot + count) for slot, _, count in pieces]
                places = [torch.arange(first + at, first + at + count) for _, at, count in pieces]
                rows.append(torch.stack([torch.cat(slots), torch.cat(places)]) if pieces else torch.zeros(2, 0).long())
            longest = max(row.shape[1] for row in rows)
            aligned = torch.stack([pad(row, (longest - row.shape[1], 0), value=-1) for row in rows])
            self._shared[key] = aligned[:, 0].clamp(min=0).to(device), aligned[:, 1].to(device)
        return self._shared[key]

    def sequences(self, layer: AAHCacheLayer, head: int, device: torch.device) -> Sequences | None:
        """Padding among the keys of a KV head; None where there is none."""
        if self.valid is None and self.started.alike and max(self.rows.first) <= self.past:
            return None
        key = ("sequences", layer.keep[head], layer.cap(head), device)
        if key not in self._shared:
            _, places = self.positions(layer, head, device)
            now = torch.arange(self.past, self.past + self.q_len, device=device)
            valid = torch.cat([places, now.expand(len(places), -1)], 1)
            valid = valid >= torch.tensor(self.rows.first, device=device)[:, None]
            if self.valid is not None:
                seen = self.valid.to(device)
                valid &= torch.cat([seen.gather(1, places.clamp(min=0)), seen[:, self.past :]], 1)
            self._shared[key] = None if bool(valid.all()) else Sequences(valid)
        return self._shared[key]

    def hidden_sinks(self, limit: int | None) -> str:
        """Which sink tokens the model's own window hides from the new tokens: "none", "all" or "some"."""
        sinks = [p for row in self.rows.sinks for p in row]
        if limit is None or (sinks and self.past + self.q_len - 1 - min(sinks) < limit):
            return "none"
        return "all" if not sinks or self.past - max(sinks) >= limit else "some"


def attend(view: CacheView, query: Tensor, step: Step, **options: Any) -> Tensor:
    """Attention of new tokens over what the cache keeps and themselves; the cache is not changed.

    Args:
        view: of a cache that holds tokens.
        query: [batch, query_heads, q_len, head_dim].
        options: scale, dropout, softcap and sink_logits, as in `windowed_attention`.

    Returns:
        [batch, query_heads, q_len, head_dim].
    """
    layer = view.layer
    if _can_decode(view, query, step, options):
        return _decode(view, query, step, options)
    logits = options.pop("sink_logits", None)
    group = query.shape[1] // layer.kv_heads
    parts, order = [], []
    for heads in layer.alike.values():
        members = [h * group + i for h in heads for i in range(group)]
        own = (
            options
            if logits is None
            else {**options, "sink_logits": logits[torch.tensor(members, device=logits.device)]}
        )
        parts.append(_attend_alike(view, heads, members, query, step, own))
        order += members
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if order == sorted(order):
        return out
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return out[:, torch.tensor(inverse, device=out.device)]


def _can_decode(view: CacheView, query: Tensor, step: Step, options: dict[str, Any]) -> bool:
    if not step.decodes or not view.native or options.get("dropout") or query.dtype != view.keys.dtype:
        return False
    logits = options.get("sink_logits")
    return not torch.is_grad_enabled() or not (query.requires_grad or (logits is not None and logits.requires_grad))


def _decode(view: CacheView, query: Tensor, step: Step, options: dict[str, Any]) -> Tensor:
    """After `crop`, slots that the operator takes for a ring's oldest keys may hold newer ones, taken back since. None is
    in a window: `crop` refuses to go back that far."""
    layer = view.layer
    assert layer.keys is not None and layer.values is not None
    return decode.decode(
        *(query, view.keys, view.values, layer.keys, layer.values),
        *(native.kept_ints(layer.offset), native.window_tensor(layer.windows), layer.sink_tokens),
        *(view.past, native.kept_ints(step.rows.first)),
        limit=layer.limit,
        **{name: value for name, value in options.items() if name != "dropout"},
    )


def _attend_alike(
    view: CacheView,
    heads: list[int],
    members: list[int],
    query: Tensor,
    step: Step,
    options: dict[str, Any],
) -> Tensor:
    layer, device = view.layer, query.device
    head = heads[0]
    assert layer.keys is not None and layer.values is not None
    keys = _laid_out(layer, layer.keys, _heads(view.keys, heads), heads, step).to(query.dtype)
    values = _laid_out(layer, layer.values, _heads(view.values, heads), heads, step).to(query.dtype)
    cached = keys.shape[2] - step.q_len

    sink_tokens, mask = layer.sink_tokens, None
    hidden = step.hidden_sinks(layer.limit) if sink_tokens else "all"
    if hidden == "all":
        sink_tokens = 0
    if hidden == "some" or step.dense is not None:
        _, places = step.positions(layer, head, device)
        places = pad(places, (0, step.q_len))
        places[:, cached:] = torch.arange(step.past, step.past + step.q_len, device=device)
        if hidden == "some" and layer.limit is not None:
            now = torch.arange(step.past, step.past + step.q_len, device=device)
            mask = now[:, None] - places[:, None, None] < layer.limit  # [batch, 1, q_len, cached + q_len]
        if step.dense is not None:
            mask = _select(step.dense.to(device), places, members, mask)
    return windowed_attention(
        _heads(query, members),
        keys,
        values,
        [layer.seen[h] for h in members],
        sink_tokens,
        q_start=cached,
        sequences=step.sequences(layer, head, device),
        mask=mask,
        **options,
    )


def _laid_out(layer: AAHCacheLayer, buffer: Tensor, new: Tensor, heads: list[int], step: Step) -> Tensor:
    """[batch, heads, kept + q_len, head_dim]: what these KV heads keep, in order of position, then the new tokens."""
    slots = layer.slots(buffer, heads)
    new = new.to(slots.dtype)
    if step.started.alike:
        pieces = layer.pieces(heads[0], step.started.first[0], step.started.sinks[0])
        return torch.cat([*(slots[:, :, a : a + n] for a, _, n in pieces), new], 2)
    index, _ = step.positions(layer, heads[0], buffer.device)
    rows = torch.arange(len(index), device=index.device)[:, None]
    # indexing, because `gather` keeps its input for backward, and the buffer is written to before that
    return torch.cat([slots[rows, :, index].transpose(1, 2), new], 2)


def _select(dense: Tensor, places: Tensor, members: list[int], mask: Tensor | None) -> Tensor:
    """A caller's mask at the keys that are there, together with `mask`."""
    dense = dense if dense.shape[1] == 1 else _heads(dense, members)
    index = places.clamp(min=0)[:, None, None]
    shape = torch.broadcast_shapes(dense.shape[:3], (places.shape[0], 1, 1))
    picked = dense.expand(*shape, dense.shape[-1]).gather(-1, index.expand(*shape, index.shape[-1]))
    if mask is None:
        return picked
    return picked & mask if picked.dtype == torch.bool else picked.masked_fill(~mask, -torch.inf)


def _heads(t: Tensor, heads: list[int]) -> Tensor:
    if heads == list(range(heads[0], heads[-1] + 1)):
        return t[:, heads[0] : heads[-1] + 1]
    return t[:, torch.tensor(heads, device=t.device)]


def check_fits(layer: AAHCacheLayer, windows: tuple[int | None, ...], sink_tokens: int, mask: AAHMask | Tensor) -> None:
    """Raise unless a cache layer was made for the windows, native one included, that attention runs with now."""
    if (layer.windows, layer.sink_tokens) != (windows, sink_tokens):
        raise CacheError(
            "this cache was made for other windows than the model runs with now (was the plan replaced?). Make a new "
            "one with AAHCache(model)."
        )
    if isinstance(mask, Tensor) and layer.limit is not None:
        raise CacheError(
            f"a 4D attention mask replaces the model's native sliding window of {layer.limit} in this layer, and an "
            "AAHCache drops keys by it. Pass a 2D mask, or use_cache=False or a DynamicCache with the 4D mask."
        )
    if isinstance(mask, AAHMask) and mask.limit != layer.limit:
        raise CacheError(
            f"this cache was made for a native sliding window of {layer.limit} in this layer and the model asks for "
            f"{mask.limit}. Make a new one with AAHCache(model)."
        )
