"""Decode steps through the cache run in the native operators, and everything those cannot do goes the general way."""

from __future__ import annotations

import pytest
import torch
from caching import ARGUMENT, left_padded, through
from conftest import mixed_plan, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria, StoppingCriteriaList

from aah_hf import AAHCache, AAHConfig, coverage, patch_model
from aah_hf.cache_attention import MOST_DECODED
from aah_hf.cache_layer import AAHCacheLayer
from aah_hf.ops import decode, native

needs_native = pytest.mark.skipif(not native.available(), reason="no native operator")


@pytest.fixture
def calls(monkeypatch):
    """Calls of the native operators for decoding and for appending."""
    found = {"decode": 0, "write_": 0}

    def counted(name):
        function = getattr(decode, name)

        def call(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return call

    for name in found:
        monkeypatch.setattr(decode, name, counted(name))
    return found


@needs_native
def test_one_call_per_layer_and_step(calls, family_model):
    """Softcap, sink logits and native windows of the families are the operator's business too."""
    model, ids = patch_model(family_model, config=mixed_plan(2)), random_ids(2, 24 + MOST_DECODED)
    with torch.no_grad():
        through(model, ids, AAHCache(model), [20, 1, 1, MOST_DECODED, 2])
    assert calls == {"decode": 3 * 4, "write_": 3 * 5}


@needs_native
def test_left_padding_and_beams_stay_in_the_operator(calls):
    model = patch_model(tiny_model(), config=mixed_plan(2))
    ids, mask, _ = left_padded([random_ids(1, n, seed=n)[0] for n in (20, 11, 1)])
    model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False, eos_token_id=None)
    assert calls == {"decode": 3 * 5, "write_": 3 * 6}


@needs_native
@pytest.mark.parametrize("why", ["long", "hole", "gradients", "dense", "autocast dtype"])
def test_what_the_operator_cannot_do_goes_the_general_way(calls, why):
    model = patch_model(tiny_model(), config=mixed_plan(2))
    count = MOST_DECODED + 1 if why == "long" else 1
    ids, cache, settings = random_ids(1, 30 + count), AAHCache(model), {}
    if why == "hole":
        settings["attention_mask"] = (torch.arange(30 + count) != 25).long()[None]
    if why == "dense":
        settings["attention_mask"] = torch.ones(1, 1, count, 30 + count, dtype=torch.bool)
    with torch.no_grad():
        model(ids[:, :30], use_cache=True, **{ARGUMENT: cache})
        if why == "hole":
            cache.reset()
            hole = {"attention_mask": settings["attention_mask"][:, :30]}
            model(ids[:, :30], use_cache=True, **hole, **{ARGUMENT: cache})
    step = {"use_cache": True, ARGUMENT: cache, **settings}
    with torch.set_grad_enabled(why == "gradients"), torch.autocast("cpu", torch.bfloat16, why == "autocast dtype"):
        model(ids[:, 30:], **step)
    assert calls["decode"] == 0


heads = st.lists(st.one_of(st.integers(1, 20), st.none()), min_size=2, max_size=4)


@needs_native
@settings(max_examples=80)
@given(
    heads,
    st.integers(0, 4),
    st.integers(0, 5),
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.lists(st.sampled_from([1, 1, 2, 7, 19, 40]), min_size=1, max_size=10),
)
def test_both_ways_of_appending_fill_the_same_slots(windows, sink_tokens, rollback, first, chunks):
    generator = torch.Generator().manual_seed(0)
    layers = [AAHCacheLayer(tuple(windows), len(windows), sink_tokens, None, rollback) for _ in range(2)]
    valid = torch.arange(sum(chunks)) >= torch.tensor(first)[:, None]
    for count in chunks:
        keys, values = torch.randn(2, len(first), len(windows), count, 8, generator=generator)
        for layer in layers:
            view, _ = layer.update(keys, values)
            assert view.native
            view.native = layer is layers[0]
            view.store(layer.rows.advance(valid, layer.past, count, sink_tokens))
        assert layers[0].rows == layers[1].rows and layers[0].offset == layers[1].offset
        assert torch.equal(layers[0].keys, layers[1].keys) and torch.equal(layers[0].values, layers[1].values)


class Watch(StoppingCriteria):
    """Where the cache's buffers are and how large, now and then."""

    def __init__(self, cache):
        self.cache, self.seen, self.steps = cache, [], 0

    def __call__(self, ids, scores, **kwargs):
        self.steps += 1
        if self.steps % 500 == 0:
            tensors = [t for layer in self.cache.layers for t in (layer.keys, layer.values)]
            self.seen.append([(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors])
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.slow
def test_ten_thousand_tokens_in_the_same_buffers():
    model = tiny_model(max_position_embeddings=16384)
    patch_model(model, config=AAHConfig(((64, 400, 9, 9),) * 3, sink_tokens=4))
    cache = AAHCache(model)
    watch, ids = Watch(cache), random_ids(1, 20)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10_000,
        do_sample=False,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([watch]),
        **{ARGUMENT: cache},
    )
    assert out.shape == (1, 10_020) and len(watch.seen) == 20
    assert all(seen == watch.seen[0] for seen in watch.seen)
    assert sum(size for _, size in watch.seen[0]) == coverage(model, 10_000).kv_bytes == cache.nbytes("allocated")
