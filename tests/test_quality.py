"""Paired quality against the definitions, and the closing check of a calibration."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from conftest import mixed_plan, random_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import aah_hf
from aah_hf import AAHError, CalibrationConfig
from aah_hf.calibration import Budget, calibrate_and_check
from aah_hf.evaluation import Limits, Quality, compare, concerns, evaluate, last_logits
from aah_hf.evaluation.quality import bootstrap_interval, first_scored

VOCAB, LENGTH = 23, 300  # more positions than are scored at one time


def tables(count: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(count, LENGTH, VOCAB, generator=torch.Generator().manual_seed(seed))


def looked_up(sequences, logits):
    return lambda ids: logits[[torch.equal(ids[0], s) for s in sequences].index(True)][None]


def test_a_plan_of_full_windows_equals_the_full_attention_that_it_is_compared_with(family_model):
    sequences = list(random_ids(2, 64))
    kl = []
    for window in (None, 3):
        aah_hf.patch_model(family_model, config=aah_hf.AAHConfig.uniform(family_model, window, sink_tokens=0))
        kl.append(evaluate(family_model, sequences).text.kl)
        assert family_model.config._attn_implementation == "aah"
    assert abs(kl[0]) < 1e-7 and kl[1] > 1e-3  # float32 rounding


@pytest.fixture
def pair():
    sequences = list(torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(5)))
    base, patched = tables(3, 0), tables(3, 0) + 0.3 * tables(3, 1)
    return sequences, base, patched


@pytest.mark.parametrize("score_from", [0.0, 0.5, 0.9])
def test_figures_follow_their_definitions(pair, score_from):
    sequences, base, patched = pair
    answers = [None, torch.arange(LENGTH) % 7 == 3, torch.arange(LENGTH) > 290]
    quality = compare(
        looked_up(sequences, base),
        looked_up(sequences, patched),
        sequences,
        score_from=score_from,
        answer_masks=answers,
    )

    first = max(1, math.ceil(LENGTH * score_from))
    p, q = base.double().log_softmax(-1)[:, first - 1 : -1], patched.double().log_softmax(-1)[:, first - 1 : -1]
    targets = torch.stack(sequences)[:, first:, None]
    loss, base_loss = -q.gather(2, targets)[..., 0], -p.gather(2, targets)[..., 0]
    increases = (loss.mean(1) - base_loss.mean(1)).exp() - 1
    asked = torch.stack([torch.zeros(LENGTH, dtype=torch.bool) if m is None else m for m in answers])[:, first:]
    assert quality.base_ppl == pytest.approx(base_loss.mean().exp().item(), rel=1e-5)
    assert quality.ppl == pytest.approx(loss.mean().exp().item(), rel=1e-5)
    assert quality.increases == pytest.approx(increases.tolist(), rel=1e-4)
    assert quality.increase == pytest.approx(increases.mean().item(), rel=1e-4)
    assert quality.interval[0] <= quality.increase <= quality.interval[1]
    assert quality.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert quality.recall_nll == pytest.approx(loss[asked].mean().item(), rel=1e-5)
    assert quality.base_recall_nll == pytest.approx(base_loss[asked].mean().item(), rel=1e-5)
    assert quality.tokens == 3 * (LENGTH - first)
    json.dumps(quality.to_dict(), allow_nan=False)


def test_a_model_against_itself_loses_nothing(pair):
    sequences, base, _ = pair
    quality = compare(looked_up(sequences, base), looked_up(sequences, base), sequences)
    assert quality.increase == quality.kl == 0 and quality.interval == (0, 0) and quality.ppl == quality.base_ppl
    assert quality.recall_nll is quality.base_recall_nll is None


def test_logits_of_the_last_positions_are_enough(pair):
    sequences, base, patched = pair

    def tail(table):
        return lambda ids: looked_up(sequences, table)(ids)[:, -(LENGTH - first_scored(LENGTH, 0.5) + 1) :]

    whole = compare(looked_up(sequences, base), looked_up(sequences, patched), sequences)
    part = compare(tail(base), tail(patched), sequences)
    assert whole.increases == part.increases and whole.kl == part.kl


def test_the_two_models_take_turns(pair):
    sequences, base, _ = pair
    calls = []

    def named(name):
        def run(ids):
            calls.append(name)
            return looked_up(sequences, base)(ids)

        return run

    compare(named("base"), named("patched"), sequences)
    assert calls == ["base", "patched", "patched", "base", "base", "patched"]


def test_windows_cost_perplexity_and_a_full_plan_does_not():
    model, sequences = tiny_model(), random_ids(3, 100)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3  # or a random model's predictions would not depend on attention
    base = last_logits(model)

    def planned(plan):
        def run(ids):
            aah_hf.patch_model(model, config=plan)
            try:
                return base(ids)
            finally:
                aah_hf.unpatch_model(model)

        return run

    full = compare(base, planned(aah_hf.AAHConfig.uniform(model, None)), sequences)
    short = compare(base, planned(mixed_plan()), sequences)
    assert full.kl == 0 and short.kl > 1e-4
    assert full.seconds > 0 and full.base_seconds > 0


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12), st.integers(0, 5))
def test_the_interval_is_of_the_mean_and_reproducible(values, seed):
    values = np.array(values)
    low, high = bootstrap_interval(values, seed)
    assert values.min() - 1e-9 <= low <= high <= values.max() + 1e-9
    assert (low, high) == bootstrap_interval(values, seed)


def test_the_interval_narrows_like_a_standard_error():
    draw = np.random.default_rng(0)
    values = draw.normal(0.02, 0.01, 64)
    low, high = bootstrap_interval(values)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 8, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": []}, "0 sequences"),
        ({"sequences": [torch.zeros(1, dtype=torch.long)]}, "nothing to score"),
        ({"answer_masks": [None]}, "1 answer masks"),
        ({"score_from": 1.0}, "score_from"),
        ({"patched": lambda ids: torch.zeros(1, 5, VOCAB)}, "patched model returned"),
        ({"base": lambda ids: torch.zeros(LENGTH, VOCAB)}, "base model returned"),
    ],
)
def test_what_does_not_fit_is_refused(pair, arguments, message):
    sequences, base, patched = pair
    given_arguments = {
        "base": looked_up(sequences, base),
        "patched": looked_up(sequences, patched),
        "sequences": sequences,
        **arguments,
    }
    with pytest.raises(AAHError, match=message):
        compare(**given_arguments)


def quality_of(**changes) -> Quality:
    fine = {
        "base_ppl": 10.0,
        "ppl": 10.1,
        "increases": (0.01,),
        "increase": 0.01,
        "interval": (0.01, 0.01),
        "kl": 0.01,
        "base_recall_nll": 0.3,
        "recall_nll": 0.4,
        "tokens": 1024,
        "base_seconds": 1.0,
        "seconds": 1.0,
    }
    return Quality(**{**fine, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"increase": 0.2}, "perplexity rises by 20"), ({"kl": 0.3}, "drift"), ({"recall_nll": 1.5}, "1.50 nats a token")],
)
def test_each_kind_of_loss_is_a_concern_of_its_own(changes, message):
    assert concerns(quality_of()) == []
    (sentence,) = concerns(quality_of(**changes))
    assert message in sentence
    assert concerns(quality_of(**changes), Limits(increase=1, kl=1, recall=2)) == []
    assert concerns(quality_of(base_recall_nll=None, recall_nll=None)) == []


SETTINGS = {"seq_len": 96, "candidates": (4, 16), "num_sequences": 2, "recall_fraction": 0, "granularity": "kv_head"}


def test_the_check_measures_the_patched_model_on_held_out_text_without_patching():
    model, data = tiny_model(), random_ids(4, 96)
    plan = calibrate_and_check(model, data, calibration=CalibrationConfig(**SETTINGS, holdout_sequences=1))
    assert not aah_hf.is_patched(model) and model.config._attn_implementation == "sdpa"

    base = last_logits(model)

    def patched(ids):
        aah_hf.patch_model(model, config=plan)
        return base(ids)

    expected = compare(base, patched, [data[2]])
    found = plan.provenance["check"]
    assert found["kl"] == pytest.approx(expected.kl, rel=1e-3, abs=1e-9) and found["kl"] > 0
    assert found["tokens"] == 48 and "increases" not in found


def test_a_poor_plan_warns_and_names_the_budget():
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4
    config = CalibrationConfig(**{**SETTINGS, "candidates": (1,), "sink_tokens": 0}, budget=Budget.causal(0.03))
    with pytest.warns(UserWarning, match=r"poor on held-out text.*causal coverage 0.03"):
        calibrate_and_check(model, random_ids(4, 96), calibration=config)


def test_without_held_out_sequences_nothing_is_checked():
    plan = calibrate_and_check(
        tiny_model(), random_ids(4, 96), calibration=CalibrationConfig(**SETTINGS, holdout_sequences=0)
    )
    assert "check" not in plan.provenance
