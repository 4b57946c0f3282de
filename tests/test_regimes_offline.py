"""The paper's regimes on calibration data: `CalibrationConfig(objective="paper", regime=...)`."""

from __future__ import annotations

import shutil

import pytest
import torch
from conftest import HEADS, LAYERS, random_ids, tiny_model
from reload import other_process
from test_golden import attention, every, golden_folder, tensors, trace_config

import aah_hf
from aah_hf import AAHConfig, Budget, CalibrationConfig, CalibrationError
from aah_hf.calibration import REGIMES, RegimeConfig, calibrate, paper_windows, regime
from aah_hf.calibration.controller import Controller
from aah_hf.calibration.grouping import group_of
from aah_hf.calibration.run import RegimeRun
from aah_hf.calibration.weights import Controllers, load_controllers
from aah_hf.demo import documentation

LENGTH = 64


def paper(name, **changes) -> CalibrationConfig:
    settings = {"seq_len": LENGTH, "recall_fraction": 0.0, "holdout_sequences": 0} | changes
    return CalibrationConfig(objective="paper", regime=name, **settings)


@every("traces")
def test_a_run_over_layers_reproduces_the_papers_traces(case):
    """Windows, groups and paths of the paper's implementation through the driver that all three uses share."""
    name, recorded = case["regime"], tensors("traces", golden_folder())
    config = trace_config(case)
    controllers = None
    if config.windows == "controller":
        controllers = Controllers([Controller.from_tensors(recorded, f"{name}.")], config)
    run = RegimeRun(config, layers=1, query_heads=recorded[f"{name}.0.q"].shape[1], controllers=controllers)
    for index, expected in enumerate(case["steps"]):
        q, k, v = (recorded[f"{name}.{index}.{x}"] for x in "qkv")
        run.begin()
        run.attend(0, q, k, v, lambda windows, q=q, k=k, v=v: attention(q, k, v, [w or 32 for w in windows]))
        run.end()
        step = run.steps[0]
        assert [32 if w is None else min(w, 32) for w in step.windows] == expected["windows"]
        assert (group_of(step.groups) if step.groups else []) == expected["group_of_head"]
        assert step.path == expected["path"]


@every("traces")
def test_processes_that_follow_run_the_windows_and_groups_of_the_one_that_decides(case):
    name, recorded = case["regime"], tensors("traces", golden_folder())
    config, heads = trace_config(case), recorded[f"{case['regime']}.0.q"].shape[1]
    controllers = None
    if config.windows == "controller":
        controllers = Controllers([Controller.from_tensors(recorded, f"{name}.")], config)
    leader, follower = (RegimeRun(config, 1, heads, controllers) for _ in range(2))
    for index in range(len(case["steps"])):
        q, k, v = (recorded[f"{name}.{index}.{x}"] for x in "qkv")
        leader.begin()
        follower.begin()
        leader.attend(0, q, k, v, lambda windows, q=q, k=k, v=v: attention(q, k, v, [w or 32 for w in windows]))
        if follower.pending:
            follower.follow(0, leader.choice(0), q.shape[2])
        leader.end()
        follower.end()
        assert follower.windows == leader.windows, index
        assert follower.decided == leader.decided
        mine, theirs = (run.steps[0].groups for run in (leader, follower))
        assert (group_of(mine) if mine else []) == (group_of(theirs) if theirs else [])


@pytest.mark.parametrize("name", REGIMES)
def test_every_regime_makes_a_plan_and_leaves_the_model_alone(name):
    model = tiny_model("qwen3")
    before = {key: x.clone() for key, x in model.state_dict().items()}
    plan = calibrate(model, random_ids(4, LENGTH), calibration=paper(name))
    again = calibrate(model, random_ids(4, LENGTH), calibration=paper(name))
    assert (plan.windows, plan.groups) == (again.windows, again.groups)
    assert not aah_hf.is_patched(model)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    allowed = {None, *paper_windows(LENGTH)[:-1]}  # a window of the whole sequence is full attention
    assert {w for layer in plan.windows for w in layer} <= allowed
    assert plan.provenance["regime"]["name"] == name and plan.calibrated_at == LENGTH
    grouped = name not in ("full_attention", "grouping_off", "fixed_window", "random_uniform")
    assert (plan.groups is not None) == grouped
    if name in ("full_attention", "control_off"):
        assert plan.windows == ((None,) * HEADS,) * LAYERS
    if name == "fixed_window":
        assert plan.windows == ((LENGTH // 4,) * HEADS,) * LAYERS
    if name == "shallow_freeze":
        for windows, groups in zip(plan.windows, plan.groups):
            assert all(len({w for w, g in zip(windows, groups) if g == group}) == 1 for group in set(groups))


def test_the_seed_decides_what_an_untrained_controller_chooses():
    plans = {
        calibrate(tiny_model(), random_ids(4, LENGTH), calibration=paper("full_adaptive", seed=s)) for s in range(8)
    }
    assert len(plans) > 1


def test_shuffling_keeps_the_windows_of_a_layer():
    shuffled = calibrate(tiny_model(), random_ids(4, LENGTH), calibration=paper("shuffle_post_select"))
    chosen = calibrate(tiny_model(), random_ids(4, LENGTH), calibration=paper("shallow_freeze"))
    first = [sorted(layer, key=str) for layer in (shuffled.windows[0], chosen.windows[0])]
    assert first[0] == first[1], "layer 0 sees the same activations under both"


def test_a_configuration_of_ones_own_is_taken_as_it_is():
    rules = regime("full_adaptive", candidate_windows=(4, 12), control_interval=2, warmup_steps=0)
    plan = calibrate(tiny_model(), random_ids(4, LENGTH), calibration=paper(rules))
    assert {w for layer in plan.windows for w in layer} <= {4, 12}
    assert RegimeConfig.from_dict(plan.provenance["regime"]) == rules


def test_default_candidates_are_the_papers():
    assert paper_windows(4096) == (512, 1024, 2048, 4096)
    assert regime("fixed_window", seq_len=4096).fixed_window == 1024


def test_short_sequences_need_no_candidates_of_the_other_objective():
    plan = calibrate(tiny_model(), random_ids(4, 16), calibration=paper("full_adaptive", seq_len=16))
    assert {w for layer in plan.windows for w in layer} <= {2, 4, 8, None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paper("shalow_freeze"), "choose one of full_attention, grouping_off"),
        (lambda: CalibrationConfig(objective="papre"), "choose one of output_error, paper"),
        (lambda: CalibrationConfig(regime="full_adaptive"), "belongs to objective='paper'"),
        (lambda: paper("full_adaptive", budget=Budget.causal(0.4)), "budget has no effect"),
        (lambda: paper("full_adaptive", candidates=(8, 16)), "candidates has no effect"),
        (lambda: regime("nothing"), "choose one of full_attention"),
        (lambda: regime("full_adaptive", windwos="full"), "no such setting"),
        (lambda: regime("full_adaptive", max_depth="deep"), "wrong type"),
        (lambda: regime("full_adaptive", control_interval="5"), "expected an integer"),
        (lambda: regime("full_adaptive", candidate_windows=(16, 8)), "ascending"),
        (lambda: regime("full_adaptive", seq_len=4), "at least 8 tokens"),
        (lambda: RegimeConfig.from_dict([1]), "must be a JSON object"),
        (lambda: RegimeConfig.from_dict({"groups": "freeze", "extra": 1}), "extra: no such setting"),
    ],
)
def test_wrong_settings_are_refused_with_the_choices(make, message):
    with pytest.raises(CalibrationError, match=message):
        make()


def test_patching_writes_controllers_beside_the_model_and_the_model_loads_without(tmp_path):
    model = aah_hf.patch_model(tiny_model("qwen3"), random_ids(4, LENGTH), calibration=paper("shallow_freeze"))
    keys = set(model.state_dict())
    assert keys == set(tiny_model("qwen3").state_dict()), "controllers are no part of the state dict"
    model.save_pretrained(tmp_path)
    controllers = load_controllers(tmp_path)
    assert len(controllers) == LAYERS and controllers.regime.name == "shallow_freeze"
    expected = Controllers.untrained(controllers.regime, LAYERS)
    assert all(torch.equal(x, expected.state_dict()[key]) for key, x in controllers.state_dict().items())
    (tmp_path / "aah_controller.safetensors").unlink()
    again = type(model).from_pretrained(tmp_path)
    assert AAHConfig.from_model(again) == AAHConfig.from_model(model)


def test_controllers_of_an_earlier_plan_are_dropped(tmp_path):
    model = aah_hf.patch_model(tiny_model(), random_ids(4, LENGTH), calibration=paper("shallow_freeze"))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "aah_controller.safetensors").exists()
    aah_hf.patch_model(model, config=AAHConfig.uniform(model, 8))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "aah_controller.safetensors").exists()


@pytest.mark.slow
@pytest.mark.smollm2
def test_every_regime_on_a_real_model_survives_a_checkpoint(smollm2, tmp_path):
    model, tokenizer = smollm2
    text, _ = documentation()
    ids = tokenizer("An attention head looks back a certain way. " * 20, return_tensors="pt").input_ids[:, :160]
    acr = {}
    with other_process() as reader:
        for name in REGIMES:
            aah_hf.patch_model(model, text, calibration=paper(name, seq_len=256, num_sequences=3), tokenizer=tokenizer)
            try:
                acr[name] = aah_hf.coverage(model, 256).acr
                folder = tmp_path / name
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                with torch.no_grad():
                    expected = model(ids).logits
                assert torch.equal(reader.logits(folder, ids), expected), name
            finally:
                aah_hf.unpatch_model(model)
            shutil.rmtree(folder)
    assert acr["full_attention"] == acr["control_off"] == 1.0 and acr["fixed_window"] == 0.25
    assert all(0.125 <= value <= 1 for value in acr.values())
