"""Benchmarks behind `aah bench`: interleaved repeats in one process, medians as ratios."""

from .ops import DIRECTIONS, DTYPES, MIXES, PEERS, SHAPES, Row, bench_ops
from .overhead import call_overhead
from .prefill import PrefillRow, bench_prefill

__all__ = [
    "DIRECTIONS",
    "DTYPES",
    "MIXES",
    "PEERS",
    "SHAPES",
    "PrefillRow",
    "Row",
    "bench_ops",
    "bench_prefill",
    "call_overhead",
]
