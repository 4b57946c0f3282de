"""AAHMask: what one forward pass needs to know about who may see whom, without a T×T tensor.

transformers builds its attention mask through a registered function and carries the result to every
layer. Ours carries offsets and, where there is padding or packing, the sequences of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .errors import UnsupportedModelError
from .ops.sequences import Sequences


class AAHMask:
    """The mask of one forward pass, shared by its layers of one kind.

    Attributes:
        q_start: position of the first query; a tensor only while torch.compile traces a static cache.
        kv_start: position of the first key (a native sliding cache has dropped earlier ones).
        sequences: padding and packing, None where every row is one unpadded sequence.
        limit: the layer kind's own sliding window.
        dense: [batch, 1, q_len, kv_len] bool, only where the caller gave a mask function of its own.
        step: what cache_attention.py worked out for this forward pass, with its key.
    """

    # transformers looks at `ndim` to tell a 2D padding mask from a finished mask
    ndim = 4

    def __init__(
        self,
        batch: int,
        q_len: int,
        q_start: int | Tensor,
        kv_start: int,
        sequences: Sequences | None,
        limit: int | None,
        dense: Tensor | None,
        padded: bool,
        stock: Callable[[], Tensor | None],
    ) -> None:
        self.batch, self.q_len, self.q_start, self.kv_start = batch, q_len, q_start, kv_start
        self.sequences, self.limit, self.dense = sequences, limit, dense
        self.leaks = False
        self._padded, self._make_stock = padded, stock
        self._stock: tuple[Tensor | None] | None = None
        self._seen_positions: int | None = None
        self.step: tuple[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"AAHMask(q_len={self.q_len}, q_start={self.q_start}, limit={self.limit}, sequences={self.sequences})"

    def stock(self) -> Tensor | None:
        """The mask that SDPA would have got, built when a layer of full windows first asks for it."""
        if self._stock is None:
            self._stock = (self._make_stock(),)
        return self._stock[0]

    def to(self, device: Any = None, *args: Any, **kwargs: Any) -> AAHMask:
        """Accelerate moves every argument of a layer to the layer's device."""
        if not isinstance(device, (str, int, torch.device)):
            return self
        if self.sequences is not None:
            self.sequences = self.sequences.to(torch.device(device))
        if self.dense is not None:
            self.dense = self.dense.to(device)
        if self._stock is not None and self._stock[0] is not None:
            self._stock = (self._stock[0].to(device),)
        return self

    def note_packing(self, position_ids: Tensor | None, cu_seqlens: Tensor | None, single: bool = False) -> None:
        """Learn of packed documents that reach only the attention function, once per forward pass.

        Position ids that restart at 0 mean a new document also where a cache is present; stock SDPA
        looks at them only without one, and lets documents see each other (`leaks`).

        Args:
            single: look at the position of a lone token, too (an AAHCache cannot hold a second document).
        """
        if self._padded or self.sequences is not None or torch.compiler.is_compiling():
            return
        if self.q_len == 1 and not (single and self.q_start):
            return
        if cu_seqlens is not None and self.q_start == 0 and int(cu_seqlens[-1]) == self.q_len:
            if cu_seqlens.numel() > 2:
                self.sequences, self.leaks = Sequences.from_cu_seqlens(cu_seqlens), True
            return
        if position_ids is None or position_ids.dim() != 2 or self._seen_positions == id(position_ids):
            return
        self._seen_positions = id(position_ids)
        restarts = position_ids == 0
        if self.q_start == 0:
            restarts = restarts.clone()
            restarts[:, 0] = False
        if bool(restarts.any()):
            restarts = restarts.expand(self.batch, -1)  # one row of position ids may stand for all
            documents = torch.nn.functional.pad(restarts.long().cumsum(-1), (int(self.q_start), 0))
            self.sequences, self.leaks = Sequences(documents=documents), True


def aah_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | AAHMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> AAHMask:
    """The mask function registered with transformers under "aah"; arguments are transformers' own.

    Idempotent: generation with a static cache builds the mask ahead and hands it back here.
    """
    if isinstance(attention_mask, AAHMask):
        return attention_mask
    tracing = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor):
        # a static cache hands over its counter and then advances it in place
        q_offset = q_offset.clone() if tracing else int(q_offset)

    def stock() -> Tensor | None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )

    total = kv_offset + kv_length if tracing or isinstance(q_offset, Tensor) else q_offset + q_length
    valid = None
    if attention_mask is not None:
        valid = attention_mask[:, :total].to(device=device, dtype=torch.bool)
        valid = torch.nn.functional.pad(valid, (0, total - valid.shape[1]))
        if not tracing and bool(valid.all()):
            valid = None
    documents, dense = None, stock() if use_vmap else None
    if not use_vmap and mask_function is not causal_mask_function:
        documents = _documents(mask_function, batch_size, total, device)
    elif dense is not None and not tracing and not isinstance(q_offset, Tensor):
        _refuse_bidirectional(dense.diagonal(q_offset - kv_offset + 1, 2, 3))
    return AAHMask(
        batch=batch_size,
        q_len=q_length,
        q_start=q_offset,
        kv_start=kv_offset,
        sequences=None if valid is None and documents is None else Sequences(valid, documents),
        limit=local_size,
        dense=dense,
        padded=attention_mask is not None,
        stock=stock,
    )


def _documents(mask_function: Callable, batch_size: int, total: int, device: torch.device | str) -> Tensor | None:
    """Packed documents, read off the mask function: a token that may not see its predecessor opens one.

    The function is asked for the first sub-diagonal only (and, to be sure that it is causal, for the one above
    the diagonal); apart from packing it holds causality and the native window, which both let a token see its
    predecessor (a native window of 1 never does, and then every token is indeed alone).

    Raises:
        UnsupportedModelError: a token sees its successor.
    """
    if total < 2:
        return None
    rows, at = torch.arange(batch_size, device=device)[:, None], torch.arange(1, total, device=device)[None]
    sees_previous = torch.as_tensor(mask_function(rows, 0, at, at - 1), device=device).expand(batch_size, total - 1)
    if not torch.compiler.is_compiling():
        _refuse_bidirectional(torch.as_tensor(mask_function(rows, 0, at - 1, at)))
        if bool(sees_previous.all()):
            return None
    return torch.nn.functional.pad((~sees_previous).long().cumsum(-1), (1, 0))


def _refuse_bidirectional(sees_next: Tensor) -> None:
    if bool(sees_next.any()):
        raise UnsupportedModelError(
            "the model's mask lets some queries see later keys (image tokens of multimodal models do), and per-head "
            "windows are causal."
        )
