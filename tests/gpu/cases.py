"""Random calls of windowed attention on a GPU, and what the float64 reference says of them.

The grid of tests/grid.py in miniature, without its dependency: these cases are drawn anew in every run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aah_hf.ops import Sequences, native, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256)
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)  # warps and tiles of the kernels

# Largest error allowed in `out`, relative to its largest entry: probabilities and results are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LSE_TOLERANCE = 2e-4  # sums are float32 for every dtype


@dataclass(frozen=True)
class Case:
    """One call: shapes and rules."""

    dtype: torch.dtype
    head_dim: int
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    windows: tuple[int | None, ...]
    sink_tokens: int
    layout: str  # none | left | right | packed
    limit: int | None
    softcap: float | None
    sink_logits: bool
    memory: str  # how q, k and v lie in memory: heads | tokens | fused | unaligned
    seed: int


def draw(rng: random.Random, dtype: torch.dtype, head_dim: int, max_len: int = 420) -> Case:
    edge = rng.choice([e for e in EDGES if e <= max_len])
    kv_len = rng.choice([rng.randint(1, max_len), rng.randint(max_len // 2, max_len), edge])
    q_len = rng.choice([kv_len, kv_len, rng.randint(1, kv_len), 1])
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 7])
    widths = [None, kv_len, rng.randint(1, kv_len + 1), rng.randint(1, kv_len // 2 + 1), *rng.choices(EDGES, k=3)]
    return Case(
        dtype,
        head_dim,
        rng.choice([1, 2, 3]),
        kv_heads,
        group,
        q_len,
        kv_len,
        tuple(rng.choice(widths) for _ in range(kv_heads * group)),
        rng.choice([0, 0, 1, 4, 4, 70]),
        rng.choice(["none", "none", "left", "right", "packed"]),
        rng.choice([None, None, rng.randint(1, kv_len + 1)]),
        rng.choice([None, None, 4.0, 30.0]),
        rng.random() < 0.3,
        rng.choice(["heads", "tokens", "fused", "unaligned"]),
        rng.randrange(2**31),
    )


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    sink_logits: Tensor | None
    valid: Tensor | None
    documents: Tensor | None


def inputs(case: Case, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(case.seed)
    heads, kv_heads = case.kv_heads * case.group, case.kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(case.dtype)

    if case.memory == "fused" and case.q_len == case.kv_len:  # slices of one projection's output
        rows = normal(case.batch, case.kv_len, heads + 2 * kv_heads, case.head_dim).transpose(1, 2)
        q, k, v = rows.split([heads, kv_heads, kv_heads], 1)
    else:
        shapes = [(case.batch, n, t, case.head_dim) for n, t in ((heads, case.q_len), (kv_heads, case.kv_len))]
        q, k, v = (normal(*shape) for shape in (shapes[0], shapes[1], shapes[1]))
        if case.memory == "tokens":  # as a projection leaves them
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        elif case.memory == "unaligned":  # begins in the middle of 16 bytes
            q, k, v = (torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in (q, k, v))
    valid = documents = None
    at = torch.arange(case.kv_len, device=device)
    if case.layout in {"left", "right"}:
        cut = torch.randint(0, case.kv_len + 1, (case.batch, 1), generator=generator, device=device)
        valid = at >= cut if case.layout == "left" else at < cut
    elif case.layout == "packed":
        starts = torch.rand(case.batch, case.kv_len, generator=generator, device=device) < 0.03
        documents = starts.long().cumsum(-1)
    logits = torch.randn(heads, generator=generator, device=device) if case.sink_logits else None
    return Inputs(q, k, v, logits, valid, documents)


def kernel(case: Case, t: Inputs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the native operator."""
    start = case.kv_len - case.q_len
    layout: dict = {"q_start": start}
    if t.valid is not None or t.documents is not None:
        layout = Sequences(t.valid, t.documents).arranged(case.q_len, case.kv_len, start, 0)
    with torch.no_grad():
        return native.forward(
            t.q, t.k, t.v, case.windows, case.sink_tokens,
            softcap=case.softcap, sink_logits=t.sink_logits, limit=case.limit, **layout,
        )  # fmt: skip


def truth(case: Case, t: Inputs) -> tuple[Tensor, Tensor]:
    """The float64 reference."""
    return reference.attention(
        t.q, t.k, t.v, [2**31 - 1 if w is None else w for w in case.windows], case.sink_tokens,
        softcap=case.softcap, sink_logits=t.sink_logits, q_start=case.kv_len - case.q_len,
        valid=t.valid, documents=t.documents, limit=case.limit,
    )  # fmt: skip


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest entry (at least 1); infinite where one is not a number."""
    if want.numel() == 0:
        return 0.0
    difference = (got.double() - want.double()).abs()
    difference = torch.where(got.double() == want.double(), 0.0, difference)  # -inf equals -inf
    worst = difference.nan_to_num(torch.inf).max().item()
    return worst / max(1.0, want.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item())


def poison(case: Case) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that what a kernel does not write is seen."""
    heads = case.kv_heads * case.group
    shapes = {
        (case.batch, case.q_len, heads, case.head_dim): case.dtype,
        (case.batch, heads, case.q_len): torch.float32,
    }
    left = [torch.full(shape, torch.nan, dtype=dtype, device="cuda") for shape, dtype in shapes.items() for _ in "ab"]
    left.append(torch.full((2**20,), torch.nan, device="cuda"))
    del left


__all__ = [
    "DTYPES", "HEAD_DIMS", "LSE_TOLERANCE", "TOLERANCE", "Case", "Inputs", "draw", "error", "inputs", "kernel", "poison",
    "replace", "truth",
]  # fmt: skip
