"""Benchmarks behind `aah bench`: interleaved repeats in one process, medians as ratios."""

from .generate import GenerateRow, bench_generate
from .ops import DIRECTIONS, DTYPES, MIXES, PEERS, SHAPES, Row, bench_ops
from .overhead import call_overhead
from .prefill import PrefillRow, bench_prefill

__all__ = [
    "DIRECTIONS",
    "DTYPES",
    "MIXES",
    "PEERS",
    "SHAPES",
    "GenerateRow",
    "PrefillRow",
    "Row",
    "bench_generate",
    "bench_ops",
    "bench_prefill",
    "call_overhead",
]
