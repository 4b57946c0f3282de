"""One cache layer against the float64 reference: whatever is fed, padded, cropped or reordered, no key is missing or extra."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from aah_hf.attention import LayerWindows, aah_attention_forward
from aah_hf.cache_layer import AAHCacheLayer
from aah_hf.coverage import kept_keys
from aah_hf.errors import CacheError
from aah_hf.masks import aah_mask
from aah_hf.ops import reference

HEAD_DIM = 8


class Replay:
    """A cache layer beside the whole history of what it was fed."""

    def __init__(self, windows, kv_heads, sink_tokens, limit=None, rollback=0, batch=2, seed=0, dtype=torch.float64):
        self.layer = AAHCacheLayer(tuple(windows), kv_heads, sink_tokens, limit, rollback)
        self.module = SimpleNamespace(
            aah_layer=LayerWindows(tuple(windows), sink_tokens),
            num_key_value_groups=len(windows) // kv_heads,
            is_causal=True,
            training=False,
        )
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.k = self.normal(batch, kv_heads, 0)
        self.v = self.normal(batch, kv_heads, 0)
        self.valid = torch.ones(batch, 0, dtype=torch.bool)

    def normal(self, batch, heads, length):
        return torch.randn(batch, heads, length, HEAD_DIM, generator=self.generator, dtype=self.dtype)

    def feed(self, valid, mask=None):
        """Feed tokens [batch, q_len] (False is padding) and compare every output with the reference."""
        layer, (batch, q_len), past = self.layer, valid.shape, self.k.shape[2]
        heads = len(layer.windows)
        q, k, v = self.normal(batch, heads, q_len), *(self.normal(batch, layer.kv_heads, q_len) for _ in "kv")
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.valid = torch.cat([self.valid, valid], 1)
        seen = aah_mask(
            batch,
            q_len,
            past + q_len,
            past,
            attention_mask=self.valid,
            local_size=layer.limit,
            mask_function=rule(layer.limit),
        )
        keys, values = layer.update(k, v)
        out, _ = aah_attention_forward(self.module, q, keys, values, seen if mask is None else mask)
        want, _ = reference.attention(
            q,
            self.k,
            self.v,
            [2**30 if w is None else w for w in layer.windows],
            layer.sink_tokens,
            q_start=past,
            valid=self.valid,
            limit=layer.limit,
            mask=mask,
        )
        real = valid[:, None, :, None]  # what a padding query gets is read by nobody
        torch.testing.assert_close(out.transpose(1, 2) * real, want * real, rtol=1e-9, atol=1e-9)
        assert layer.past == self.k.shape[2]
        lengths = self.k.shape[2] - (self.valid.int().argmax(1) + (~self.valid.any(1)) * self.k.shape[2])
        stored = sum(kept_keys(int(n), w, layer.sink_tokens) for n in lengths for w in layer.widest)
        assert layer.stored() == stored * 2 * HEAD_DIM * self.k.element_size()

    def crop(self, count):
        self.layer.crop(-count)
        end = self.k.shape[2] - count
        self.k, self.v, self.valid = self.k[:, :, :end], self.v[:, :, :end], self.valid[:, :end]

    def select(self, rows):
        self.layer.batch_select_indices(rows)
        self.k, self.v, self.valid = self.k[rows], self.v[rows], self.valid[rows]


def rule(limit):
    return causal_mask_function if limit is None else sliding_window_causal_mask_function(limit)


@st.composite
def plans(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    window = st.one_of(st.integers(1, 12), st.sampled_from([1, 2, 30, None]))
    return {
        "windows": [draw(window) for _ in range(kv_heads * group)],
        "kv_heads": kv_heads,
        "sink_tokens": draw(st.integers(0, 4)),
        "limit": draw(st.one_of(st.none(), st.none(), st.integers(1, 16))),
        "batch": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 999)),
    }


def padding(layout: str, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    at, cut = torch.arange(length), torch.randint(0, length + 1, (batch, 1), generator=generator)
    if layout == "left":
        return at >= cut
    if layout == "middle":  # right padding of a prompt that goes on later
        return (at < cut) | (at >= cut + torch.randint(0, length + 1, (batch, 1), generator=generator))
    if layout == "holes":
        return torch.rand(batch, length, generator=generator) < 0.6
    return torch.ones(batch, length, dtype=torch.bool)


@pytest.mark.usefixtures("backend")
@settings(max_examples=120)
@given(plans(), st.lists(st.sampled_from([1, 1, 1, 2, 5, 13, 20]), min_size=1, max_size=14), st.data())
def test_any_chunking_padding_and_window_equals_the_reference(plan, chunks, data):
    layout = data.draw(st.sampled_from(["none", "left", "middle", "holes"]))
    replay = Replay(**plan)
    valid = padding(layout, plan["batch"], sum(chunks), replay.generator)
    for part in valid.split(chunks, 1):
        replay.feed(part)
    layer = replay.layer
    if (
        layout == "none"
        and sum(chunks) >= max((k for k in layer.keep if k is not None), default=0)
        and None not in layer.keep
    ):
        assert layer.allocated() == layer.stored()
    if layout == "none":
        assert layer.allocated() <= 1.25 * layer.stored()


@pytest.mark.usefixtures("backend")
@settings(max_examples=100)
@given(
    plans(),
    st.integers(0, 6),
    st.lists(st.sampled_from(["feed", "feed", "feed", "crop", "select", "record"]), max_size=14),
    st.data(),
)
def test_cropping_and_reordering_leave_a_right_cache_or_refuse(plan, rollback, actions, data):
    layout = data.draw(st.sampled_from(["none", "left", "middle", "holes"]))
    replay = Replay(**plan, rollback=rollback)
    replay.feed(padding(layout, plan["batch"], 9, replay.generator))
    promised = rollback
    for action in actions:
        length, batch = replay.k.shape[2], replay.k.shape[0]
        if action == "feed":
            count = data.draw(st.integers(1, 7))
            replay.feed(padding(layout, batch, count, replay.generator))
            promised = min(rollback, promised + count)
        elif action == "record":
            replay.layer.activate_past_recording()
        elif action == "select":
            replay.select(torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))))
        else:
            count, most = data.draw(st.integers(0, length)), replay.layer.most_crop()
            assert most >= min(promised, length)
            if count <= most:
                replay.crop(count)
                promised = max(0, promised - count)
            else:
                before = replay.layer.past, replay.layer.rows
                with pytest.raises(CacheError, match=f"take back {most}"):
                    replay.layer.crop(-count)
                assert before == (replay.layer.past, replay.layer.rows)
    replay.feed(torch.ones(replay.k.shape[0], 3, dtype=torch.bool))
