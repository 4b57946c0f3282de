"""AAHConfig: an immutable, bounded value."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from conftest import HEADS, LAYERS, mixed_plan, tiny_model

from aah_hf import AAHConfig, PlanError, coverage
from aah_hf.plan import MAX_WINDOW, PLAN_VERSION, native_windows


def test_round_trip_through_json_pickle_and_deepcopy():
    plan = AAHConfig(((1, None), (7, 9)), 3, groups=((0, 1), (0, 0)), provenance={"seq_len": 64, "nested": {"a": [1]}})
    assert AAHConfig.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)
    assert plan.calibrated_at == 64


@pytest.mark.parametrize(
    "windows",
    [(), ((),), ((0,),), ((-1,),), ((1.0,),), (("1",),), ((True,),), "ab", ((1,), "ab"), None, 5, ((MAX_WINDOW + 1,),)],
)
def test_bad_windows_are_refused(windows):
    with pytest.raises(PlanError, match="windows"):
        AAHConfig(windows)


@pytest.mark.parametrize("sinks", [-1, 2.0, None, True, 10**9])
def test_bad_sink_tokens_are_refused(sinks):
    with pytest.raises(PlanError, match="sink_tokens"):
        AAHConfig(((1,),), sinks)


@pytest.mark.parametrize("groups", [((0,),), ((0, -1),), ((0, "a"),), 3, (0, 1)])
def test_bad_groups_are_refused(groups):
    with pytest.raises(PlanError, match="groups"):
        AAHConfig(((1, 2),), groups=groups)


@pytest.mark.parametrize("provenance", [{"a": object()}, {"a": float("nan")}, [1], {"a": "x" * 70_000}])
def test_bad_provenance_is_refused(provenance):
    with pytest.raises(PlanError, match="provenance"):
        AAHConfig(((1,),), provenance=provenance)


def test_a_plan_cannot_be_changed_in_place():
    plan = AAHConfig(((1, 2),), provenance={"a": 1})
    with pytest.raises(AttributeError):
        plan.sink_tokens = 9
    with pytest.raises(TypeError):
        plan.provenance["a"] = 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": PLAN_VERSION + 1}, "pip install -U aah-hf"),
        ({"version": "1"}, "version"),
        ({"version": 0}, "version"),
        ({"windows": None}, "windows"),
        ({"extra": 1}, "unknown entries"),
        ({"sink_tokens": 10**12}, "sink_tokens"),
    ],
)
def test_a_hand_edited_plan_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        AAHConfig.from_dict(AAHConfig(((1,),)).to_dict() | change)


@pytest.mark.parametrize("key", ["version", "windows", "sink_tokens"])
def test_a_truncated_plan_is_refused(key):
    data = AAHConfig(((1,),)).to_dict()
    del data[key]
    with pytest.raises(PlanError, match=key):
        AAHConfig.from_dict(data)


def test_uniform_fits_its_model_and_no_other(llama):
    plan = AAHConfig.uniform(llama, 16)
    assert plan.windows == ((16,) * HEADS,) * LAYERS
    plan.check_fits(llama)
    with pytest.raises(PlanError, match="3 layers and the model has 2"):
        plan.check_fits(tiny_model(num_hidden_layers=2))
    with pytest.raises(PlanError, match="4 windows and the model has 8"):
        plan.check_fits(tiny_model(num_attention_heads=8))


def test_from_model_without_a_plan_says_how_to_make_one(llama):
    with pytest.raises(PlanError, match="patch_model"):
        AAHConfig.from_model(llama)
    assert coverage(llama, 100).causal == 1.0


def test_shuffling_keeps_the_windows():
    plan = mixed_plan()
    mixed = plan.shuffled(3)
    flat = [sorted(str(w) for layer in p.windows for w in layer) for p in (plan, mixed)]
    assert flat[0] == flat[1] and mixed.windows != plan.windows and mixed == plan.shuffled(3)


def test_a_native_sliding_window_counts_in_coverage():
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1)
    assert native_windows(model) == (None, 12, 12)
    assert coverage(model, 24).kv == pytest.approx((24 + 11 + 11) / (3 * 24))
