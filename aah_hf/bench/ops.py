"""`aah bench ops`: windowed attention against named peers, interleaved in one process, medians as ratios.

Peers: SDPA with full causal attention (what a user runs today), SDPA with the mask that the windows need,
compiled FlexAttention with a per-head block mask (forward only on CPU), and our pure PyTorch operator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..coverage import measure
from ..errors import AAHError
from ..ops import windowed_attention
from ..ops.attention import backend
from ..ops.reference import visible
from .memory import peak_bytes

SHAPES = {"9/3x64": (9, 3, 64), "8/2x128": (8, 2, 128)}
MIXES: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "128-full": (128, 256, 512, 1024, 2048, None),
    "64-full": (64, 128, 256, 512, 1024, None),
    "512-full": (512, 1024, 2048, None),
    "256": (256,),
}
"""Windows that go round over the query heads."""

DTYPES = ("float32", "float64", "bfloat16", "float16")
DIRECTIONS = ("forward", "backward")
PEERS = ("sdpa_causal", "sdpa_mask", "flex", "eager", "aah")
SINKS = 4


@dataclass(frozen=True)
class Row:
    """One line of the benchmark; times are median milliseconds, missing where a peer cannot do it.

    `spread` is (slowest - fastest) / median; `peak_mib` what one call takes at its highest, its result included.
    """

    shape: str
    seq_len: int
    windows: str
    dtype: str
    direction: str
    coverage: float
    milliseconds: dict[str, float]
    spread: dict[str, float]
    peak_mib: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "seq_len": self.seq_len,
            "windows": self.windows,
            "dtype": self.dtype,
            "direction": self.direction,
            "coverage": self.coverage,
            **{f"{name}_ms": value for name, value in self.milliseconds.items()},
            "spread": self.spread,
            "peak_mib": self.peak_mib,
        }


def bench_ops(
    *,
    shapes: Sequence[str] = ("9/3x64",),
    seq_lens: Sequence[int] = (1024, 2048, 4096),
    mixes: Sequence[str] = ("full", "128-full"),
    dtypes: Sequence[str] = ("float32",),
    directions: Sequence[str] = ("forward", "backward"),
    peers: Sequence[str] = PEERS,
    repeats: int = 7,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Row]:
    """Time every combination; peers take turns, so that a change of the machine's speed meets all alike.

    Raises:
        AAHError: an unknown shape, mix, dtype, direction or peer, or no repeats.
    """
    for name, given, known in (
        ("shape", shapes, SHAPES),
        ("windows", mixes, MIXES),
        ("dtype", dtypes, DTYPES),
        ("direction", directions, DIRECTIONS),
        ("peer", peers, PEERS),
    ):
        for value in given:
            if value not in known:
                raise AAHError(f"{name} is {value!r}; choose from {', '.join(known)}.")
    if repeats < 1 or min(seq_lens, default=0) < 1:
        raise AAHError(f"repeats is {repeats} and lengths are {list(seq_lens)}; both must be at least 1.")
    todo = [(s, n, m, t, d) for s in shapes for n in seq_lens for m in mixes for t in dtypes for d in directions]
    for index, (shape, seq_len, mix, dtype, direction) in enumerate(todo):
        yield _row(shape, seq_len, mix, dtype, direction, peers, repeats, device)
        if progress is not None:
            progress("benchmark", index + 1, len(todo))


def _row(shape, seq_len, mix, dtype, direction, peers, repeats, device) -> Row:
    heads, kv_heads, head_dim = SHAPES[shape]
    windows = [MIXES[mix][h % len(MIXES[mix])] for h in range(heads)]
    sinks = 0 if all(w is None for w in windows) else SINKS
    generator = torch.Generator(device).manual_seed(0)

    def normal(n: int) -> Tensor:
        t = torch.randn(1, n, seq_len, head_dim, generator=generator, device=device)
        return t.to(getattr(torch, dtype)).requires_grad_(direction == "backward")

    q, k, v, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads).detach()
    calls = {}
    for peer in peers:
        forward = _forward(peer, q, k, v, windows, sinks)
        if forward is None or (peer == "flex" and direction == "backward" and device == "cpu"):
            continue
        calls[peer] = forward if direction == "forward" else _backward(forward, (q, k, v), dout)
    clocks: dict[str, list[float]] = {peer: [] for peer in calls}
    for turn in range(repeats + 1):  # the first turn warms up
        for peer, call in calls.items():
            start = time.perf_counter()
            with torch.set_grad_enabled(direction == "backward"):
                call()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:
                clocks[peer].append(1e3 * (time.perf_counter() - start))
    return Row(
        shape,
        seq_len,
        mix,
        dtype,
        direction,
        measure([windows], seq_len, kv_heads=kv_heads, sink_tokens=sinks).causal,
        {peer: statistics.median(times) for peer, times in clocks.items()},
        {peer: (max(times) - min(times)) / statistics.median(times) for peer, times in clocks.items()},
        {
            peer: round(peak / 2**20, 2)
            for peer, call in calls.items()
            if (peak := peak_bytes(call, device)) is not None
        },
    )


def _forward(peer, q, k, v, windows, sinks) -> Callable[[], Tensor] | None:
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    wide = [length if w is None else w for w in windows]
    if peer == "aah":
        return lambda: windowed_attention(q, k, v, windows, sinks)
    if peer == "eager":
        if backend(q) == "eager":
            return None  # the same as "aah"
        from ..ops import eager

        return lambda: eager.forward(q, k, v, [min(w, length) for w in wide], eager.Options(sink_tokens=sinks))
    if peer == "sdpa_causal":
        return lambda: F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
        )
    at, limit = torch.arange(length, device=q.device), torch.tensor(wide, device=q.device)
    if peer == "sdpa_mask":
        mask = visible(at[None, :, None], at[None, None], limit[:, None, None], sinks)[None]
        return lambda: F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=mask
        )
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(
        lambda b, h, i, j: (i >= j) & ((i - j < limit[h]) | (j < sinks)), 1, q.shape[1], length, length, device=q.device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=group > 1)


def _backward(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> Callable[[], Any]:
    out = forward()
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
