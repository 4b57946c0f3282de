"""The generation benchmark on a tiny checkpoint: its figures are of the runs it says they are."""

from __future__ import annotations

import json

import pytest
from conftest import mixed_plan, tiny_model

from aah_hf import AAHError, PlanError, coverage, patch_model
from aah_hf.bench import bench_generate, bench_prefill


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
        assert row.kv_coverage == coverage(model, 44).kv
        assert all(0 < share < 1 for share in row.attention_share.values())
        for peer in ("full", "aah"):
            step = row.batch / row.decode[peer]
            assert row.attention[peer] / step == pytest.approx(row.attention_share[peer])  # of the one repeat
        assert row.to_dict()["attention_ratio"] == row.attention["aah"] / row.attention["full"]
        assert row.cache_bytes["full"] == row.batch * 44 * 3 * 2 * 2 * 8 * 4
        json.dumps(row.to_dict())
    assert stages[-1] == ("generation", 2, 2)
    assert model.config._attn_implementation == "aah"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_families_whose_full_attention_is_their_own_eager_one_are_timed_too(family):
    small = {"gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}.get(family, {})
    model = patch_model(tiny_model(family, **small), config=mixed_plan())
    (row,) = bench_generate(model, batches=(1,), contexts=(20,), new_tokens=2, repeats=1)
    assert min(row.attention.values()) > 0
    (prefill,) = bench_prefill(model, seq_lens=(32,), repeats=1)
    assert 0 < prefill.attention_share < 1


def test_refuses_what_cannot_be_timed():
    with pytest.raises(PlanError, match="carries no plan"):
        next(bench_generate(tiny_model()))
    model = patch_model(tiny_model(), config=mixed_plan())
    with pytest.raises(AAHError, match="at least 1"):
        next(bench_generate(model, repeats=0))
    with pytest.raises(AAHError, match="more than the model's 4096 positions"):
        next(bench_generate(model, contexts=(4096,), new_tokens=1))
