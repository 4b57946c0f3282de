"""The one grid of cases that every backend of windowed attention is held against, and the reference for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from aah_hf.ops import Sequences, reference


@dataclass(frozen=True)
class Case:
    """One call of windowed attention: shapes and rules, without tensors."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    q_len: int
    kv_len: int
    q_start: int
    windows: tuple[int, ...]
    sink_tokens: int
    layout: str  # none | left | right | holes | packed
    limit: int | None
    softcap: float | None
    sink_logits: bool
    mask: str  # none | bool | float
    seed: int


@st.composite
def cases(draw, max_len: int = 140, layouts=("none", "left", "right", "holes", "packed"), plain: bool = False) -> Case:
    """Windows around block edges, 1 and the length; ragged padding; packing; fewer queries than keys; GQA 1–4."""
    kv_len = draw(st.integers(1, max_len))
    q_len = draw(st.one_of(st.just(kv_len), st.integers(1, kv_len), st.just(1)))
    heads_per_kv = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.integers(1, 2))
    edges = [w for w in (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, kv_len - 1, kv_len, kv_len + 1) if w >= 1]
    window = st.one_of(st.sampled_from(edges), st.integers(1, kv_len + 1))
    return Case(
        batch=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        group=heads_per_kv,
        head_dim=8,
        q_len=q_len,
        kv_len=kv_len,
        q_start=draw(st.one_of(st.just(kv_len - q_len), st.integers(0, kv_len - q_len))),
        windows=tuple(draw(window) for _ in range(kv_heads * heads_per_kv)),
        sink_tokens=draw(st.integers(0, 5)),
        layout=draw(st.sampled_from(layouts)),
        limit=None if plain else draw(st.one_of(st.none(), st.integers(1, kv_len + 1))),
        softcap=None if plain else draw(st.sampled_from([None, None, 4.0])),
        sink_logits=False if plain else draw(st.booleans()),
        mask="none" if plain else draw(st.sampled_from(["none", "none", "none", "bool", "float"])),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink_logits: torch.Tensor | None
    sequences: Sequences | None
    valid: torch.Tensor | None
    documents: torch.Tensor | None
    mask: torch.Tensor | None
    dout: torch.Tensor

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [t for t in (self.q, self.k, self.v, self.sink_logits) if t is not None]


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> Tensors:
    """Seeded inputs of a case; differentiable."""
    g = torch.Generator().manual_seed(case.seed)
    heads = case.kv_heads * case.group

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    q = normal(case.batch, heads, case.q_len, case.head_dim).requires_grad_()
    k = normal(case.batch, case.kv_heads, case.kv_len, case.head_dim).requires_grad_()
    v = normal(case.batch, case.kv_heads, case.kv_len, case.head_dim).requires_grad_()
    valid = documents = None
    at = torch.arange(case.kv_len)
    cut = torch.randint(0, case.kv_len + 1, (case.batch, 1), generator=g)
    if case.layout == "left":
        valid = at >= cut
    elif case.layout == "right":
        valid = at < cut
    elif case.layout == "holes":
        valid = torch.rand(case.batch, case.kv_len, generator=g) < 0.7
        documents = torch.randint(0, 2, (case.batch, case.kv_len), generator=g).cumsum(-1) // 9
    elif case.layout == "packed":
        documents = (torch.rand(case.batch, case.kv_len, generator=g) < 0.06).long().cumsum(-1)
    mask = None
    if case.mask == "bool":
        mask = torch.rand(case.batch, 1, case.q_len, case.kv_len, generator=g) < 0.8
    elif case.mask == "float":
        mask = normal(1, heads, case.q_len, case.kv_len)
        mask[torch.rand(mask.shape, generator=g) < 0.1] = -torch.inf
    return Tensors(
        q,
        k,
        v,
        normal(heads).requires_grad_() if case.sink_logits else None,
        None if valid is None and documents is None else Sequences(valid, documents),
        valid,
        documents,
        mask,
        normal(case.batch, heads, case.q_len, case.head_dim),
    )


def expected(case: Case, t: Tensors) -> torch.Tensor:
    """The reference's output for a case, differentiable."""
    out, _ = reference.attention(
        t.q,
        t.k,
        t.v,
        case.windows,
        case.sink_tokens,
        softcap=case.softcap,
        sink_logits=t.sink_logits,
        q_start=case.q_start,
        valid=t.valid,
        documents=t.documents,
        limit=case.limit,
        mask=t.mask,
    )
    return out
