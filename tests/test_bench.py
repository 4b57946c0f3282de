"""The benchmarks run, compare like with like and say what they measured; no test looks at a time's size."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import tiny_model

from aah_hf import AAHConfig, AAHError, patch_model
from aah_hf.bench import bench_ops, bench_prefill, call_overhead
from aah_hf.bench.memory import peak_bytes
from aah_hf.ops import native


def test_ops_rows_name_shape_windows_and_coverage():
    rows = list(bench_ops(seq_lens=(128,), mixes=("full", "256"), peers=("sdpa_causal", "eager", "aah"), repeats=2))
    assert [(r.windows, r.direction) for r in rows] == [
        (m, d) for m in ("full", "256") for d in ("forward", "backward")
    ]
    for row in rows:
        assert row.coverage == 1.0  # 256 keys cover 128 tokens
        assert "sdpa_causal" in row.milliseconds and all(ms > 0 for ms in row.milliseconds.values())
        assert row.to_dict()["aah_ms"] == row.milliseconds["aah"]


@pytest.mark.parametrize("bad", [{"shapes": ("9x64",)}, {"mixes": ("none",)}, {"dtypes": ("int8",)}, {"repeats": 0}])
def test_ops_refuse_what_they_do_not_know(bad):
    with pytest.raises(AAHError):
        next(iter(bench_ops(**bad)))


def test_prefill_reports_share_bound_and_speedup():
    model = patch_model(tiny_model("llama"), config=AAHConfig.uniform(tiny_model("llama"), 16, sink_tokens=0))
    (row,) = bench_prefill(model, seq_lens=(64,), repeats=2)
    assert 0 < row.attention_share < 1 and row.bound > 1 and row.speedup > 0
    assert row.bound == pytest.approx(1 / (1 - row.attention_share * (1 - row.coverage)))
    assert model.config._attn_implementation == "aah"


def test_prefill_leaves_the_attention_functions_as_they_were():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["aah"], ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(AAHError, match="no windows"):
        next(bench_prefill(tiny_model("llama")))
    model = patch_model(tiny_model("llama"), config=AAHConfig.uniform(tiny_model("llama"), 16))
    model.lm_head.forward = lambda *a: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(bench_prefill(model, seq_lens=(8,), repeats=1))
    assert before == (ALL_ATTENTION_FUNCTIONS["aah"], ALL_ATTENTION_FUNCTIONS["sdpa"])


@pytest.mark.skipif(not native.available(), reason="needs the native operator")
def test_overhead_goes_down_layer_by_layer():
    found = call_overhead(repeats=150)
    assert set(found) == {"windowed_attention", "native.forward", "torch.ops.aah.fwd", "extern_c", "over_extern_c"}
    assert all(math.isfinite(us) for us in found.values())


def test_peak_memory_counts_what_a_call_takes():
    n = 64 * 2**20
    peak = peak_bytes(lambda: torch.ones(n // 4).amax())
    if peak is None:
        pytest.skip("this system keeps no high-water mark that can be reset")
    assert 0.8 * n < peak < 1.8 * n


@pytest.mark.skipif(not native.available(), reason="needs the native operator")
def test_the_operator_takes_no_more_memory_than_sdpa_and_its_output():
    (row,) = bench_ops(
        seq_lens=(2048,), mixes=("128-full",), directions=("forward",), peers=("sdpa_causal", "aah"), repeats=1
    )
    if not row.peak_mib:
        pytest.skip("this system keeps no high-water mark that can be reset")
    output = 9 * 2048 * 64 * 4 / 2**20
    assert row.peak_mib["aah"] <= row.peak_mib["sdpa_causal"] + output
