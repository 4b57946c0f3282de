"""What a small call costs on its way to the kernel, layer by layer."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..ops import native, windowed_attention


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "length", "head"))]


class _Params(ctypes.Structure):
    """AahParams of `csrc/include/aah_params.h`; its version number guards the layout."""

    _fields_ = [
        ("version", ctypes.c_uint32),
        ("dtype", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim")),
        ("sequences", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("window", "q_start", "start", "end", "cu_q", "cu_k")),
        ("sinks", ctypes.c_int32),
        ("limit", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("sink_logits", ctypes.c_void_p),
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        *((name, _Tensor) for name in ("dout", "dq", "dk", "dv")),
        ("dlse", ctypes.c_void_p),
        ("d_sink_logits", ctypes.c_void_p),
    ]


_VERSION = 1


def call_overhead(repeats: int = 3000) -> dict[str, float]:
    """Median microseconds of one call with one query (9/3 heads × 64, 16 keys), by layer; empty without the library.

    `windowed_attention` is the public function with its checks, `native.forward` the operator's Python entry,
    `torch.ops.aah.fwd` the registered operator with finished arguments, and `extern_c` the kernel behind it, called
    through ctypes with a finished parameter block (about 1 µs of it is ctypes itself). `over_extern_c` is what the
    public function adds to it.
    """
    status = native.status(build_now=True)
    if not status.available or status.path is None:
        return {}
    q, k, v = torch.randn(1, 9, 1, 64), torch.randn(1, 3, 16, 64), torch.randn(1, 3, 16, 64)
    windows, sinks, scale = [8, 16, None] * 3, 4, 0.125
    window = torch.tensor([native.UNLIMITED if w is None else w for w in windows], dtype=torch.int32)
    at = torch.full((1,), 15, dtype=torch.int32)
    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out, lse = torch.empty_like(rows[0]), torch.empty(1, 9, 1)
    params = _Params(version=_VERSION, batch=1, q_len=1, kv_len=16, q_heads=9, kv_heads=3, head_dim=64, sequences=1)
    params.window, params.q_start, params.lse = window.data_ptr(), at.data_ptr(), lse.data_ptr()
    params.sinks, params.limit, params.scale = sinks, native.UNLIMITED, scale
    for name, t in zip(("q", "k", "v", "out"), (*rows, out)):
        setattr(params, name, _Tensor(t.data_ptr(), *t.stride()[:3]))
    kernel = ctypes.CDLL(status.path).aah_cpu_fwd
    kernel.argtypes, kernel.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    address = ctypes.addressof(params)
    code = kernel(address, None)
    if code:
        raise RuntimeError(
            f"the kernel refuses the benchmark's parameter block (status {code}); its layout has changed"
        )

    none = [None] * 4
    calls: dict[str, Callable[[], Any]] = {
        "windowed_attention": lambda: windowed_attention(q, k, v, windows, sinks),
        "native.forward": lambda: native.forward(q, k, v, windows, sinks, q_start=15),
        "torch.ops.aah.fwd": lambda: torch.ops.aah.fwd.default(
            *rows, window, None, at, *none, 1, 16, sinks, native.UNLIMITED, scale, 0.0
        ),
        "extern_c": lambda: kernel(address, None),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for turn in range(16):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(max(1, repeats // 15)):
                    call()
                if turn:  # the first warms up
                    times[name].append(1e6 * (time.perf_counter() - start) / max(1, repeats // 15))
    result = {name: statistics.median(found) for name, found in times.items()}
    expected = windowed_attention(q, k, v, windows, sinks).transpose(1, 2)
    if not torch.allclose(out, expected, atol=1e-5):
        raise RuntimeError("the kernel's raw call and the operator disagree")
    return result | {"over_extern_c": result["windowed_attention"] - result["extern_c"]}
