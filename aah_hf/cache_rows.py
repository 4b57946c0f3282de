"""Where a cached batch's tokens are: rows, sink tokens and ring slots as plain numbers.

A row's *relative position* counts from its first real token (left padding is never stored). The layout of one KV
head with `cap` slots: relative position `r < sinks` lives in slot `r`, a later one in slot
`sinks + (r - sinks) % (cap - sinks)`. A buffer that still grows has simply not wrapped yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .errors import CacheError

_UNCHANGED = (
    "Pass the mask of the whole sequence, cached tokens included, unchanged (no mask, like one of ones only, says that "
    "nothing is padding)."
)


@dataclass(frozen=True)
class Rows:
    """The rows of a cached batch, the same for every layer.

    Attributes:
        first: absolute position of each row's first real token; the number of tokens seen where a row had none yet.
        sinks: absolute positions of each row's sink tokens so far, its first real tokens. They follow `first`
            without a gap unless there is padding among them (a right-padded prompt shorter than the sink tokens).
    """

    first: tuple[int, ...]
    sinks: tuple[tuple[int, ...], ...]

    @classmethod
    def empty(cls, batch: int) -> Rows:
        return cls((0,) * batch, ((),) * batch)

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def regular(self) -> bool:
        """Whether sink token `i` of every row is at relative position `i`."""
        return all(s == tuple(range(f, f + len(s))) for f, s in zip(self.first, self.sinks))

    @cached_property
    def alike(self) -> bool:
        """Whether all rows store the same positions in the same slots."""
        return len(set(self.first)) <= 1 and len(set(self.sinks)) <= 1 and self.regular

    def groups(self) -> Iterator[tuple[slice | list[int], int, tuple[int, ...]]]:
        """(rows, first, sinks) for every set of rows that store alike."""
        if len(set(self.first)) <= 1 and len(set(self.sinks)) <= 1:
            if self.first:
                yield slice(None), self.first[0], self.sinks[0]
            return
        found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for row, key in enumerate(zip(self.first, self.sinks)):
            found.setdefault(key, []).append(row)
        for (first, sinks), rows in found.items():
            yield rows, first, sinks

    def advance(self, valid: Tensor | None, past: int, q_len: int, sink_tokens: int) -> Rows:
        """The rows after `q_len` more tokens.

        Args:
            valid: [batch, past + q_len] bool, False at padding; None where nothing says that there is any.
            past: tokens seen before.

        Raises:
            CacheError: `valid` contradicts what was seen of a row before.
        """
        end = past + q_len
        if valid is None:
            self._check_unpadded(past, sink_tokens)
            sinks = tuple((*s, *range(past, min(end, sink_tokens))) for s in self.sinks)
            return self._if_changed(self.first, sinks)
        valid = valid[:, :end]
        begins = valid.int().argmax(-1).tolist()
        begins = [b if some else end for b, some in zip(begins, valid.any(-1).tolist())]
        for row, (old, new) in enumerate(zip(self.first, begins)):
            if (old < past and new != old) or new < min(old, past):
                raise _other_beginning(row, new, old)
        if past and sink_tokens:
            self._check_sinks(valid, past, sink_tokens)
        found = list(self.sinks)
        for row, have in enumerate(self.sinks):
            if len(have) < sink_tokens and begins[row] < end:
                start = max(past, begins[row])
                real = valid[row, start:end].nonzero()[: sink_tokens - len(have), 0].tolist()
                found[row] = (*have, *(start + r for r in real))
        return self._if_changed(tuple(begins), tuple(found))

    def _check_unpadded(self, past: int, sink_tokens: int) -> None:
        """Raise unless all of the `past` tokens were real ones, which is what no mask says."""
        for row, (first, sinks) in enumerate(zip(self.first, self.sinks)):
            if first:
                raise _other_beginning(row, 0, first)
            if len(sinks) != min(past, sink_tokens) or (sinks and sinks[-1] != len(sinks) - 1):
                raise _other_sinks(row, list(range(min(past, sink_tokens))), sinks)

    def _check_sinks(self, valid: Tensor, past: int, sink_tokens: int) -> None:
        """Raise unless the first `sink_tokens` real tokens of every row's `past` are its sink tokens."""
        # behind a row's last sink token the mask is free to differ
        known = [past if len(s) < sink_tokens else s[-1] + 1 for s in self.sinks]
        expected = torch.zeros(len(self), max(known), dtype=torch.bool)
        places = [(row, p) for row, s in enumerate(self.sinks) for p in s]
        if places:
            expected[tuple(torch.tensor(places).T)] = True
        inside = torch.arange(max(known)) < torch.tensor(known)[:, None]
        differs = (valid[:, : max(known)] != expected.to(valid.device)) & inside.to(valid.device)
        if bool(differs.any()):
            row = int(differs.any(-1).nonzero()[0])
            raise _other_sinks(row, valid[row, :past].nonzero()[:sink_tokens, 0].tolist(), self.sinks[row])

    def _if_changed(self, first: tuple[int, ...], sinks: tuple[tuple[int, ...], ...]) -> Rows:
        # most steps change nothing, and what was found out about these rows is kept with them
        return self if (first, sinks) == (self.first, self.sinks) else Rows(first, sinks)

    def crop(self, past: int) -> Rows:
        """The rows when only the first `past` tokens had been seen."""
        return Rows(tuple(min(f, past) for f in self.first), tuple(tuple(p for p in s if p < past) for s in self.sinks))

    def select(self, indices: Sequence[int]) -> Rows:
        return replace(self, first=tuple(self.first[i] for i in indices), sinks=tuple(self.sinks[i] for i in indices))


def _other_beginning(row: int, told: int, known: int) -> CacheError:
    return CacheError(
        f"attention_mask says that row {row} begins at token {told}, and the cache was filled with it beginning at "
        f"{known}. {_UNCHANGED}"
    )


def _other_sinks(row: int, told: list[int], known: tuple[int, ...]) -> CacheError:
    return CacheError(
        f"attention_mask says that the first real tokens of row {row} are {told}, and the cache keeps {list(known)} as "
        f"its sink tokens. {_UNCHANGED}"
    )


def ring(start: int, stop: int, cap: int, sink_tokens: int) -> list[tuple[int, int, int]]:
    """Slots of the relative positions `start … stop - 1` (all >= sink_tokens, no more than the ring holds).

    Returns:
        At most two pieces (slot, relative position, length).
    """
    size = cap - sink_tokens
    if start >= stop or size <= 0:
        return []
    slot = (start - sink_tokens) % size
    before_wrap = min(stop - start, size - slot)
    pieces = [(sink_tokens + slot, start, before_wrap)]
    if before_wrap < stop - start:
        pieces.append((sink_tokens, start + before_wrap, stop - start - before_wrap))
    return pieces


def kept(length: int, keep: int | None, cap: int, sink_tokens: int, sinks: Sequence[int]) -> list[tuple[int, int, int]]:
    """What a query sees of a row with `length` cached tokens, in order of position, as pieces like `ring`'s.

    Args:
        keep: retention of the KV head (sink tokens and band), None for all.
        cap: slots of the KV head.
        sinks: relative positions of the row's sink tokens.
    """
    begin = sink_tokens if keep is None else max(sink_tokens, length - (keep - sink_tokens))
    pieces = [(slot, position, 1) for slot, position in enumerate(sinks) if position < begin]
    pieces += ring(begin, length, cap, sink_tokens)
    merged: list[tuple[int, int, int]] = []
    for slot, position, count in pieces:
        if merged:
            last_slot, last_position, last_count = merged[-1]
            if slot == last_slot + last_count and position == last_position + last_count:
                merged[-1] = (last_slot, last_position, last_count + count)
                continue
        merged.append((slot, position, count))
    return merged
