"""The CUDA kernel against the float64 reference, and everything that only a GPU can show."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from typing import Any

import cases
import torch
from cases import Case
from check import Check
from torch import Tensor

from aah_hf.ops import Sequences, gpu, native, reference, windowed_attention
from aah_hf.ops.attention import backend

ROUNDS = 6  # draws of every dtype and head size


def grid(check: Check) -> dict[str, Any]:
    """All dtypes and head sizes, with shapes, layouts and rules drawn anew; memory is poisoned before each call."""
    rng = random.Random(check.seed)
    worst: dict[str, float] = defaultdict(float)
    count = 0
    for dtype in cases.DTYPES:
        for head_dim in cases.HEAD_DIMS:
            for _ in range(ROUNDS):
                case = cases.draw(rng, dtype, head_dim)
                _hold(check, case, worst)
                count += 1
        check.say(f"{dtype}: largest error {worst[str(dtype)]:.2e}, of log-sum-exp {worst['lse']:.2e}")
    return {"cases": count, "largest_errors": dict(worst)}


def _hold(check: Check, case: Case, worst: dict[str, float]) -> None:
    t = cases.inputs(case)
    before = [x.clone() for x in (t.q, t.k, t.v)]
    cases.poison(case)
    out, lse = cases.kernel(case, t)
    torch.cuda.synchronize()
    want, want_lse = cases.truth(case, t)
    found, found_lse = cases.error(out, want), cases.error(lse, want_lse)
    worst[str(case.dtype)] = max(worst[str(case.dtype)], found)
    worst["lse"] = max(worst["lse"], found_lse)
    check.expect(found <= cases.TOLERANCE[case.dtype], f"out is off by {found:.3g} in {case}")
    check.expect(found_lse <= cases.LSE_TOLERANCE, f"the log-sum-exp is off by {found_lse:.3g} in {case}")
    same = all(torch.equal(a, b) for a, b in zip(before, (t.q, t.k, t.v)))
    check.expect(same, f"the kernel wrote into its inputs in {case}")


def _rows(q: Tensor, k: Tensor, v: Tensor, windows: list[int | None], sinks: int, start: int) -> Tensor:
    """Float64 attention of the queries from position `start` on; no packing, no padding, one KV head."""
    at = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
    limits = torch.tensor([2**31 - 1 if w is None else w for w in windows], device=q.device)[:, None, None]
    seen = reference.visible(at, torch.arange(k.shape[2], device=q.device), limits, sinks)
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double()


def long_sequences(check: Check) -> dict[str, float]:
    """Real lengths and head counts; some queries of every window are compared."""
    facts = {}
    windows = [128, 512, 2048, None] * 8
    for length, head_dim, dtype in (
        (8192, 128, torch.bfloat16),
        (16384, 64, torch.float16),
        (32768, 128, torch.bfloat16),
        (4096, 128, torch.float32),
    ):
        q, k, v = (torch.randn(1, n, length, head_dim, device="cuda").to(dtype) for n in (32, 8, 8))
        with torch.no_grad():
            out = windowed_attention(q, k, v, windows, 4)
        worst = 0.0
        for kv_head in (0, 7):
            heads = slice(4 * kv_head, 4 * kv_head + 4)
            for start in (0, length // 2 - 37, length - 64):
                part = slice(start, start + 64)
                pair = (k[:, kv_head : kv_head + 1], v[:, kv_head : kv_head + 1])
                want = _rows(q[:, heads, part], *pair, windows[heads], 4, start)
                worst = max(worst, cases.error(out[:, heads, part], want))
        name = f"T {length}, D {head_dim}, {dtype}"
        facts[name] = worst
        check.say(f"{name}: {worst:.2e}")
        check.expect(worst <= cases.TOLERANCE[dtype], f"{name}: off by {worst:.3g}")
    return facts


def unwritten_memory(check: Check) -> dict[str, int]:
    """NaN in padding, in a static cache's rows that nothing was written to, and behind the last key, is never seen."""
    rng = random.Random(check.seed + 1)
    count = 0
    for dtype in cases.DTYPES:
        for head_dim in (64, 80, 128, 256):
            for layout in ("left", "right", "none"):
                case = cases.replace(cases.draw(rng, dtype, head_dim), layout=layout, memory="heads")
                t = cases.inputs(case)
                room = 70  # a buffer longer than the keys
                k, v = (torch.full((*x.shape[:2], x.shape[2] + room, x.shape[3]), torch.nan).to(x) for x in (t.k, t.v))
                for buffer, x in ((k, t.k), (v, t.v)):
                    buffer[:, :, : case.kv_len] = x
                    if t.valid is not None:
                        buffer[:, :, : case.kv_len].masked_fill_(~t.valid[:, None, :, None], torch.nan)
                start = case.kv_len - case.q_len
                sequences = None if t.valid is None else Sequences(torch.nn.functional.pad(t.valid, (0, room)))
                cases.poison(case)
                with torch.no_grad():
                    out = windowed_attention(
                        t.q, k, v, case.windows, case.sink_tokens,
                        softcap=case.softcap, sink_logits=t.sink_logits, limit=case.limit,
                        q_start=start, sequences=sequences,
                    )  # fmt: skip
                found = cases.error(out, cases.truth(case, t)[0])
                check.expect(found <= cases.TOLERANCE[dtype], f"unwritten memory is seen (error {found:.3g}) in {case}")
                count += 1
    return {"cases": count}


def determinism(check: Check) -> dict[str, int]:
    """The same bits every time, whatever else the GPU does."""
    rng = random.Random(check.seed + 2)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    count = 0
    for dtype in cases.DTYPES:
        for q_len, kv_len in ((700, 700), (1, 3000), (33, 2000)):  # the latter two split keys between blocks
            case = cases.replace(cases.draw(rng, dtype, 128), q_len=q_len, kv_len=kv_len, layout="none", memory="heads")
            t = cases.inputs(case)
            first = cases.kernel(case, t)
            for _ in range(20):
                with torch.cuda.stream(other):
                    noise = (noise @ noise).clamp(-1, 1)
                cases.poison(case)
                again = cases.kernel(case, t)
                count += 1
                if not all(torch.equal(a, b) for a, b in zip(first, again)):
                    check.fail(f"two calls differ in {case}")
                    break
    torch.cuda.synchronize()
    return {"calls": count}


def graphs(check: Check) -> dict[str, int]:
    """Captured calls replay over new data: warm ones, and ones whose windows were never used before the capture."""
    rng = random.Random(check.seed + 3)
    captured = []
    for dtype in cases.DTYPES:
        for warm in (True, False):
            for q_len, kv_len in ((300, 300), (1, 900)):
                case = cases.replace(
                    cases.draw(rng, dtype, 64), q_len=q_len, kv_len=kv_len, layout="none", memory="heads",
                    windows=tuple(rng.randint(1, 800) for _ in range(8)), kv_heads=2, group=4, sink_logits=False,
                )  # fmt: skip
                t = cases.inputs(case)
                if warm:
                    cases.kernel(case, t)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out, lse = cases.kernel(case, t)
                captured.append((case, t, graph, out, lse))
    for _ in range(300):  # work lists of other shapes must not push out those that graphs hold
        case = cases.draw(rng, torch.bfloat16, 64, max_len=200)
        cases.kernel(case, cases.inputs(case))
    for case, t, graph, out, lse in captured:
        for turn in range(3):
            fresh = cases.inputs(cases.replace(case, seed=case.seed + turn + 1))
            for old, new in ((t.q, fresh.q), (t.k, fresh.k), (t.v, fresh.v)):
                old.copy_(new)
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            want, want_lse = cases.kernel(case, t)
            good = torch.equal(out, want) and torch.equal(lse, want_lse)
            check.expect(good, f"replay {turn} of a captured call differs from a plain one in {case}")
            check.expect(cases.error(out, cases.truth(case, t)[0]) <= cases.TOLERANCE[case.dtype], f"replay of {case}")
    return {"graphs": len(captured)}


def streams(check: Check) -> dict[str, int]:
    """Work goes to torch's current stream: it waits for what that stream does before, and only for that."""
    rng = random.Random(check.seed + 4)
    pair = [torch.cuda.Stream(), torch.cuda.Stream()]
    count = 0
    for dtype in cases.DTYPES:
        case = cases.replace(cases.draw(rng, dtype, 128), layout="none", memory="heads")
        stale, fresh = cases.inputs(case), cases.inputs(cases.replace(case, seed=case.seed + 1))
        want = cases.kernel(case, fresh)[0]
        for stream in pair:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                t = cases.Inputs(stale.q.clone(), stale.k.clone(), stale.v.clone(), fresh.sink_logits, None, None)
                torch.cuda._sleep(30_000_000)  # the new values come late
                for old, new in ((t.q, fresh.q), (t.k, fresh.k), (t.v, fresh.v)):
                    old.copy_(new)
                out = cases.kernel(case, t)[0]
            stream.synchronize()
            check.expect(torch.equal(out, want), f"a call on a side stream ran before its inputs were there: {case}")
            count += 1
    return {"calls": count}


def other_devices(check: Check) -> dict[str, Any]:
    """Tensors on a GPU that is not the current one."""
    if torch.cuda.device_count() < 2:
        check.say("there is one GPU only")
        return {"devices": 1}
    case = cases.draw(random.Random(check.seed + 5), torch.bfloat16, 64)
    t = cases.inputs(case, "cuda:1")
    if gpu.missing(1) is not None:
        check.say(f"the second GPU does not run the kernel: {gpu.missing(1)}")
        return {"devices": torch.cuda.device_count()}
    out, _ = cases.kernel(case, t)
    check.expect(out.device == t.q.device and torch.cuda.current_device() == 0, "the current device has changed")
    found = cases.error(out, cases.truth(case, t)[0])
    check.expect(found <= cases.TOLERANCE[case.dtype], f"off by {found:.3g} on the second GPU")
    return {"devices": torch.cuda.device_count(), "error": found}


def fallbacks(check: Check) -> dict[str, Any]:
    """What the kernel does not do is done in pure PyTorch, with a word, and as exactly as on a CPU."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aah_hf").addHandler(handler)
    q, k, v = (torch.randn(1, n, 200, 64, device="cuda", dtype=torch.float32) for n in (4, 2, 2))
    windows: list[int | None] = [3, 50, 129, None]
    try:
        for _ in range(2):
            q2, k2, v2 = (x.clone().requires_grad_() for x in (q, k, v))
            windowed_attention(q2, k2, v2, windows, 2).square().sum().backward()
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        out, _ = reference.attention(*exact, [2**31 - 1 if w is None else w for w in windows], 2)
        out.square().sum().backward()
        for name, got, want in zip("qkv", (q2, k2, v2), exact):
            found = cases.error(got.grad, want.grad)
            check.expect(found <= 1e-4, f"the gradient of {name} is off by {found:.3g}")
        check.expect(len(said) == 1 and native.NO_GRADIENT in said[0], f"training was to be announced once: {said}")
        check.expect(backend(q) == "native" and backend(q.double()) == "eager", "float64 was to run in pure PyTorch")
        doubles = windowed_attention(q.double(), k.double(), v.double(), windows, 2)
        check.expect(cases.error(doubles, out.detach()) < 1e-10, "float64 on the GPU is not exact")
    finally:
        logging.getLogger("aah_hf").removeHandler(handler)
    return {"said": said}
