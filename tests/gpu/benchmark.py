"""The CUDA kernel beside its peers: medians of interleaved repeats, TFLOP/s over the pairs that the windows leave."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cases import error
from check import Check
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aah_hf.coverage import measure
from aah_hf.ops import reference, windowed_attention
from aah_hf.ops.attention import backend

Windows = tuple[int | None, ...]

# Per KV head, since flash-sparse-attn has no windows per query head.
MIXES: dict[str, Windows] = {
    "full": (None,),
    "512-1k-2k-full": (512, 1024, 2048, None),
    "128-256-512-full": (128, 256, 512, None),
    "1024": (1024,),
}
LENGTHS = (8192, 2048, 32768, 4096, 16384)  # in the order of what to know first
HEADS, KV_HEADS, SINKS = 32, 8, 4
REPEATS, PEER_SECONDS = 15, 0.4
ENOUGH = 20.0  # seconds that a row must have left

# Published forward rates in TFLOP/s, of a square bf16 matmul and of attention kernels, on an H200.
KNOWN_LIMITS = {"H200": {"matmul": 790, "FlashAttention-3": 650, "FlashAttention-2": 355}}


@dataclass(frozen=True)
class Shape:
    length: int
    head_dim: int
    mix: str

    @property
    def windows(self) -> Windows:
        """One per query head."""
        group = HEADS // KV_HEADS
        return tuple(MIXES[self.mix][head // group % len(MIXES[self.mix])] for head in range(HEADS))

    @property
    def sinks(self) -> int:
        return 0 if self.mix == "full" else SINKS

    def __str__(self) -> str:
        return f"T {self.length}, D {self.head_dim}, {self.mix}"


Peer = Callable[[Shape, Tensor, Tensor, Tensor], Callable[[], Tensor]]


def run(check: Check) -> dict[str, Any]:
    name = torch.cuda.get_device_name()
    limits = next((rates for part, rates in KNOWN_LIMITS.items() if part in name), {})
    facts: dict[str, Any] = {"gpu": name, "published_limits": limits, "matmul_tflops": _matmul_rate(), "rows": []}
    check.say(
        f"a bf16 matmul reaches {facts['matmul_tflops']:.0f} TFLOP/s; published for such a GPU: {limits or 'nothing'}"
    )
    probe = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    if not check.expect(backend(probe) == "native", "the kernel is not used here, so there is nothing to time"):
        return facts
    shapes = [Shape(t, d, m) for t in LENGTHS for d in (128, 64) for m in MIXES]
    # All lengths first, then as far as time goes the peers that compile or tune themselves for every shape.
    todo = [(shape, peers) for peers in (READY, COMPILED) for shape in shapes]
    said: set[tuple[str, str]] = set()
    for index, (shape, peers) in enumerate(todo):
        if check.seconds_left() < ENOUGH:
            facts["left_out"] = [f"{left}: {', '.join(names)}" for left, names in todo[index:]]
            check.say(f"time is up: {len(todo) - index} of {len(todo)} rows are left out (--minutes)")
            break
        row = _row(check, shape, peers, facts["matmul_tflops"], limits)
        facts["rows"].append(row)
        times = ", ".join(f"{peer} {value:.3f}" for peer, value in row["milliseconds"].items())
        check.say(f"{shape}: {row['tflops']:.0f} TFLOP/s, {row['of_matmul']:.0%} of a matmul; ms: {times}")
        for peer, why in row["missing"].items():
            if (peer, why) not in said:
                said.add((peer, why))
                check.say(f"    {peer}: {why}")
    return facts


def _row(check: Check, shape: Shape, peers: dict[str, Peer], matmul: float, limits: dict[str, float]) -> dict[str, Any]:
    q, k, v = (
        torch.randn(1, n, shape.length, shape.head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    calls: dict[str, Callable[[], Tensor]] = {}
    missing: dict[str, str] = {}
    with torch.no_grad():
        calls["aah"] = _aah(shape, q, k, v)
        want = calls["aah"]()
        for peer, make in peers.items():
            if check.seconds_left() < ENOUGH / 2:
                missing[peer] = "no time left"
                continue
            try:
                call = make(shape, q, k, v)
                got = call()
                torch.cuda.synchronize()
            except Exception as problem:  # not installed, not for this GPU or shape, out of memory
                missing[peer] = f"{type(problem).__name__}: {problem}".splitlines()[0][:160]
                continue
            # full attention is a peer for time only, except where nothing is hidden
            if peer not in FULL or shape.mix == "full":
                difference = error(got, want)
                if difference > 4e-2:
                    missing[peer] = f"computes something else (off by {difference:.2g}), so it is not timed"
                    continue
            calls[peer] = call
        times = _times(calls)
    pairs = measure([shape.windows], shape.length, kv_heads=KV_HEADS, sink_tokens=shape.sinks).causal
    flop = 4 * shape.head_dim * HEADS * pairs * shape.length * (shape.length + 1) / 2
    milliseconds = {peer: statistics.median(found) for peer, found in times.items()}
    rate = flop / milliseconds["aah"] / 1e9
    return {
        "length": shape.length,
        "head_dim": shape.head_dim,
        "windows": shape.mix,
        "coverage": pairs,
        "gflop": flop / 1e9,
        "milliseconds": milliseconds,
        "spread": {peer: (max(found) - min(found)) / statistics.median(found) for peer, found in times.items()},
        "tflops": rate,
        "of_matmul": rate / matmul,
        "milliseconds_at_limits": {
            "measured matmul": flop / matmul / 1e9,
            **{n: flop / r / 1e9 for n, r in limits.items()},
        },
        "missing": missing,
    }


def _times(calls: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Milliseconds of every call; peers take turns, so that a change of clocks meets all alike."""
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    deadline = time.monotonic() + PEER_SECONDS * len(calls)
    for turn in range(REPEATS):
        for peer, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times[peer].append(begin.elapsed_time(end))
        if turn >= 4 and time.monotonic() > deadline:
            break
    return times


def _matmul_rate() -> float:
    """TFLOP/s of a square bf16 matmul: what this GPU can do at its clocks of now."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return 2 * n**3 / statistics.median(_times({"matmul": lambda: a @ b})["matmul"]) / 1e9


# --- peers ------------------------------------------------------------------------------------------------------


def _aah(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    return lambda: windowed_attention(q, k, v, shape.windows, shape.sinks)


def _sdpa(backend: SDPBackend) -> Peer:
    """Full causal attention, whatever the windows: what a model runs without them."""

    def make(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    return make


def _sdpa_mask(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The windows as the explicit mask that SDPA needs for them."""
    if shape.length > 8192:
        raise ValueError("the mask alone would take gigabytes")
    at = torch.arange(shape.length, device="cuda")
    limits = torch.tensor([2**31 - 1 if w is None else w for w in shape.windows], device="cuda")
    mask = reference.visible(at[:, None], at, limits[:, None, None], shape.sinks)[None]
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))  # with enable_gqa no fast kernel takes a mask
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _flex(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # or it gives up compiling after eight shapes, without a word
    limits = torch.tensor([2**31 - 1 if w is None else w for w in shape.windows], device="cuda")
    sinks = shape.sinks

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i - j < limits[h]) | (j < sinks))

    # compiled, because otherwise it makes the whole [heads, T, T] mask first
    blocks = torch.compile(create_block_mask)(seen, 1, HEADS, shape.length, shape.length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def _flash_sparse(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """flash-sparse-attn 2.x: windows [KV head, (sinks, distant band, gap, near keys)]."""
    from flash_sparse_attn import flash_dense_attn_func

    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    if shape.mix == "full":
        return lambda: flash_dense_attn_func(*rows, is_causal=True).transpose(1, 2)
    per_kv_head = shape.windows[:: HEADS // KV_HEADS]
    wide = [shape.length if w is None else w for w in per_kv_head]
    sizes = torch.tensor([[shape.sinks, 0, 0, w] for w in wide], dtype=torch.int32, device="cuda")
    return lambda: flash_dense_attn_func(*rows, is_causal=True, window_sizes=sizes).transpose(1, 2)


def _flash_attn(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """flash-attn: one window for all heads, so mixes take one launch per width; it has no sink tokens."""
    try:
        from flash_attn_interface import flash_attn_func  # FlashAttention-3
    except ImportError:
        from flash_attn import flash_attn_func

    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    widths = dict.fromkeys(shape.windows)
    group = HEADS // KV_HEADS
    parts = []
    for width in widths:
        heads = [h for h, w in enumerate(shape.windows) if w == width]
        kv_heads = sorted({h // group for h in heads})
        parts.append(([rows[0][:, :, heads].contiguous(), *(x[:, :, kv_heads].contiguous() for x in rows[1:])], width))

    def call() -> Tensor:
        outs = []
        for part, width in parts:
            window = (-1, -1) if width is None else (width - 1, 0)
            out = flash_attn_func(*part, causal=True, window_size=window)
            outs.append(out[0] if isinstance(out, tuple) else out)
        return outs[0].transpose(1, 2) if len(outs) == 1 else torch.cat(outs, 2).transpose(1, 2)

    return call


READY: dict[str, Peer] = {
    "sdpa_flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa_mask": _sdpa_mask,
    "flash_attn": _flash_attn,
}
COMPILED: dict[str, Peer] = {"flash_sparse_attn": _flash_sparse, "flex": _flex}
FULL = {"sdpa_flash", "sdpa_cudnn", "flash_attn"}
"""Peers whose output is not ours where windows hide something: without windows, without sinks, or in another order."""
