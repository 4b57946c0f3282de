"""AAHCache over whole models: logits, bytes, saving, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys

import pytest
import torch
from caching import ARGUMENT, fair_tolerance, left_padded, through
from conftest import FAMILIES, mixed_plan, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from aah_hf import AAHCache, AAHConfig, CacheError, OperatorError, PlanError, coverage, patch_model, unpatch_model

CHUNKINGS = ([48], [20, 28], [1] * 48, [30] + [1] * 18, [10, 7, 1, 1, 29], [1, 2, 45], [3] * 16)


def patched(seed=2, **overrides):
    return patch_model(tiny_model(**overrides), config=mixed_plan(seed))


def test_logits_in_any_chunks_within_the_models_own_cache_error(family_model, backend):
    ids = random_ids(2, 48)
    tolerance = fair_tolerance(family_model, ids, CHUNKINGS)
    model = patch_model(family_model, config=mixed_plan(2))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for chunks in CHUNKINGS:
            cache = AAHCache(model)
            difference = (through(model, ids, cache, chunks) - want).abs().max()
            assert difference <= tolerance, f"{chunks}: {difference} > {tolerance}"
            assert cache.nbytes() == 2 * coverage(model, 48).kv_bytes
            assert cache.nbytes("allocated") <= 1.25 * cache.nbytes()


def test_left_padded_rows_equal_each_row_alone(family_model):
    model = patch_model(family_model, config=mixed_plan(1))
    rows = [random_ids(1, n, seed=n)[0] for n in (41, 20, 2, 1)]
    ids, mask, positions = left_padded(rows)
    with torch.no_grad():
        for chunks in ([41], [1] * 41, [39, 1, 1], [20, 21]):
            logits = through(model, ids, AAHCache(model), chunks, mask, positions)
            for i, row in enumerate(rows):
                alone = model(row[None], use_cache=False).logits[0]
                torch.testing.assert_close(logits[i, -len(row) :], alone, rtol=1e-5, atol=1e-6)


window = st.one_of(st.integers(1, 20), st.none())


@settings(max_examples=25)
@given(
    st.lists(st.lists(window, min_size=4, max_size=4), min_size=3, max_size=3),
    st.integers(0, 6),
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(0, 9),
)
def test_stored_bytes_are_the_coverage_formula(windows, sinks, chunks, pads):
    model = patch_model(MODEL, config=AAHConfig(tuple(map(tuple, windows)), sinks))
    length = sum(chunks)
    ids, mask, positions = left_padded([random_ids(1, length)[0], random_ids(1, max(1, length - pads), 5)[0]])
    cache = AAHCache(model)
    with torch.no_grad():
        logits = through(model, ids, cache, chunks, mask, positions)
        want = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits * mask[..., None], want * mask[..., None], rtol=1e-5, atol=1e-6)
    lengths = (length, max(1, length - pads))
    assert cache.nbytes() == sum(coverage(model, n).kv_bytes for n in lengths)
    full = coverage(model, 10**6).kv_bytes
    kept = [k for layer in cache.layers for k in layer.keep]
    if None not in kept and length >= max(kept):
        assert cache.nbytes("allocated") == 2 * full
    elif pads == 0:
        assert cache.nbytes("allocated") <= 1.25 * cache.nbytes()


MODEL = tiny_model()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_gradients_through_the_cache_equal_those_of_one_forward(family):
    """Left-padded; with the softcap, sink logits and native windows of the families that have them."""
    (overrides,) = (row[2] for row in FAMILIES if row[0] == family)
    # gemma2's norms and gpt_oss's experts compute in float32 whatever the model's dtype
    dtype, tolerance = (torch.float64, 1e-9) if family == "llama" else (torch.float32, 1e-4)
    model = patch_model(tiny_model(family, **overrides), config=mixed_plan(2)).to(dtype)
    ids, mask, positions = left_padded([random_ids(1, 40)[0], random_ids(1, 33, 5)[0]])
    told = {"attention_mask": mask, "position_ids": positions}
    gradients = []
    for chunks in (None, [17, 1, 1, 21]):
        model.zero_grad()
        if chunks is None:
            logits = model(ids, use_cache=False, **told).logits
        else:
            logits = through(model, ids, AAHCache(model), chunks, mask, positions)
        (logits.logsumexp(-1).square() * mask).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 10
    for got, want in zip(*gradients):
        assert float((got - want).abs().max()) <= tolerance * max(1e-3, float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_keeps_the_models_dtype(dtype):
    model, ids = patched().to(dtype), random_ids(1, 40)
    cache = AAHCache(model)
    with torch.no_grad():
        got, want = through(model, ids, cache, [20, 1, 19]), model(ids, use_cache=False).logits
    assert {t.dtype for layer in cache.layers for t in (layer.keys, layer.values)} == {dtype}
    assert cache.nbytes() == coverage(model, 40).kv_bytes
    step = torch.finfo(dtype).eps * float(want.abs().max())
    assert float((got - want).abs().max()) <= 8 * step


def test_autocast_stores_half_precision():
    model, ids, cache = patched(), random_ids(1, 40), None
    cache = AAHCache(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got, want = through(model, ids, cache, [20, 1, 19]), model(ids, use_cache=False).logits
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    assert float((got - want).abs().max()) <= 8 * torch.finfo(torch.bfloat16).eps * float(want.abs().max())


def test_a_callers_4d_mask_is_anded():
    model, ids = patched(), random_ids(1, 40)
    hidden = torch.rand(40, 40, generator=torch.Generator().manual_seed(3)) < 0.3
    allowed = torch.ones(40, 40).tril().bool() & ~hidden | torch.eye(40).bool()
    for mask in (allowed, torch.zeros(40, 40).masked_fill(~allowed, torch.finfo(torch.float32).min)):
        with torch.no_grad():
            want = model(ids, attention_mask=mask[None, None], use_cache=False).logits
            cache, parts, past = AAHCache(model), [], 0
            for count in (20, 1, 1, 18):
                part, seen = ids[:, past : past + count], mask[None, None, past : past + count, : past + count]
                places = torch.arange(past, past + count)[None]
                parts.append(model(part, attention_mask=seen, position_ids=places, use_cache=True, **{ARGUMENT: cache}))
                past += count
        torch.testing.assert_close(torch.cat([p.logits for p in parts], 1), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(OperatorError, match="one column for every token seen"), torch.no_grad():
        model(ids[:, :1], attention_mask=torch.ones(1, 1, 1, 40).bool(), use_cache=True, **{ARGUMENT: cache})


@pytest.mark.parametrize("family", [row[0] for row in FAMILIES if row[2].get("sliding_window")])
def test_a_4d_mask_without_the_native_window_is_refused_at_the_first_call(family):
    (model_type, overrides), *_ = [row[1:3] for row in FAMILIES if row[0] == family]
    model, ids = patched(model_type=model_type, **overrides), random_ids(1, 40)
    mask, cache = torch.ones(40, 40).tril().bool()[None, None], AAHCache(model)
    assert any(layer.limit for layer in cache.layers)
    with torch.no_grad():
        with pytest.raises(CacheError, match="replaces the model's native sliding window"):
            model(ids, attention_mask=mask, use_cache=True, **{ARGUMENT: cache})
        model(ids, attention_mask=mask, use_cache=False)


def test_copies_are_independent_and_reset_starts_anew():
    model, ids = patched(), random_ids(2, 30)
    cache = AAHCache(model)
    with torch.no_grad():
        want = through(model, ids, cache, [20, 10])
        twin, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        after = [model(ids[:, :5], use_cache=True, **{ARGUMENT: c}).logits for c in (cache, twin, pickled)]
        assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2])
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.nbytes("allocated") == 0
        assert torch.equal(through(model, ids, cache, [20, 10]), want)


def test_repr_says_what_is_kept():
    model = patch_model(tiny_model(), config=AAHConfig(((3, 5, None, 9),) * 3, sink_tokens=2))
    cache = AAHCache(model)
    with torch.no_grad():
        through(model, random_ids(1, 30), cache, [30])
    text = repr(cache)
    assert "30 tokens seen" in text and "(2): keeps 6, full" in text and "stored" in text


def test_offloading_moves_layers_and_keeps_results():
    model, ids = patched(), random_ids(1, 40)
    cache = AAHCache(model, offloading=True)
    with torch.no_grad():
        got = through(model, ids, cache, [20, 1, 1, 18])
        assert torch.equal(got, through(model, ids, AAHCache(model), [20, 1, 1, 18]))
    copy.deepcopy(cache)


def test_device_map_and_accelerate_hooks(tmp_path):
    from accelerate import cpu_offload

    model, ids = patched(), random_ids(1, 40)
    with torch.no_grad():
        want = through(model, ids, AAHCache(model), [20, 1, 19])
        offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
        assert torch.equal(through(offloaded, ids, AAHCache(offloaded), [20, 1, 19]), want)


# --- saving -----------------------------------------------------------------------------------------------------


def test_a_saved_prefix_goes_on_in_another_process(tmp_path):
    model = patched(1)
    rows = [random_ids(1, n, seed=n)[0] for n in (41, 20, 2)]
    ids, mask, positions = left_padded(rows)
    model.save_pretrained(tmp_path / "model")
    cache, file = AAHCache(model, rollback=3), tmp_path / "prefix.safetensors"
    with torch.no_grad():
        through(model, ids[:, :36], cache, [30, 6], mask, positions)
        cache.save(file)
        want = model(
            ids[:, 36:], attention_mask=mask, position_ids=positions[:, 36:], use_cache=True, **{ARGUMENT: cache}
        )
    assert sum(t.numel() * t.element_size() for t in load_file(file).values()) <= cache.nbytes("allocated")
    save_file({"ids": ids, "mask": mask, "positions": positions}, tmp_path / "inputs.safetensors")
    code = (
        "import sys, torch, aah_hf\n"
        "from transformers import AutoModelForCausalLM\n"
        "from safetensors.torch import load_file, save_file\n"
        "torch.set_num_threads(1)\n"
        "folder = sys.argv[1]\n"
        "model = AutoModelForCausalLM.from_pretrained(folder + '/model')\n"
        "cache = aah_hf.AAHCache.load(folder + '/prefix.safetensors', model)\n"
        "t = load_file(folder + '/inputs.safetensors')\n"
        "with torch.no_grad():\n"
        "    out = model(t['ids'][:, 36:], attention_mask=t['mask'], position_ids=t['positions'][:, 36:],\n"
        "                use_cache=True, **{sys.argv[2]: cache})\n"
        "save_file({'logits': out.logits}, folder + '/out.safetensors')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), ARGUMENT], check=True)
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["logits"], want.logits, rtol=1e-5, atol=1e-6)


def test_only_whole_fitting_files_are_loaded(tmp_path):
    model, file = patched(), tmp_path / "prefix.safetensors"
    cache = AAHCache(model)
    with pytest.raises(CacheError, match="holds nothing"):
        cache.save(file)
    with torch.no_grad():
        through(model, random_ids(1, 30), cache, [30])
    cache.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["prefix.safetensors"]
    AAHCache.load(file, model)
    tensors = load_file(file)
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    about = json.loads(metadata["cache"])

    def refused(match, *, tensors=tensors, metadata=metadata, **changes):
        bad = tmp_path / "bad.safetensors"
        save_file(tensors, bad, metadata={**metadata, "cache": json.dumps({**about, **changes})})
        with pytest.raises(CacheError, match=match):
            AAHCache.load(bad, model)

    halves = {k: t.half() for k, t in tensors.items() if k.endswith("values")}
    refused("format version 2", version=2)
    refused("another model or plan: its sink_tokens", sink_tokens=3)
    refused("another model or plan: its windows", windows=[[1] * 4] * 3)
    refused("rows make no sense", past=-1)
    refused("rows make no sense", past=True)
    refused("rows make no sense", first=[31])
    refused("rows make no sense", first="0")
    refused("rows make no sense", sinks=[[1, 0]])
    refused("rows make no sense", sinks=[[0, 1, 2, 3, 4, 5, 6]])
    refused("rows make no sense", past=2**31 + 1, first=[2**31 - 29], sinks=[[2**31 - 29, 2**31 - 28]])
    for sinks in ([], [1, 2], [0, 0], [0, 30], [0, -1], [0, True]):
        refused("rows make no sense", sinks=[sinks])
    refused("tensor '1.keys' has shape", past=31)
    refused("tensor '2.values' has shape None", tensors={k: t for k, t in tensors.items() if k != "2.values"})
    for dtype in (torch.int64, torch.float8_e4m3fn):
        refused(f"layer 0 keys are of type {dtype}", tensors={k: t.to(dtype) for k, t in tensors.items()})
    refused(r"keys are of type torch.float32 and values of torch.float16", tensors={**tensors, **halves})
    for number in (torch.nan, torch.inf):
        bad_values = tensors["2.values"].clone()
        bad_values[0, -1, 0] = number
        refused("in layer 2 some keys or values are not finite", tensors={**tensors, "2.values": bad_values})
    refused("not written by", metadata={"format": "other"})
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-100])
    for name, match in (("cut.safetensors", "not a whole"), ("none.safetensors", "no cache file")):
        with pytest.raises(CacheError, match=match):
            AAHCache.load(tmp_path / name, model)
    other = patch_model(tiny_model(num_key_value_heads=4), config=mixed_plan(2))
    with pytest.raises(CacheError, match="kv_heads"):
        AAHCache.load(file, other)
    for device in ("nonsense", 3.5):
        with pytest.raises(CacheError, match=f"device is {device!r}"):
            AAHCache.load(file, model, device=device)


def test_a_cache_that_cannot_be_written_says_where_and_leaves_nothing(tmp_path):
    model = patched()
    cache = AAHCache(model)
    with torch.no_grad():
        through(model, random_ids(1, 30), cache, [30])
    for path in (tmp_path, tmp_path / "none" / "prefix.safetensors"):
        with pytest.raises(CacheError, match=f"cannot write the cache to {re.escape(str(path))}: "):
            cache.save(path)
    cache.layers[1].keys[0, 0, 0] = torch.nan
    with pytest.raises(CacheError, match="in layer 1 some keys or values are not finite"):
        cache.save(tmp_path / "prefix.safetensors")
    assert not list(tmp_path.iterdir())


# --- what it refuses --------------------------------------------------------------------------------------------


def test_plan_and_cache_must_fit_at_construction():
    model = patched()
    with pytest.raises(PlanError, match="carries no plan"):
        AAHCache(tiny_model())
    with pytest.raises(PlanError, match="for 2 layers and the model has 3"):
        AAHCache(tiny_model(), plan=mixed_plan(layers=2))
    with pytest.raises(PlanError, match="8 windows and the model has 4"):
        AAHCache(tiny_model(), plan=mixed_plan(heads=8))
    with pytest.raises(PlanError, match=r"another plan.*sink tokens 2 and 3"):
        AAHCache(model, plan=mixed_plan(2, sink_tokens=3))
    with pytest.raises(CacheError, match="rollback is -1"):
        AAHCache(model, rollback=-1)
    assert AAHCache(model.config).plan == AAHCache(model, plan=mixed_plan(2)).plan
    with pytest.raises(CacheError, match="kind is 'all'"):
        AAHCache(model).nbytes("all")


def test_refuses_what_it_cannot_answer_exactly():
    model, ids = patched(), random_ids(2, 30)
    cache = AAHCache(model)
    with torch.no_grad():
        through(model, ids, cache, [30])
        with pytest.raises(CacheError, match="batch_repeat_interleave"):
            model(ids[:1, :1], use_cache=True, **{ARGUMENT: cache})
        cache.reset()
        with pytest.raises(CacheError, match="packed documents"):
            packed = torch.arange(15).repeat(2)[None].expand(2, -1)
            model(ids, position_ids=packed, use_cache=True, **{ARGUMENT: cache})
        for count in (1, 3):  # a document that begins behind cached tokens
            cache.reset()
            through(model, ids, cache, [30])
            with pytest.raises(CacheError, match="packed documents"):
                places = torch.arange(count)[None]
                model(ids[:, :count], position_ids=places, use_cache=True, **{ARGUMENT: cache})
        cache.reset()
        through(model, ids, cache, [30])
        mask = torch.ones(2, 31, dtype=torch.long)
        mask[1, :4] = 0
        with pytest.raises(CacheError, match="row 1 begins at token 4"):
            model(ids[:, :1], attention_mask=mask, use_cache=True, **{ARGUMENT: cache})
        cache.reset()
        through(model, ids, cache, [30])
        patch_model(model, config=mixed_plan(3))
        with pytest.raises(CacheError, match="other windows"):
            model(ids[:, :1], use_cache=True, **{ARGUMENT: cache})
        cache = AAHCache(model)
        unpatch_model(model)
        with pytest.raises(CacheError, match="works only with the attention implementation 'aah'"):
            model(ids, use_cache=True, **{ARGUMENT: cache})
    layer = AAHCache(patched()).layers[0]
    keys = torch.zeros(1, 2, 3, 8)
    layer.update(keys, keys)
    with pytest.raises(CacheError, match="never stored"):
        layer.update(keys, keys)
    with pytest.raises(CacheError, match="2 KV heads"):
        AAHCache(patched()).update(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 8), 0)
    with pytest.raises(CacheError, match="made for 3 layers"):
        AAHCache(patched()).update(keys, keys, 3)


PADS, HOLE = [0] * 5 + [1] * 25, [1, 0] + [1] * 28


@pytest.mark.parametrize(
    ("filled", "later", "match"),
    [
        (PADS, None, "row 1 begins at token 0, .* beginning at 5"),
        (PADS, [1] * 30, "row 1 begins at token 0, .* beginning at 5"),
        (PADS, [0] * 6 + [1] * 24, "row 1 begins at token 6"),
        (PADS, [0] * 5 + [1, 0] + [1] * 23, r"first real tokens of row 1 are \[5, 7\], and the cache keeps \[5, 6\]"),
        ([0] * 30, None, "row 1 begins at token 0, .* beginning at 30"),
        ([1] * 30, HOLE, r"row 1 are \[0, 2\], and the cache keeps \[0, 1\]"),
        (HOLE, None, r"row 1 are \[0, 1\], and the cache keeps \[0, 2\]"),
        (HOLE, [1] * 30, r"row 1 are \[0, 1\], and the cache keeps \[0, 2\]"),
        ([1] + [0] * 29, None, r"row 1 are \[0, 1\], and the cache keeps \[0\]"),
        ([1] + [0] * 29, [1] + [0] * 28 + [1], r"row 1 are \[0, 29\], and the cache keeps \[0\]"),
    ],
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_mask_that_contradicts_what_was_cached_is_refused(filled, later, match, count):
    model, ids = patched(), random_ids(2, 30 + count)
    first, after = torch.ones(2, 30, dtype=torch.long), None
    first[1] = torch.tensor(filled)
    if later is not None:
        after = torch.ones(2, 30 + count, dtype=torch.long)
        after[1, :30] = torch.tensor(later)
    cache = AAHCache(model)
    with torch.no_grad():
        model(ids[:, :30], attention_mask=first, use_cache=True, **{ARGUMENT: cache})
        with pytest.raises(CacheError, match=match):
            model(ids[:, 30:], attention_mask=after, use_cache=True, **{ARGUMENT: cache})


@pytest.mark.parametrize("sink_tokens", [0, 1, 2, 5])
def test_masks_with_holes_that_stay_are_exact(sink_tokens):
    model, ids = patch_model(tiny_model(), config=mixed_plan(2, sink_tokens=sink_tokens)), random_ids(4, 30)
    mask = torch.ones_like(ids)
    mask[1, 1], mask[1, 3] = 0, 0
    mask[2, 2:12] = 0  # right padding of a prompt that goes on
    mask[3, :21] = 0  # a whole chunk of padding
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for chunks in ([12, 18], [2, 10, 1, 1, 16], [1] * 30):
            got = through(model, ids, AAHCache(model), chunks, mask, positions)
            torch.testing.assert_close(got * mask[..., None], want * mask[..., None], rtol=1e-5, atol=1e-6)


def test_crop_takes_back_what_rollback_promises_or_refuses():
    model = patch_model(tiny_model(), config=AAHConfig.uniform(tiny_model(), 8, sink_tokens=2))
    ids = random_ids(1, 60)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        cache = AAHCache(model, rollback=5)
        through(model, ids[:, :45], cache, [40] + [1] * 5)
        cache.crop(-5)
        torch.testing.assert_close(through(model, ids[:, 40:], cache, [20]), want[:, 40:], rtol=1e-5, atol=1e-6)
        with pytest.raises(CacheError, match=r"remove 6 tokens and this cache can take back 5.*rollback=6"):
            cache.crop(-6)
        with pytest.raises(CacheError, match="remove 61 tokens and only 60 were seen"):
            cache.crop(-61)
        with pytest.raises(CacheError, match="as a negative number, got 3"):
            cache.crop(3)
        assert cache.get_seq_length() == 60


@pytest.mark.parametrize(
    ("method", "argument", "match"),
    [
        ("batch_select_indices", torch.tensor([5]), r"rows \[5\] and the cache holds 2"),
        ("batch_select_indices", torch.tensor([0, -3]), r"rows \[0, -3\]"),
        ("batch_select_indices", torch.tensor([True]), r"\[True\] and the cache holds 2 rows"),
        ("batch_select_indices", torch.tensor([False, False]), "some must stay"),
        ("batch_select_indices", torch.tensor([[0, 1]]), r"shape \(1, 2\): \[\[0, 1\]\]"),
        ("batch_select_indices", torch.tensor(1), r"shape \(\): 1"),
        ("batch_select_indices", torch.tensor([], dtype=torch.long), "at least one row"),
        ("batch_select_indices", "both", "given 'both'"),
        ("reorder_cache", torch.tensor([1.0, 0.0]), r"torch.float32 of shape \(2,\): \[1.0, 0.0\]"),
        ("reorder_cache", torch.tensor([0, 2]), r"rows \[0, 2\]"),
        ("reorder_cache", None, "given None"),
        ("batch_repeat_interleave", 0, "given 0"),
        ("batch_repeat_interleave", -1, "given -1"),
        ("batch_repeat_interleave", 2.0, "given 2.0"),
        ("crop", "a", "given 'a'"),
        ("crop", -1.5, "given -1.5"),
        ("crop", None, "given None"),
    ],
    ids=str,
)
def test_bad_arguments_leave_the_cache_as_it_was(method, argument, match):
    model, ids = patched(), random_ids(2, 40)
    cache = AAHCache(model)
    with torch.no_grad():
        want = through(model, ids, AAHCache(model), [30, 10])
        through(model, ids[:, :30], cache, [30])
        with pytest.raises(CacheError, match=match):
            getattr(cache, method)(argument)
        assert torch.equal(through(model, ids[:, 30:], cache, [10]), want[:, 30:])


def test_rows_are_selected_by_numbers_from_either_end_or_by_bools():
    model, ids = patched(), random_ids(3, 40)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        for indices in ([2, 0], [-1, -3], torch.tensor([True, False, True])):
            cache = AAHCache(model)
            cache.batch_select_indices(indices)  # nothing to select from yet
            cache.batch_repeat_interleave(2)
            through(model, ids[:, :30], cache, [30])
            cache.batch_select_indices(indices)
            rows = torch.arange(3)[torch.as_tensor(indices)]
            got = through(model, ids[rows, 30:], cache, [10])
            torch.testing.assert_close(got, want[rows, 30:], rtol=1e-5, atol=1e-6)


def test_eight_thousand_tokens_hold_what_coverage_says():
    """In a process of its own, so that nothing else keeps tensors alive."""
    code = (
        "import gc, json, sys, torch, aah_hf\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from caching import through\n"
        "from conftest import random_ids, tiny_model\n"
        "from transformers import DynamicCache\n"
        "from aah_hf import AAHCache, AAHConfig, coverage, patch_model\n"
        "torch.set_num_threads(1)\n"
        "def live(cache):\n"
        "    gc.collect()\n"
        "    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()\n"
        "             for layer in cache.layers for t in vars(layer).values() if torch.is_tensor(t)}\n"
        "    return sum(found.values())\n"
        "model = tiny_model(max_position_embeddings=8192)\n"
        "plan = AAHConfig(((512, 512, 3575, 3575),) * 3, sink_tokens=4)\n"
        "ids, chunks, sizes = random_ids(1, 8192), [256] * 32, {}\n"
        "with torch.no_grad():\n"
        "    cache = DynamicCache(config=model.config)\n"
        "    for part in ids.split(chunks, 1): model.model(part, use_cache=True, **{sys.argv[2]: cache})\n"
        "    sizes['dynamic'] = live(cache)\n"
        "    patch_model(model, config=plan)\n"
        "    cache = AAHCache(model)\n"
        "    for part in ids.split(chunks, 1): model.model(part, use_cache=True, **{sys.argv[2]: cache})\n"
        "    sizes['ours'] = live(cache)\n"
        "sizes['kv'], sizes['bytes'] = coverage(model, 8192).kv, coverage(model, 8192).kv_bytes\n"
        "print(json.dumps(sizes))\n"
    )
    tests = str(__file__).rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code, tests, ARGUMENT], check=True, capture_output=True, text=True)
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert abs(sizes["kv"] - 0.25) < 0.001
    assert sizes["ours"] == sizes["bytes"]
    assert sizes["ours"] <= 0.3 * sizes["dynamic"]


@pytest.mark.smollm2
def test_smollm2_through_the_cache(smollm2):
    model, tokenizer = smollm2
    text = "The cache keeps what queries still see. " * 40
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :260]
    chunkings = ([200] + [1] * 60, [130, 1, 129])
    tolerance = fair_tolerance(model, ids, chunkings)
    plan = AAHConfig(tuple(tuple((8, 40, 96)[(layer + h // 3) % 3] for h in range(9)) for layer in range(30)))
    try:
        patch_model(model, config=plan)
        with torch.no_grad():
            want = model(ids, use_cache=False).logits
            for chunks in chunkings:
                cache = AAHCache(model)
                got = through(model, ids, cache, chunks)
                assert float((got - want).abs().max()) <= tolerance
                assert cache.nbytes() == cache.nbytes("allocated") == coverage(model, 260).kv_bytes
    finally:
        unpatch_model(model)


def test_a_dynamic_cache_of_a_patched_model_is_as_exact(llama):
    model, ids = patch_model(llama, config=mixed_plan(2)), random_ids(1, 40)
    with torch.no_grad():
        got = through(model, ids, DynamicCache(config=model.config), [20, 1, 19])
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)
