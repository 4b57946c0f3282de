"""The generation benchmark on a tiny checkpoint: its figures are of the runs it says they are."""

from __future__ import annotations

import json

import pytest
from conftest import mixed_plan, tiny_model

from aah_hf import AAHError, PlanError, coverage, patch_model
from aah_hf.bench import bench_generate


def test_reports_speed_and_the_bytes_of_both_caches():
    model = patch_model(tiny_model(), config=mixed_plan())
    stages = []
    rows = list(
        bench_generate(
            model,
            batches=(1, 2),
            contexts=(40,),
            new_tokens=4,
            repeats=1,
            progress=lambda *stage: stages.append(stage),
        )
    )
    assert [(row.batch, row.context) for row in rows] == [(1, 40), (2, 40)]
    for row in rows:
        assert min(*row.prefill.values(), *row.decode.values()) > 0
        assert row.stored_bytes == row.batch * coverage(model, 44).kv_bytes
        assert row.stored_bytes <= row.cache_bytes["aah"] <= 1.25 * row.stored_bytes
        assert row.cache_bytes["full"] == row.batch * 44 * 3 * 2 * 2 * 8 * 4
        json.dumps(row.to_dict())
    assert stages[-1] == ("generation", 2, 2)
    assert model.config._attn_implementation == "aah"


def test_refuses_what_cannot_be_timed():
    with pytest.raises(PlanError, match="carries no plan"):
        next(bench_generate(tiny_model()))
    model = patch_model(tiny_model(), config=mixed_plan())
    with pytest.raises(AAHError, match="at least 1"):
        next(bench_generate(model, repeats=0))
    with pytest.raises(AAHError, match="more than the model's 4096 positions"):
        next(bench_generate(model, contexts=(4096,), new_tokens=1))
