"""Patching a model of every family: same keys, same object, windows in force, and everything reversible."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conftest import HEADS, LAYERS, mixed_plan, random_ids, tiny_model
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    SiglipVisionConfig,
    StaticCache,
)

import aah_hf
from aah_hf import (
    AAHAttention,
    AAHConfig,
    AAHError,
    OperatorError,
    PlanError,
    UnsupportedModelError,
    patch_model,
    unpatch_model,
)
from aah_hf.ops import reference
from aah_hf.plan import native_windows


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def dense_logits(model, plan, ids, **kwargs):
    """The same windows through transformers' own eager-style masks: one 4D mask per head and layer."""
    register_dense(plan, model)
    model = copy.deepcopy(model)
    model.set_attn_implementation("test_dense")
    return logits(model, ids, use_cache=False, **kwargs)


def register_dense(plan, model):
    limits = native_windows(model)

    def attention(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        layer = plan.windows[module.layer_idx]
        limit = limits[module.layer_idx] if mask is None else None  # a 4D mask takes the place of the layer's own
        full = [w if w is not None else key.shape[2] for w in layer]
        out, _ = reference.attention(
            query,
            key,
            value,
            full,
            plan.sink_tokens,
            scale=scaling,
            limit=limit,
            mask=mask,
            softcap=softcap,
            sink_logits=s_aux,
        )
        return out.to(query.dtype).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("test_dense", attention)


def test_patched_logits_equal_the_reference_and_unpatching_restores_every_bit(family_model, backend):
    model, ids = family_model, random_ids(2, 40)
    before, keys, classes = logits(model, ids), list(model.state_dict()), [type(m) for m in model.modules()]
    plan = mixed_plan()
    want = dense_logits(model, plan, ids)

    assert patch_model(model, config=plan) is model
    assert list(model.state_dict()) == keys
    assert sum(isinstance(m, AAHAttention) for m in model.modules()) == LAYERS
    got = logits(model, ids)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, before, atol=1e-4)

    assert unpatch_model(model) is model
    assert torch.equal(logits(model, ids), before)
    assert [type(m) for m in model.modules()] == classes
    assert not hasattr(model.config, "aah") and "attn_implementation" not in model.config.to_dict()


def test_windows_that_cover_the_sequence_equal_the_base_model_bit_for_bit(family_model):
    ids = random_ids(2, 40)
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    before = logits(family_model, ids), logits(family_model, ids, attention_mask=padding)[padding.bool()]
    if family_model.config.model_type in ("gemma2", "gpt_oss"):
        # SDPA cannot cap scores or add sink logits: the operator runs instead of eager attention, equal up to rounding
        def same(got, want):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    else:

        def same(got, want):
            assert torch.equal(got, want)

    for window in (None, 40, 38):  # 38 keys and 2 sink tokens hide nothing
        patch_model(family_model, config=AAHConfig.uniform(family_model, window, sink_tokens=2))
        same(logits(family_model, ids), before[0])
        same(logits(family_model, ids, attention_mask=padding)[padding.bool()], before[1])


def test_left_and_right_padding_equal_each_row_alone(family_model, backend):
    patch_model(family_model, config=mixed_plan())
    ids = random_ids(2, 40)
    for real in (slice(11, 40), slice(0, 29)):
        mask = torch.zeros_like(ids)
        mask[0, real], mask[1] = 1, 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        both = logits(family_model, ids, attention_mask=mask, position_ids=positions)
        torch.testing.assert_close(both[:1, real], logits(family_model, ids[:1, real]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[1:], logits(family_model, ids[1:]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_documents_equal_each_alone(family_model, use_cache, backend):
    """Also with a cache, where stock SDPA lets documents see each other."""
    patch_model(family_model, config=mixed_plan())
    ids = random_ids(1, 40)
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
    packed = logits(family_model, ids, position_ids=positions, use_cache=use_cache)
    torch.testing.assert_close(packed[:, :17], logits(family_model, ids[:, :17]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[:, 17:], logits(family_model, ids[:, 17:]), rtol=1e-5, atol=1e-5)


def test_packing_by_cumulative_lengths(llama):
    patch_model(llama, config=mixed_plan())
    ids = random_ids(1, 40)
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
    cu = torch.tensor([0, 17, 40], dtype=torch.int32)
    by_length = logits(llama, ids, position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert torch.equal(by_length, logits(llama, ids, position_ids=positions))


def test_packed_full_windows_do_not_leak_through_the_stock_kernel(llama):
    patch_model(llama, config=AAHConfig.uniform(llama, None))
    ids = random_ids(1, 40)
    positions = torch.cat([torch.arange(17), torch.arange(23)])[None]
    packed = logits(llama, ids, position_ids=positions, use_cache=True)
    torch.testing.assert_close(packed[:, 17:], logits(llama, ids[:, 17:]), rtol=1e-5, atol=1e-5)


def test_a_users_4d_mask_is_anded(llama):
    patch_model(llama, config=mixed_plan())
    ids = random_ids(1, 24)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(logits(llama, ids, attention_mask=causal), logits(llama, ids), rtol=1e-5, atol=1e-5)
    blocked = causal.clone()
    blocked[..., 12:, :12] = False
    second = logits(llama, ids, attention_mask=blocked, position_ids=torch.arange(24)[None])[:, 12:]
    additive = torch.zeros(1, 1, 24, 24).masked_fill(~blocked, torch.finfo(torch.float32).min)
    torch.testing.assert_close(
        logits(llama, ids, attention_mask=additive, position_ids=torch.arange(24)[None])[:, 12:], second
    )
    assert not torch.allclose(second, logits(llama, ids)[:, 12:], atol=1e-4)


@pytest.mark.parametrize("additive", [False, True])
def test_4d_masks_equal_the_reference_in_every_family(family_model, additive):
    ids = random_ids(2, 30)
    mask = torch.rand(2, 1, 30, 30, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = mask.tril() | torch.eye(30, dtype=torch.bool)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    for plan in (mixed_plan(), AAHConfig.uniform(family_model, None)):
        want = dense_logits(family_model, plan, ids, attention_mask=mask)
        patch_model(family_model, config=plan)
        torch.testing.assert_close(logits(family_model, ids, attention_mask=mask), want, rtol=1e-5, atol=1e-5)
        unpatch_model(family_model)


def test_training_gives_the_references_gradients(family_model, backend):
    model, ids, plan = family_model, random_ids(2, 40), mixed_plan()

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: torch.zeros(()) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    register_dense(plan, model)
    stock = model.config._attn_implementation
    model.set_attn_implementation("test_dense")
    expected = gradients()
    model.set_attn_implementation(stock)

    patch_model(model, config=plan)
    model.train()
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.enable_input_require_grads()
        for name, got in gradients().items():
            torch.testing.assert_close(got, expected[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    weights = {name: g for name, g in expected.items() if name.endswith(("q_proj.weight", "v_proj.weight", "sinks"))}
    assert all(g.abs().max() > 0 for g in weights.values())  # the comparison is not between zeros


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_autocast_runs_in_half_precision(model_type):
    """Also where sink logits stay in float32."""
    all_experts = {"num_local_experts": 2, "num_experts_per_tok": 2} if model_type == "gpt_oss" else {}
    model, ids = patch_model(tiny_model(model_type, **all_experts), config=mixed_plan()), random_ids(1, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = logits(model, ids)
    torch.testing.assert_close(half.float(), logits(model, ids), rtol=0.1, atol=0.02)


def test_copies_and_pickles_keep_their_windows(family_model):
    patch_model(family_model, config=mixed_plan())
    ids = random_ids(1, 40)
    want = logits(family_model, ids)
    for twin in (copy.deepcopy(family_model), pickle.loads(pickle.dumps(family_model))):
        assert torch.equal(logits(twin, ids), want)
        assert all(type(a) is type(b) for a, b in zip(twin.modules(), family_model.modules()))


def test_patching_twice_replaces_the_plan(llama):
    ids = random_ids(1, 40)
    before = logits(llama, ids)
    patch_model(llama, config=mixed_plan(0))
    patch_model(llama, config=mixed_plan(1))
    got = logits(llama, ids)
    assert AAHConfig.from_model(llama) == mixed_plan(1)
    fresh = patch_model(tiny_model(), config=mixed_plan(1))
    assert torch.equal(got, logits(fresh, ids))
    assert torch.equal(logits(unpatch_model(llama), ids), before)


def test_switching_the_implementation_off_and_on(llama):
    ids = random_ids(1, 40)
    before = logits(llama, ids)
    patch_model(llama, config=mixed_plan())
    patched = logits(llama, ids)
    llama.set_attn_implementation("sdpa")
    assert torch.equal(logits(llama, ids), before)
    llama.set_attn_implementation("aah")
    assert torch.equal(logits(llama, ids), patched)


def test_the_previous_implementation_comes_back():
    model = tiny_model(attn_implementation="eager")
    patch_model(model, config=mixed_plan())
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"


def test_repr_shows_the_windows(llama):
    patch_model(llama, config=AAHConfig(((4, 4, None, 8),) * LAYERS, 2))
    text = repr(llama.model.layers[0].self_attn)
    assert text.startswith("AAHLlamaAttention(") and "windows=[4×2, full×1, 8×1], sink_tokens=2" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of calib_data and config, got neither"),
        ({"calib_data": ["x"], "config": mixed_plan()}, "got both"),
        ({"config": mixed_plan(), "calibration": object()}, "cannot be combined"),
        ({"config": {"windows": []}}, "must be an AAHConfig, not dict"),
        ({"config": mixed_plan(layers=LAYERS + 1)}, "belongs to another model"),
        ({"config": mixed_plan(heads=HEADS + 1)}, "belongs to another model"),
        ({"calib_data": ["text"]}, "tokenizer"),
        ({"calib_data": []}, "empty|no "),
        ({"calib_data": [torch.arange(5)]}, "tokens"),
        ({"calib_data": 3.5}, "calib_data"),
    ],
)
@pytest.mark.parametrize("patched", [False, True])
def test_bad_arguments_change_nothing(llama, arguments, message, patched):
    if patched:
        patch_model(llama, config=mixed_plan(5))
    state = copy.deepcopy(
        (llama.config.to_dict(), [type(m) for m in llama.modules()], llama.config._attn_implementation)
    )
    with pytest.raises(AAHError, match=message):
        patch_model(llama, **arguments)
    assert state == (llama.config.to_dict(), [type(m) for m in llama.modules()], llama.config._attn_implementation)


def test_unsupported_models_are_refused_with_the_reason():
    with pytest.raises(UnsupportedModelError, match=r"'gpt2' is not supported: it has absolute positions"):
        patch_model(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)), ["x"])
    with pytest.raises(UnsupportedModelError, match="not been checked"):
        patch_model(tiny_model("phi3"), ["x"])
    with pytest.raises(UnsupportedModelError, match="expected a transformers model, got Linear"):
        patch_model(torch.nn.Linear(2, 2), ["x"])
    with pytest.raises(PlanError, match="not patched"):
        unpatch_model(tiny_model())


def tiny_vision_model():
    text = tiny_model("gemma3_text", sliding_window=12).config
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    return Gemma3ForConditionalGeneration(config).eval()


def test_multimodal_models_are_refused_and_image_tokens_never_become_causal_in_silence():
    model, ids = tiny_vision_model(), random_ids(1, 20) % 80
    with pytest.raises(UnsupportedModelError, match="image tokens may see each other in both directions"):
        patch_model(model, config=mixed_plan())
    patch_model(model.model.language_model, config=mixed_plan())  # nobody can keep a caller from this
    assert torch.isfinite(logits(model, ids)).all()
    ids[0, 5:9] = 90
    with pytest.raises(AAHError, match="image tokens of multimodal models"):
        logits(model, ids, pixel_values=torch.zeros(1, 3, 16, 16), token_type_ids=(ids == 90).long())


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_bidirectional_models_are_refused(model_type):
    model = tiny_model(model_type, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModelError, match="is bidirectional"):
        patch_model(model, config=mixed_plan())


def test_a_model_sharing_the_config_of_a_patched_one_says_so(llama):
    other = type(llama)(llama.config)
    patch_model(llama, config=mixed_plan())
    with pytest.raises(PlanError, match="share one config"):
        logits(other.eval() if not aah_hf.is_patched(other) else other, random_ids(1, 8))


def test_arguments_that_change_the_mathematics_are_refused(llama):
    patch_model(llama, config=mixed_plan())
    ids = random_ids(1, 8)
    with pytest.raises(AAHError, match="output_attentions"):
        llama(ids, output_attentions=True)
    with pytest.raises(AAHError, match="does not know: \\['brand_new'\\]"):
        llama(ids, brand_new=torch.ones(1))
    with pytest.raises(AAHError, match="position_bias"):
        llama(ids, position_bias=torch.ones(1))


def test_running_far_beyond_the_calibrated_length_warns_once(llama, caplog):
    patch_model(llama, config=mixed_plan().with_provenance(seq_len=8))
    with caplog.at_level("WARNING", logger="transformers"):
        from transformers.utils import logging

        logging.enable_propagation()
        logging.warning_once.cache_clear() if hasattr(logging.warning_once, "cache_clear") else None
        logits(llama, random_ids(1, 32))
        assert "calibrated at" not in caplog.text
        logits(llama, random_ids(1, 33))
        logits(llama, random_ids(1, 34))
    assert caplog.text.count("calibrated at 8 tokens") == 1


def test_a_4d_mask_over_a_static_cache_buffer_says_where_the_queries_are(llama):
    """The buffer is longer than what was seen: positions come from the mask, not from the number of keys."""
    patch_model(llama, config=mixed_plan(3))
    ids = random_ids(2, 30)
    want = logits(llama, ids)
    cache = StaticCache(config=llama.config, max_cache_len=64)
    mask = torch.zeros(1, 1, 30, 64, dtype=torch.bool)
    mask[..., :30] = torch.ones(30, 30).tril().bool()
    first = logits(llama, ids[:, :25], attention_mask=mask[:, :, :25], past_key_values=cache)
    rest = [
        logits(llama, ids[:, i : i + 1], attention_mask=mask[:, :, i : i + 1], past_key_values=cache)
        for i in range(25, 30)
    ]
    torch.testing.assert_close(torch.cat([first, *rest], 1), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", [mixed_plan(3), AAHConfig(((None,) * HEADS,) * LAYERS)], ids=["windows", "full"])
def test_a_4d_mask_that_does_not_fit_the_keys_is_refused(llama, plan):
    patch_model(llama, config=plan)
    ids = random_ids(2, 30)
    cache = DynamicCache(config=llama.config)
    logits(llama, ids[:, :20], past_key_values=cache)
    narrow = torch.ones(10, 10).tril().bool()[None, None]
    with pytest.raises(OperatorError, match="10 queries and 30 keys"):
        logits(llama, ids[:, 20:], attention_mask=narrow, past_key_values=cache)
    with pytest.raises(OperatorError, match=r"torch.int64; expected bool"):
        logits(llama, ids, attention_mask=torch.ones(30, 30).tril().long()[None, None])
    rows = torch.ones(30, 30).tril().bool()
    for shape in ((3, 1, 30, 30), (1, 3, 30, 30)):  # of another batch, of another number of heads
        with pytest.raises(OperatorError, match=r"expected \[2 or 1, 4 or 1, 30, 30\]"):
            logits(llama, ids, attention_mask=rows.expand(shape))
    bidirectional = torch.ones(30, 30).tril().bool()
    bidirectional[4:8, 4:8] = True
    additive = torch.zeros(30, 30).masked_fill(~bidirectional, -torch.inf)
    for mask in (bidirectional, additive):
        with pytest.raises(OperatorError, match="see the key after it"):
            logits(llama, ids, attention_mask=mask[None, None])


def test_one_row_of_restarting_positions_stands_for_the_batch(llama):
    patch_model(llama, config=mixed_plan())
    ids = random_ids(2, 30)
    positions = torch.cat([torch.arange(13), torch.arange(17)])[None]
    one = logits(llama, ids, position_ids=positions)
    assert torch.equal(one, logits(llama, ids, position_ids=positions.expand(2, -1)))


def test_packing_under_compile_equals_eager(llama):
    patch_model(llama, config=mixed_plan(3))
    ids = random_ids(2, 30)
    positions = torch.cat([torch.arange(10), torch.arange(20)])[None].expand(2, -1)
    compiled = torch.compile(llama, backend="eager")
    torch.testing.assert_close(
        logits(compiled, ids, position_ids=positions, use_cache=False),
        logits(llama, ids, position_ids=positions, use_cache=False),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_subclass_named_like_its_parent_keeps_its_own_forward():
    patch_model(tiny_model(), config=mixed_plan())
    model, ids = tiny_model(), random_ids(1, 20)
    parent = type(model.model.layers[0].self_attn)

    class LlamaAttention(parent):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return (out[0] * 2, *out[1:])

    for layer in model.model.layers:
        layer.self_attn.__class__ = LlamaAttention
    before = logits(model, ids)
    patch_model(model, config=AAHConfig.uniform(model, None))
    assert torch.equal(logits(model, ids), before)
    unpatch_model(model)
    assert torch.equal(logits(model, ids), before) and type(model.model.layers[0].self_attn) is LlamaAttention


def test_two_models_with_one_config_object_cannot_both_be_patched(llama):
    other = type(llama)(copy.copy(llama.config))
    other.config = other.model.config = llama.config
    patch_model(llama, config=mixed_plan(1))
    with pytest.raises(PlanError, match="shares its config object"):
        patch_model(other, config=mixed_plan(2))
    assert AAHConfig.from_model(llama) == mixed_plan(1) and not aah_hf.is_patched(other)


@pytest.mark.parametrize("patched", [False, True])
def test_an_interrupt_while_patching_leaves_the_model_as_it_was(llama, monkeypatch, patched):
    if patched:
        patch_model(llama, config=mixed_plan(5))
    before = copy.deepcopy(llama.config.to_dict()), [type(m) for m in llama.modules()], repr(llama)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(llama), "set_attn_implementation", interrupt)
    with pytest.raises(KeyboardInterrupt):
        patch_model(llama, config=mixed_plan(6))
    assert before == (llama.config.to_dict(), [type(m) for m in llama.modules()], repr(llama))


def test_patching_the_inner_model_and_unpatching_the_outer_restores_its_implementation():
    model = tiny_model(attn_implementation="eager")
    patch_model(model.model, config=mixed_plan())
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"
