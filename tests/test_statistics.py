"""Error curves of one streamed pass, against running every window by itself in float64 (method.md §8)."""

from __future__ import annotations

import copy
import json
import threading

import numpy as np
import pytest
import torch
from conftest import FAMILIES, HEADS, mixed_plan, random_ids, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import aah_hf
from aah_hf import Budget, CalibrationConfig, CalibrationError, calibrate
from aah_hf.calibration import output_error_curves
from aah_hf.calibration.rings import window_errors
from aah_hf.calibration.statistics import output_factors
from aah_hf.ops.reference import attention

CANDIDATES = (1, 3, 16, 40, 100, None)
TAPS = {  # model type: (where the residual stream after attention comes by, the norm of the attention output)
    "olmo2": ("mlp", "post_attention_layernorm"),
    "olmo3": ("mlp", "post_attention_layernorm"),
    "glm4": ("post_attention_layernorm", "post_self_attn_layernorm"),
    "gemma2": ("pre_feedforward_layernorm", "post_attention_layernorm"),
    "gemma3_text": ("pre_feedforward_layernorm", "post_attention_layernorm"),
}
LENGTH = 150  # neither a multiple of the block of queries nor shorter than two of them


def captured(model, ids: torch.Tensor) -> list[dict]:
    """q, k, v, native window and residual of every layer, by a way of our own."""
    layers: list[dict] = []

    def capture(module, query, key, value, attention_mask, **kwargs):
        rules = {
            "scale": kwargs["scaling"],
            "limit": kwargs.get("sliding_window"),
            "softcap": kwargs.get("softcap"),
            "sink_logits": kwargs.get("s_aux"),
        }
        layers.append({"q": query, "k": key, "v": value, "rules": rules, "module": module})
        out, _ = attention(query, key, value, [len(ids)] * query.shape[1], **rules)
        return out.to(query.dtype).transpose(1, 2), None

    AttentionInterface.register("test_capture", capture)
    AttentionMaskInterface.register("test_capture", sdpa_mask)
    stock = model.config._attn_implementation
    model.set_attn_implementation("test_capture")
    handles = residual_taps(model, layers)
    with torch.no_grad():
        model(input_ids=ids[None])
    for handle in handles:
        handle.remove()
    model.set_attn_implementation(stock)
    return layers


def residual_taps(model, layers: list[dict]) -> list:
    """Hooks that add to the last of `layers`: the residual x after attention, and the factor of a norm before it."""
    tap, norm_name = TAPS.get(model.config.model_type, ("post_attention_layernorm", None))
    handles = []
    for layer in model.model.layers:
        get = layer.get_submodule
        handles.append(get(tap).register_forward_pre_hook(lambda _m, args: layers[-1].update(x=args[0][0])))
        if norm_name is not None:
            handles.append(
                get(norm_name).register_forward_pre_hook(lambda m, args: layers[-1].update(norm=(m, args[0])))
            )
    return handles


def through_norm(layer: dict) -> tuple[torch.Tensor, torch.Tensor | float]:
    """W_o [heads, head_dim, hidden] with the weights of the norm behind it, and 1 / rms² of each token."""
    heads, dim = layer["q"].shape[1], layer["q"].shape[-1]
    weight = layer["module"].o_proj.weight.detach().double().T.reshape(heads, dim, -1)
    if "norm" not in layer:
        return weight, 1.0
    norm, y = layer["norm"]
    gain = norm.weight.detach().double() + ("Gemma" in type(norm).__name__)
    epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return weight * gain, 1 / (y[0].double().square().mean(-1) + epsilon)


def curves_one_by_one(model, ids: torch.Tensor, sink_tokens: int, candidates=CANDIDATES) -> np.ndarray:
    """[layers, heads, candidates]: every window is run separately, errors go through o_proj's weight."""
    result = []
    for layer in captured(model, ids):
        heads, arguments = layer["q"].shape[1], layer["rules"]
        weight, factor = through_norm(layer)
        full, _ = attention(layer["q"], layer["k"], layer["v"], [len(ids)] * heads, **arguments)
        per_window = []
        for window in candidates:
            out, _ = attention(
                layer["q"], layer["k"], layer["v"], [window or len(ids)] * heads, sink_tokens, **arguments
            )
            error = ((out - full)[0] @ weight).square().sum(-1) * factor / layer["x"].double().square().sum(-1)
            per_window.append(error.sum(-1))
        result.append(torch.stack(per_window, -1))
    return torch.stack(result).detach().numpy()


@pytest.mark.parametrize("sink_tokens", [0, 3, 70])
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [row[1:] for row in FAMILIES] + [("llama", {"attention_bias": True, "num_key_value_heads": 4})],
    ids=[row[0] for row in FAMILIES] + ["llama-biased"],
)
def test_one_pass_equals_running_every_window_by_itself(model_type, overrides, sink_tokens):
    model = tiny_model(model_type, **overrides | ({"attn_logit_softcapping": 2.0} if model_type == "gemma2" else {}))
    sharpen(model)
    ids = random_ids(1, LENGTH)[0]
    curves = output_error_curves(model, [ids], CANDIDATES, sink_tokens=sink_tokens)
    expected = curves_one_by_one(model, ids, sink_tokens)
    np.testing.assert_allclose(curves.errors, expected, rtol=2e-4, atol=1e-9)
    assert expected[..., 0].min() > 1e-3 or sink_tokens  # the comparison is not between zeros
    assert curves.tokens == LENGTH and curves.candidates == CANDIDATES


def sharpen(model) -> None:
    """Random models hardly attend to anything, and their norms and sink logits are all alike."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 30
            layer.self_attn.o_proj.weight += 0.3 * torch.randn(layer.self_attn.o_proj.weight.shape, generator=draw)
            for name, p in layer.named_parameters():
                if "layernorm" in name or name.endswith("sinks"):
                    p += 0.5 * torch.randn(p.shape, generator=draw)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "glm4"])
def test_behind_a_norm_the_error_is_what_moves_the_residual_stream(model_type):
    """Against running the layer's own norm over the changed attention output, one head at a time."""
    model, ids, window = tiny_model(model_type), random_ids(1, LENGTH)[0], 100
    sharpen(model)
    measured = output_error_curves(model, [ids], (window, None), sink_tokens=0).errors[..., 0]
    for index, layer in enumerate(captured(model, ids)):
        norm, y = layer["norm"]
        weight = layer["module"].o_proj.weight.detach().double().T.reshape(HEADS, -1, y.shape[-1])
        full, _ = attention(layer["q"], layer["k"], layer["v"], [LENGTH] * HEADS, **layer["rules"])
        out, _ = attention(layer["q"], layer["k"], layer["v"], [window] * HEADS, **layer["rules"])
        for head in range(HEADS):
            with torch.no_grad():
                moved = norm(y[0] + ((out - full)[0, head] @ weight[head]).float()) - norm(y[0])
            true = float((moved.double().square().sum(-1) / layer["x"].double().square().sum(-1)).sum())
            if measured[index, head] > 0:  # not where the layer's own window is shorter
                assert 0.5 < true / measured[index, head] < 1.5


@pytest.mark.parametrize("limit", [None, 33])
@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_windows_that_miss_all_strong_keys_do_not_underflow(sink_tokens, limit):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 130, 8, generator=draw) for heads in (4, 2, 2))
    k[:, :, 5] = 60 * q.mean(2)[:, ::2]  # one early key outweighs all others by far more than float32 can hold
    q = q + 20 * q.mean(2, keepdim=True)
    factors = torch.eye(8).expand(4, 8, 8)
    got = window_errors(q[0], k[0], v[0], factors, (4, 64), sink_tokens=sink_tokens, scale=1.0, limit=limit)
    full, lse = attention(q, k, v, [130] * 4, scale=1.0, limit=limit)
    assert lse.max() > 150
    for index, window in enumerate((4, 64)):
        out, _ = attention(q, k, v, [window] * 4, sink_tokens, scale=1.0, limit=limit)
        torch.testing.assert_close(got[index].double(), (out - full)[0].square().sum(-1), rtol=1e-3, atol=1e-4)


def test_a_lora_adapter_on_the_output_projection_counts():
    peft = pytest.importorskip("peft")
    base = tiny_model()
    ids = random_ids(1, LENGTH)[0]
    wrapped = peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False, lora_dropout=0.5)
    )
    merged = copy.deepcopy(wrapped).merge_and_unload()
    curves = output_error_curves(wrapped.get_base_model(), [ids], CANDIDATES).errors
    np.testing.assert_allclose(curves, output_error_curves(merged, [ids], CANDIDATES).errors, rtol=1e-3, atol=1e-9)
    assert not np.allclose(curves, output_error_curves(base, [ids], CANDIDATES).errors, rtol=0.05)


def test_the_output_projection_is_read_through_the_module():
    class Opaque(torch.nn.Module):  # like a quantised layer: no usable weight
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    torch.manual_seed(0)
    linear = torch.nn.Linear(12, 5)
    with torch.no_grad():
        factors = output_factors(Opaque(linear), heads=3, head_dim=4, like=torch.zeros(1))
    error = torch.randn(3, 4)
    expected = torch.stack([(error[h] @ linear.weight[:, 4 * h : 4 * h + 4].T).norm() for h in range(3)])
    torch.testing.assert_close(torch.einsum("hd,hde->he", error, factors).norm(dim=-1), expected)


def test_sequences_add_up_in_order():
    model, (first, second) = tiny_model(), random_ids(2, LENGTH)
    both = output_error_curves(model, [first, second], CANDIDATES)
    one, two = (output_error_curves(model, [ids], CANDIDATES) for ids in (first, second))
    np.testing.assert_array_equal(both.errors, one.errors + two.errors)
    assert both.tokens == 2 * LENGTH


def test_measuring_every_other_block_keeps_the_last_one():
    model, ids = tiny_model(), random_ids(1, LENGTH)[0]
    curves = output_error_curves(model, [ids], CANDIDATES, query_stride=2)
    assert curves.tokens == 64 + LENGTH % 64
    assert (curves.errors <= output_error_curves(model, [ids], CANDIDATES).errors + 1e-12).all()
    assert curves.errors[..., -2].max() > 0  # windows of 100 only matter to the last block


def test_half_precision_models_are_measured():
    model, ids = tiny_model(), random_ids(1, LENGTH)[0]
    exact = output_error_curves(model, [ids], CANDIDATES).errors
    half = output_error_curves(copy.deepcopy(model).to(torch.bfloat16), [ids], CANDIDATES).errors
    np.testing.assert_allclose(half[..., :4].sum(0), exact[..., :4].sum(0), rtol=0.2)


def test_a_patched_model_is_measured_with_full_attention():
    model, ids = tiny_model(), random_ids(1, LENGTH)[0]
    expected = output_error_curves(model, [ids], CANDIDATES).errors
    aah_hf.patch_model(model, config=mixed_plan())
    np.testing.assert_array_equal(output_error_curves(model, [ids], CANDIDATES).errors, expected)
    assert model.config._attn_implementation == "aah"


def state_of(model) -> dict:
    return {
        "modes": [module.training for module in model.modules()],
        "entries": [sorted(module.__dict__) for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "hooks": [len(h) for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)],
        "gradients": [p.requires_grad for p in model.parameters()],
        "weights": [p.clone() for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "rng": torch.get_rng_state(),
    }


def assert_same_state(before: dict, after: dict) -> None:
    for key, value in before.items():
        if key == "rng":
            assert torch.equal(value, after[key])
        elif key == "weights":
            assert all(torch.equal(a, b) for a, b in zip(value, after[key]))
        else:
            assert value == after[key], key


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4", "gemma2", "gpt_oss"])
def test_under_a_plan_errors_are_against_the_full_models_heads(model_type):
    overrides = {"gemma2": {"attn_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 3}}
    overrides["gpt_oss"] = {"layer_types": ["full_attention"] * 3, "num_local_experts": 4}
    model, ids, plan = tiny_model(model_type, **overrides.get(model_type, {})), random_ids(1, LENGTH)[0], mixed_plan()
    sharpen(model)
    teacher = captured(model, ids)
    curves = output_error_curves(model, [ids], CANDIDATES, plan=plan.windows, sink_tokens=plan.sink_tokens)

    # the student, layer by layer: the same capture with the plan's windows as a dense mask
    student: list[dict] = []

    def windowed(module, query, key, value, attention_mask, **kwargs):
        rules = {"scale": kwargs["scaling"], "softcap": kwargs.get("softcap"), "sink_logits": kwargs.get("s_aux")}
        student.append({"q": query, "k": key, "v": value, "rules": rules, "module": module})
        layer = plan.windows[module.layer_idx]
        windows = [w or LENGTH for w in layer]
        out, _ = attention(query, key, value, windows, plan.sink_tokens, **rules)
        return out.float().transpose(1, 2), None

    AttentionInterface.register("test_student", windowed)
    AttentionMaskInterface.register("test_student", sdpa_mask)
    model.set_attn_implementation("test_student")
    handles = residual_taps(model, student)
    with torch.no_grad():
        model(input_ids=ids[None])
    for handle in handles:
        handle.remove()

    for index, (full, now) in enumerate(zip(teacher, student)):
        weight, factor = through_norm(now)
        target, _ = attention(full["q"], full["k"], full["v"], [LENGTH] * 4, **full["rules"])
        for column, window in enumerate(CANDIDATES):
            out, _ = attention(now["q"], now["k"], now["v"], [window or LENGTH] * 4, plan.sink_tokens, **now["rules"])
            error = ((out - target)[0] @ weight).square().sum(-1) * factor / now["x"].double().square().sum(-1)
            np.testing.assert_allclose(curves.errors[index, :, column], error.sum(-1).detach(), rtol=1e-3, atol=1e-8)
    assert curves.errors[0, :, -1].max() < 1e-6 < curves.errors[1, :, -1].min()  # drift that no window can undo


class Stop(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_calibrate_leaves_the_model_as_it_was(fails, implementation):
    model = tiny_model(attention_dropout=0.5)
    model.set_attn_implementation(implementation)
    model.train()
    model.model.layers[1].eval()  # a mix of modes comes back as a mix
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    loader = torch.utils.data.DataLoader(random_ids(6, 64), batch_size=2, shuffle=True)
    config = CalibrationConfig(seq_len=64, candidates=(4, 16), num_sequences=3, recall_fraction=0)

    def progress(*_):
        if fails:
            raise Stop

    before = state_of(model)
    if fails:
        with pytest.raises(Stop):
            calibrate(model, loader, calibration=config, progress=progress)
    else:
        calibrate(model, loader, calibration=config)
    assert_same_state(before, state_of(model))


def test_two_models_calibrated_in_two_threads_do_not_mix():
    models = [tiny_model(), tiny_model(num_key_value_heads=4)]
    data = random_ids(3, LENGTH)
    alone = [output_error_curves(model, data, CANDIDATES).errors for model in models]
    together: list[np.ndarray | None] = [None, None]
    started = threading.Barrier(2)

    def work(index: int) -> None:
        started.wait()
        together[index] = output_error_curves(models[index], data, CANDIDATES).errors

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, got in zip(alone, together):
        np.testing.assert_array_equal(got, expected)


def test_a_model_cannot_be_calibrated_twice_at_the_same_time():
    model, data = tiny_model(), random_ids(2, 64)

    def again(*_):
        output_error_curves(model, data, (4, None))

    handle = model.model.norm.register_forward_pre_hook(again)
    with pytest.raises(CalibrationError, match="already"):
        output_error_curves(model, data, (4, None))
    handle.remove()
    output_error_curves(model, data, (4, None))


@pytest.mark.parametrize("candidates", [(), (4,), (8, 4, None), (4, 4, None), (None, 4), (4, None, None)])
def test_candidates_must_ascend_and_end_in_full(candidates):
    with pytest.raises(CalibrationError, match="ascending"):
        output_error_curves(tiny_model(), random_ids(1, 64), candidates)


def test_activations_that_overflow_are_an_error():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(CalibrationError, match="not finite"):
        output_error_curves(model, random_ids(1, 64), (4, None))


@pytest.mark.parametrize("budget", [Budget.kv(0.5), Budget.causal(0.6), Budget.acr(0.3)])
def test_calibrate_gives_a_plan_within_budget_that_says_where_it_comes_from(family_model, budget):
    config = CalibrationConfig(
        budget=budget, seq_len=96, candidates=(4, 8, 16, 32), num_sequences=2, recall_fraction=0, granularity="kv_head"
    )
    plan = calibrate(family_model, random_ids(3, 96), calibration=config)
    plan.check_fits(family_model)
    assert getattr(plan.coverage(family_model, 96), budget.kind) <= budget.value
    origin = dict(plan.provenance)
    assert origin["budget"] == {"kind": budget.kind, "value": budget.value}
    assert origin["seq_len"] == plan.calibrated_at == 96
    assert origin["tokens"] == 192 and len(origin["data_sha256"]) == 64
    assert origin["model_class"] == type(family_model).__name__
    assert set(origin["versions"]) == {"aah_hf", "torch", "transformers"}
    json.dumps(origin, allow_nan=False)
    again = calibrate(family_model, random_ids(3, 96), calibration=config)
    assert again.windows == plan.windows and again.provenance["data_sha256"] == origin["data_sha256"]


def test_calibrate_finds_the_head_that_looks_far_back():
    model = tiny_model(num_key_value_heads=4, hidden_size=32)
    attention_module = model.model.layers[1].self_attn
    with torch.no_grad():  # head 2 of layer 1 averages over everything it sees and has the only strong output
        attention_module.q_proj.weight[16:24] = 0
        attention_module.o_proj.weight *= 0.01
        attention_module.o_proj.weight[:, 16:24] *= 5000
    config = CalibrationConfig(
        budget=Budget.acr(0.25), candidates=(4, 16), granularity="head", seq_len=64, num_sequences=2, recall_fraction=0
    )
    plan = calibrate(model, random_ids(3, 64), calibration=config)
    assert plan.windows[1][2] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": "medium"}, "coarse"),
        ({"candidates": (64, 32)}, "ascending"),
        ({"candidates": (64,), "seq_len": 64}, "shorter"),
        ({"candidates": "fine", "seq_len": 32}, "shorter"),
        ({"candidates": (0,)}, "integer"),
        ({"granularity": "heads"}, "kv_head"),
        ({"objective": "magic"}, "output_error"),
        ({"granularity": "head"}, "kv_head"),
        ({"seq_len": 0}, "seq_len"),
        ({"seq_len": 2.0}, "seq_len"),
        ({"num_sequences": 0}, "num_sequences"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"recall_fraction": 1.5}, "recall_fraction"),
        ({"recall_fraction": float("nan")}, "recall_fraction"),
        ({"budget": 0}, "0 < budget"),
        ({"seed": -1}, "seed"),
        ({"sink_tokens": 2040}, "Lower sink_tokens"),
        ({"sink_tokens": 4096}, "Lower sink_tokens"),
    ],
)
def test_settings_are_checked_when_they_are_made(settings, message):
    with pytest.raises(CalibrationError, match=message):
        CalibrationConfig(**settings)


def test_candidates_that_cover_the_sequence_collapse_into_full():
    assert CalibrationConfig(candidates=(16, 64, 128), seq_len=64).windows() == (16, None)
    assert CalibrationConfig(candidates="coarse").windows() == (128, 256, 512, 1024, None)
    assert CalibrationConfig(candidates="coarse", seq_len=4096).windows() == (128, 256, 512, 1024, 2048, None)
    assert len(CalibrationConfig(candidates="fine").windows()) == 15
    assert CalibrationConfig(candidates=(8, None), seq_len=64).windows() == (8, None)


def test_a_sequence_longer_than_the_model_is_refused():
    with pytest.raises(CalibrationError, match="512 positions"):
        model = tiny_model(max_position_embeddings=512)
        calibrate(model, random_ids(4, 1024), calibration=CalibrationConfig(seq_len=1024))


def test_context_queries_are_not_measured():
    model, ids = tiny_model(), random_ids(1, 256)[0]
    late = output_error_curves(model, [ids], CANDIDATES, measure_from=0.5)
    full = output_error_curves(model, [ids], CANDIDATES)
    assert late.tokens == 128 and full.tokens == 256
    assert (late.errors[..., :-1] < full.errors[..., :-1]).all() and (late.errors[..., 0] > 0).all()
