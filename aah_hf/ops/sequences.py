"""Which tokens of a batch belong together: padding and packing, as values that every layer shares."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import OperatorError


@dataclass(frozen=True)
class Run:
    """`rows` of the batch whose real tokens `start … end - 1` form one sequence (a row, or a packed document)."""

    rows: tuple[int, ...]
    start: int
    end: int


class Sequences:
    """The sequences inside a padded and/or packed batch.

    Args:
        valid: [batch, length] bool (or 0 and 1), False at padding. Padding is never seen and sees nothing.
        documents: [batch, length] integers; tokens see only tokens of their own document.

    `length` counts from position 0 of each row to the last key. At least one of the two must be given.
    """

    def __init__(self, valid: Tensor | None = None, documents: Tensor | None = None) -> None:
        given = [t for t in (valid, documents) if t is not None]
        if not given or any(t.dim() != 2 for t in given) or len({t.shape for t in given}) != 1:
            shapes = [tuple(t.shape) for t in given]
            raise OperatorError(
                f"Sequences needs `valid` and/or `documents` of one shape [batch, length], got {shapes}."
            )
        if valid is not None and valid.dtype != torch.bool and bool(((valid != 0) & (valid != 1)).any()):
            raise OperatorError(
                "valid holds numbers other than 0 and 1; expected True or 1 at real tokens and False or 0 at padding. "
                "For a mask that is added to the scores (0 and -inf) pass `mask == 0`."
            )
        if documents is not None and (documents.is_floating_point() or documents.is_complex()):
            raise OperatorError(f"documents are of type {documents.dtype}; expected integers.")
        self.valid = torch.ones_like(given[0], dtype=torch.bool) if valid is None else valid.bool()
        self.documents = documents
        self._arranged: tuple[tuple, dict] | None = None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, device: torch.device | str | None = None) -> Sequences:
        """One packed row [1, total] from cumulative lengths [documents + 1] (0 first, total last)."""
        lengths = torch.as_tensor(cu_seqlens).diff()
        if lengths.numel() == 0 or int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
            raise OperatorError(f"cu_seqlens must ascend from 0, got {torch.as_tensor(cu_seqlens).tolist()}.")
        documents = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
        return cls(documents=documents[None].to(device=device))

    def __repr__(self) -> str:
        batch, length = self.valid.shape
        runs = "irregular" if self.runs is None else f"{len(self.runs)} runs"
        return f"Sequences(batch={batch}, length={length}, {runs})"

    def to(self, device: torch.device | str) -> Sequences:
        if self.valid.device == torch.device(device):
            return self
        documents = None if self.documents is None else self.documents.to(device)
        return Sequences(self.valid.to(device), documents)

    @cached_property
    def runs(self) -> tuple[Run, ...] | None:
        """The sequences as contiguous runs, rows with equal runs together; None if padding lies inside one.

        Reads the tensors back to the host: one synchronisation for a whole forward pass.
        """
        valid = self.valid
        documents = torch.zeros_like(valid, dtype=torch.long) if self.documents is None else self.documents.long()
        before_valid = torch.nn.functional.pad(valid[:, :-1], (1, 0))
        changed = torch.ones_like(valid)
        changed[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = valid & (~before_valid | changed)
        after_changed = torch.nn.functional.pad(changed[:, 1:], (0, 1), value=True)
        ends = valid & (~torch.nn.functional.pad(valid[:, 1:], (0, 1)) | after_changed)
        start_rows = starts.nonzero().tolist()
        stops = ends.nonzero()[:, 1].tolist()
        ids = documents[starts].tolist()
        if len({(row, doc) for (row, _), doc in zip(start_rows, ids)}) != len(ids):
            return None
        rows_of = defaultdict(list)
        for (row, start), stop in zip(start_rows, stops):
            rows_of[start, stop + 1].append(row)
        return tuple(Run(tuple(rows), start, end) for (start, end), rows in sorted(rows_of.items()))

    @cached_property
    def rank(self) -> Tensor:
        """[batch, length]: number of real tokens of the same sequence before each token."""
        count = self.valid.long().cumsum(-1) - self.valid.long()
        if self.documents is None:
            return count
        # tokens of one document need not be adjacent: count inside each document by a stable sort
        order = torch.argsort(self.documents, dim=-1, stable=True)
        docs, real = self.documents.gather(-1, order), self.valid.gather(-1, order).long()
        before = real.cumsum(-1) - real
        first = torch.ones_like(docs, dtype=torch.bool)
        first[:, 1:] = docs[:, 1:] != docs[:, :-1]
        base = torch.where(first, before, torch.zeros_like(before)).cummax(-1).values
        return torch.empty_like(before).scatter_(-1, order, before - base)

    def arranged(self, q_len: int, kv_len: int, q_start: int, kv_start: int) -> dict:
        """Arguments of the native operator for these sequences; kept, since all layers of a forward ask alike."""
        from .native import arrange

        assert self.runs is not None  # padding inside a sequence goes to the pure PyTorch operator
        key = (q_len, kv_len, q_start, kv_start)
        if self._arranged is None or self._arranged[0] != key:
            batch, total = self.valid.shape[0], kv_start + kv_len
            runs = [Run(run.rows, run.start, min(run.end, total)) for run in self.runs if run.start < total]
            device = self.valid.device
            self._arranged = (
                key,
                arrange(runs, batch, q_len, kv_len, q_start=q_start, kv_start=kv_start, device=device),
            )
        return self._arranged[1]
