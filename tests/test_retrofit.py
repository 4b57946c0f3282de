"""The paper's retrofit of a pretrained model: soft windows train the controllers, the model stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import HEADS, LAYERS, random_ids, tiny_model

import aah_hf
from aah_hf import AAHConfig, CalibrationError
from aah_hf.calibration.run import RegimeRun
from aah_hf.calibration.taps import products
from aah_hf.training import Controllers, RetrofitConfig, load_controllers, regime, retrofit
from aah_hf.training.retrofit import Mixture, frozen, train_controllers

LENGTH = 32


def settings(**changes) -> RetrofitConfig:
    return RetrofitConfig(**{"steps": 12, "seq_len": LENGTH, "sink_tokens": 0, "learning_rate": 1e-2} | changes)


def test_only_controllers_are_trained_and_the_model_comes_back_patched(tmp_path):
    model = tiny_model("qwen3").train()
    before = {key: x.clone() for key, x in model.state_dict().items()}
    assert retrofit(model, random_ids(4, LENGTH), settings()) is model
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    plan = AAHConfig.from_model(model)
    assert plan.provenance["retrofit"]["steps"] == 12 and plan.groups is not None
    model.save_pretrained(tmp_path)
    controllers = load_controllers(tmp_path)
    untrained = Controllers.untrained(controllers.regime, LAYERS).state_dict()
    for layer in range(LAYERS):  # with an even number of groups the sibling scorer decides alone
        own = {key: x for key, x in controllers.state_dict().items() if key.startswith(f"{layer}.")}
        assert any(not torch.equal(x, untrained[key]) for key, x in own.items())
    again = type(model).from_pretrained(tmp_path)
    ids = random_ids(1, LENGTH)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_a_price_on_coverage_shortens_windows_and_without_it_the_loss_alone_decides():
    def acr(weight):
        model = retrofit(tiny_model("qwen3"), random_ids(4, LENGTH), settings(coverage_weight=weight, steps=40))
        return aah_hf.coverage(model, LENGTH).acr, AAHConfig.from_model(model).provenance["retrofit"]["soft_acr"]

    (free, _), (priced, (first, last)) = acr(0.0), acr(5.0)
    assert priced == 0.125 <= free, "every head has the shortest of four windows"
    assert last < first


@pytest.mark.parametrize("name", ["shallow_freeze", "full_adaptive", "grouping_off", "fixed_random_grouping"])
def test_a_mixture_that_is_certain_is_the_plan_it_is_certain_of(name):
    """Logits that are one-hot leave one window: the output must be that of the model patched with it."""
    model, ids = tiny_model("qwen3"), random_ids(1, LENGTH)
    config = regime(name, seq_len=LENGTH, warmup_steps=0)
    controllers = Controllers.untrained(config, LAYERS)
    for controller in controllers:
        for scorer in filter(None, (controller.group, controller.sibling)):
            torch.nn.init.zeros_(scorer.mlp[2].weight)
            with torch.no_grad():
                scorer.mlp[2].bias.copy_(200.0 * (torch.arange(len(scorer.mlp[2].bias)) % 4 == 1))
    run = RegimeRun(config, LAYERS, HEADS, controllers)
    run.begin()
    with torch.no_grad(), products(model, Mixture(run, 1.0).products()):
        mixed = model(ids).logits
    run.end()
    aah_hf.patch_model(model, config=AAHConfig.uniform(model, LENGTH // 4, sink_tokens=0))
    torch.testing.assert_close(mixed, model(ids).logits)
    assert {w for layer in run.windows for w in layer} == {LENGTH // 4}


def test_gradients_of_the_controllers_are_those_of_finite_differences():
    """In float64, along a random direction of all controller weights of all layers at once.

    Measured between decisions: features are data to the controllers, no gradient passes through them.
    """
    model, ids = tiny_model("qwen3").double(), random_ids(1, LENGTH)
    config = regime("full_adaptive", seq_len=LENGTH, warmup_steps=0)
    controllers = Controllers.untrained(config, LAYERS).double()
    decided = RegimeRun(config, LAYERS, HEADS, controllers)
    decided.begin()
    with torch.no_grad(), products(model, Mixture(decided, 1.0).products()):
        model(ids)
    decided.end()

    def loss(controllers):
        run = RegimeRun(config, LAYERS, HEADS, controllers)
        run.states, run.steps = list(decided.states), list(decided.steps)
        run.begin()
        with products(model, Mixture(run, 1.0).products()):
            logits = model(input_ids=ids, use_cache=False).logits
        run.end()
        return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])  # transformers' own is in float32

    controllers.requires_grad_(True)
    with frozen(model):
        loss(controllers).backward()
        assert all(p.grad is None for p in model.parameters())
        draw = torch.Generator().manual_seed(0)
        direction = [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in controllers.parameters()]
        slope = sum((p.grad * d).sum() for p, d in zip(controllers.parameters(), direction) if p.grad is not None)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, d in zip(controllers.parameters(), direction):
                    p.add_(sign * 1e-4 * d)
                values.append(loss(controllers))
                for p, d in zip(controllers.parameters(), direction):
                    p.sub_(sign * 1e-4 * d)
    numeric = (values[0] - values[1]) / 2e-4
    assert abs(float(slope)) > 1e-5, "there is something to compare"
    torch.testing.assert_close(slope, numeric, rtol=1e-3, atol=1e-8)  # its norms round to float32


def test_warm_up_steps_run_full_attention_and_train_nothing():
    config = settings(steps=3, regime=regime("shallow_freeze", seq_len=LENGTH, warmup_steps=2))
    run = RegimeRun(config.rules, LAYERS, HEADS)
    before = {key: x.clone() for key, x in run.controllers.state_dict().items()}
    losses, acr = train_controllers(tiny_model("qwen3"), list(random_ids(3, LENGTH)), run, config)
    assert len(losses) == len(acr) == 1
    assert any(not torch.equal(x, before[key]) for key, x in run.controllers.state_dict().items())


def test_training_goes_on_from_given_controllers():
    config = settings()
    trained = Controllers.untrained(config.rules, LAYERS)
    retrofit(tiny_model("qwen3"), random_ids(4, LENGTH), config, controllers=trained)
    model = tiny_model("qwen3")
    retrofit(model, random_ids(4, LENGTH), config, controllers=trained)
    assert model.__dict__["aah_controllers"] is trained
    assert all(np.isfinite(x.numpy()).all() for x in trained.state_dict().values())


def test_a_retrofit_that_fails_leaves_the_model_as_it_came():
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(CalibrationError, match="loss of step"):
        retrofit(model, random_ids(4, LENGTH), settings())
    assert not aah_hf.is_patched(model) and model.config._attn_implementation == "sdpa"
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: settings(regime="full_attention"), "no controller to train"),
        (lambda: settings(regime="shallow"), "choose one of"),
        (lambda: settings(steps=1), "more than the 1 of warm-up"),
        (lambda: settings(learning_rate=0), "learning_rate is 0"),
        (lambda: settings(temperature=float("nan")), "temperature"),
        (lambda: settings(coverage_weight=-1), "coverage_weight"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(CalibrationError, match=message):
        make()
