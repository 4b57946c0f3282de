"""generate() through transformers' own caches is exact: every row as if it were alone and recomputed."""

from __future__ import annotations

import pytest
import torch
from conftest import mixed_plan, random_ids, tiny_model
from transformers import DynamicCache, StaticCache

from aah_hf import patch_model

NEW = 24


def patched(model, seed=0):
    return patch_model(model, config=mixed_plan(seed))


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(r) for r in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = row, 1
    return ids, mask


def recompute(model, ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, int]:
    """Greedy decoding without any cache: (ids, how many of the new tokens are decided by a clear margin)."""
    decided = None
    for step in range(steps):
        with torch.no_grad():
            last = model(ids, use_cache=False).logits[:, -1]
        best = last.topk(2).values
        if decided is None and float((best[:, 0] - best[:, 1]).min()) < 1e-4:
            decided = step
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], -1)
    return ids, steps if decided is None else decided


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
def test_greedy_equals_full_recomputation(family_model, cache):
    model = patched(family_model)
    compared = 0
    for seed in range(3):
        ids = random_ids(1, 30, seed)
        want, decided = recompute(model, ids, NEW)
        got = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            cache_implementation=cache,
        )
        assert torch.equal(got[:, : 30 + decided], want[:, : 30 + decided])
        compared += decided
    assert compared > NEW  # enough tokens were decided clearly for this to say something


@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_batches_generate_like_each_row_alone(family_model, beams, cache):
    model = patched(family_model, 1)
    rows = [random_ids(1, n, seed=n)[0] for n in (33, 20, 2)]
    ids, mask = padded(rows)
    settings = {
        "max_new_tokens": NEW,
        "num_beams": beams,
        "do_sample": False,
        "eos_token_id": None,
        "cache_implementation": cache,
    }
    batch = model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
    for i, row in enumerate(rows):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **settings)[:, len(row) :]
        assert torch.equal(batch[i : i + 1], alone), f"row {i} of length {len(row)}"


def test_logits_through_caches_equal_one_forward(family_model, backend):
    model = patched(family_model, 2)
    ids = random_ids(2, 48)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for chunks in ([48], [20, 28], [1] * 48, [30] + [1] * 18, [10, 7, 1, 1, 29]):
            cache, got = DynamicCache(config=model.config), []
            for part in ids.split(chunks, dim=1):
                got.append(model(part, past_key_values=cache, use_cache=True).logits)
            torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-5, atol=1e-5)


def test_static_cache_by_hand_with_left_padding(llama):
    model = patched(llama, 3)
    rows = [random_ids(1, n, seed=n)[0] for n in (25, 14)]
    ids, mask = padded(rows)
    cache = StaticCache(config=model.config, max_cache_len=64)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        for i, row in enumerate(rows):
            alone = model(row[None]).logits[0]
            torch.testing.assert_close(logits[i, -len(row) :], alone, rtol=1e-5, atol=1e-5)


def test_right_padded_prompt_then_continuation_has_a_hole_and_stays_exact(llama):
    model = patched(llama, 4)
    ids = random_ids(1, 30)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 20:30] = 0  # 20 tokens, 10 of padding, then 10 new ones
    garbage = torch.cat([ids[:, :20], torch.zeros(1, 10, dtype=torch.long)], 1)
    new = ids[:, 20:]
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(garbage, attention_mask=mask[:, :30], past_key_values=cache)
        positions = torch.arange(20, 30)[None]
        got = model(new, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        # windows count buffer positions, so a full-window head sees the same keys as without the hole
        full = patch_model(tiny_model(), config=mixed_plan().uniform(model, None))
        cache = DynamicCache(config=full.config)
        full(garbage, attention_mask=mask[:, :30], past_key_values=cache)
        torch.testing.assert_close(
            full(new, attention_mask=mask, position_ids=positions, past_key_values=cache).logits,
            full(ids).logits[:, 20:],
            rtol=1e-5,
            atol=1e-5,
        )
    assert torch.isfinite(got).all()


def test_sampling_and_return_sequences_run(llama):
    model = patched(llama)
    ids = random_ids(2, 12)
    torch.manual_seed(0)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=5,
        do_sample=True,
        num_return_sequences=3,
        eos_token_id=None,
    )
    assert out.shape == (6, 17)
