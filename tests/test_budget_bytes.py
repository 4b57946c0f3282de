"""Budgets in bytes of the KV cache, in Python and on the command line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from aah_hf import AAHConfig, AAHError, coverage, patch_model
from aah_hf.calibration import Budget, CalibrationConfig, allocate
from aah_hf.cli.loading import parse_kv_budget
from aah_hf.coverage import measure
from aah_hf.errors import CalibrationError

CANDIDATES = (2, 4, 8, 16, None)


@given(st.integers(0, 2**16), st.sampled_from(["kv_head", "layer"]), st.integers(40, 400), st.integers(10, 100))
def test_bytes_at_a_length_are_never_exceeded_and_well_used(seed, granularity, kilobytes, at):
    errors = np.sort(np.random.default_rng(seed).random((3, 4, len(CANDIDATES))), axis=-1)[..., ::-1]
    budget, key_bytes = Budget.kv_bytes(kilobytes * 100, at=at), 2 * 8 * 4
    settings = {"seq_len": 32, "sink_tokens": 2, "kv_heads": 2, "granularity": granularity, "key_bytes": key_bytes}

    def size(windows):
        return measure(windows, at, kv_heads=2, sink_tokens=2, head_dim=8, element_bytes=4).kv_bytes

    least = size(((2,) * 4,) * 3)
    if least > budget.value:
        with pytest.raises(CalibrationError, match=f"it is {least} bytes at {at} tokens"):
            allocate(errors, CANDIDATES, budget, **settings)
        return
    windows = allocate(errors, CANDIDATES, budget, **settings)
    assert size(windows) <= budget.value
    # as good as the share of the cache that these bytes are
    share = Budget.kv(min(1.0, budget.value / size(((None,) * 4,) * 3)))
    if at == 32:
        assert windows == allocate(errors, CANDIDATES, share, **settings)


def test_a_window_of_the_calibrated_length_is_not_full_attention_at_a_longer_one():
    errors = np.zeros((1, 2, 2))
    errors[..., 0] = 1.0
    windows = allocate(
        errors, (16, 32), Budget.kv_bytes(33 * 64 * 2, at=100), seq_len=32, sink_tokens=2, kv_heads=2, key_bytes=64
    )
    assert windows == ((32, 32),)


def test_patching_with_a_size_gives_a_cache_of_that_size():
    model = tiny_model()
    ids = [i.reshape(1, -1) for i in torch.randint(3, 97, (6, 64)).unbind()]
    limit = int(0.4 * coverage(model, 200).kv_bytes)
    patch_model(
        model,
        ids,
        calibration=CalibrationConfig(
            budget=Budget.kv_bytes(limit, at=200), candidates=(4, 8, 16, 32), seq_len=64, num_sequences=2, refine=0
        ),
    )
    assert 0.5 * limit < coverage(model, 200).kv_bytes <= limit
    assert AAHConfig.from_model(model).provenance["budget"] == {"kind": "kv_bytes", "value": limit, "at": 200}


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("0.35", Budget.kv(0.35)),
        ("512MB", Budget.kv_bytes(512_000_000)),
        ("1.5 GiB", Budget.kv_bytes(3 * 2**29)),
        ("700 b", Budget.kv_bytes(700)),
    ],
)
def test_sizes_on_the_command_line(text, budget):
    assert parse_kv_budget(text, None) == budget


@pytest.mark.parametrize("text", ["", "MB", "half", "-1MB", "5XB", "0", "1.5", "0MB", "nan"])
def test_nonsense_on_the_command_line(text):
    with pytest.raises(AAHError):
        parse_kv_budget(text, None)


def test_budgets_of_bytes_are_checked():
    for bad in (lambda: Budget.kv_bytes(0), lambda: Budget.kv_bytes(1.5), lambda: Budget.kv_bytes(10, at=0)):
        with pytest.raises(CalibrationError):
            bad()
    with pytest.raises(CalibrationError, match="refers to `seq_len`"):
        Budget("kv", 0.5, 100)
    with pytest.raises(CalibrationError, match="granularity 'kv_head' or 'layer'"):
        CalibrationConfig(budget=Budget.kv_bytes(1000), granularity="head")
    assert str(Budget.kv_bytes(1000, at=8)) == "1000 KV bytes at 8 tokens"
