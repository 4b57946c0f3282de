"""Every way to generate with the cache that shrinks: tokens as if nothing had ever been dropped."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from caching import ARGUMENT, assert_same_where_clear, left_padded
from conftest import FAMILIES, mixed_plan, random_ids, tiny_model
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

from aah_hf import AAHCache, AAHConfig, AAHError, CacheError, coverage, patch_model, unpatch_model
from aah_hf.generation import ENVIRONMENT

NEW = 40
PLAIN = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}


def patched(model_type="llama", seed=2, layers=3, **overrides):
    model = tiny_model(model_type, num_hidden_layers=layers, **overrides)
    return patch_model(model, config=mixed_plan(seed, layers=layers))


def generate(model, ids, mask=None, **settings):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **{**PLAIN, **settings})


def recompute(model, ids, new=NEW):
    return generate(model, ids, use_cache=False, max_new_tokens=new)


def cache_of(output):
    return output[ARGUMENT]


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 5}], ids=str)
def test_greedy_equals_recomputation(family_model, settings):
    model = patch_model(family_model, config=mixed_plan(2))
    compared = 0
    for seed in (1, 2, 3):
        ids = random_ids(1, 30, seed)
        compared += assert_same_where_clear(model, ids, generate(model, ids, **settings), recompute(model, ids))
    assert compared > NEW


def test_generate_uses_it_unless_told_otherwise(llama, monkeypatch):
    model, ids = patch_model(llama, config=mixed_plan(2)), random_ids(1, 20)
    output = generate(model, ids, return_dict_in_generate=True)
    assert type(cache_of(output)) is AAHCache
    assert cache_of(output).nbytes() == coverage(model, 20 + NEW - 1).kv_bytes
    dynamic = generate(model, ids, return_dict_in_generate=True, cache_implementation="dynamic")
    assert type(cache_of(dynamic)) is DynamicCache and torch.equal(dynamic.sequences, output.sequences)
    mine = DynamicCache(config=model.config)
    generate(model, ids, **{ARGUMENT: mine})
    assert mine.get_seq_length() == 20 + NEW - 1  # whoever passes a cache holds on to it
    monkeypatch.setenv(ENVIRONMENT, "0")
    assert type(cache_of(generate(model, ids, return_dict_in_generate=True))) is DynamicCache
    monkeypatch.setenv(ENVIRONMENT, "maybe")
    with pytest.raises(AAHError, match="AAH_HF_KV_CACHE is 'maybe'"):
        generate(model, ids)
    monkeypatch.delenv(ENVIRONMENT)
    unpatch_model(model)
    assert type(cache_of(generate(model, ids, return_dict_in_generate=True))) is DynamicCache


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", [0, 2, 5], ids=lambda i: FAMILIES[i][0])
def test_left_padded_batches_generate_like_each_row_alone(family, beams):
    model = patched(FAMILIES[family][1], 1, **FAMILIES[family][2])
    rows = [random_ids(1, n, seed=n)[0] for n in (33, 20, 2, 1)]  # two prompts shorter than the sink tokens
    ids, mask, _ = left_padded(rows)
    batch = generate(model, ids, mask, num_beams=beams)[:, ids.shape[1] :]
    chunked = generate(model, ids, mask, num_beams=beams, prefill_chunk_size=5)[:, ids.shape[1] :]
    assert torch.equal(batch, chunked)
    for i, row in enumerate(rows):
        alone = generate(model, row[None], num_beams=beams, cache_implementation="dynamic")[:, len(row) :]
        assert torch.equal(batch[i : i + 1], alone), f"row {i} of length {len(row)}"


def test_right_padded_prompts_generate_like_with_a_dynamic_cache():
    model = patched(seed=1)
    ids = random_ids(3, 24)
    mask = (torch.arange(24) < torch.tensor([[24], [11], [1]])).long()  # one shorter than the sink tokens
    want = generate(model, ids, mask, cache_implementation="dynamic")
    assert torch.equal(generate(model, ids, mask), want)
    assert torch.equal(generate(model, ids, mask, prefill_chunk_size=5), want)


def test_beams_and_returned_sequences_score_like_recomputation():
    model, ids = patched(), random_ids(2, 30)
    settings = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    got, want = (generate(model, ids, use_cache=use, **settings) for use in (True, False))
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.sequences, want.sequences)


def test_sampling_draws_the_same_tokens():
    model, ids = patched(), random_ids(2, 30)
    outputs = []
    for cache in (None, "dynamic"):
        torch.manual_seed(5)
        outputs.append(generate(model, ids, do_sample=True, num_return_sequences=3, cache_implementation=cache))
    assert outputs[0].shape == (6, 30 + NEW)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("helper", ["patched", "plain", "itself"])
def test_assisted_decoding_equals_greedy(helper):
    model, ids = patched(), random_ids(1, 30)
    assistant = {"patched": lambda: patched(seed=5, layers=2), "plain": tiny_model, "itself": lambda: patched()}[
        helper
    ]()
    assistant.generation_config.num_assistant_tokens = 7
    output = generate(model, ids, assistant_model=assistant, return_dict_in_generate=True)
    assert assert_same_where_clear(model, ids, output.sequences, recompute(model, ids)) > 10
    assert type(cache_of(output)) is AAHCache
    # the cache goes on as an ordinary one, without what verification held on to
    more = generate(model, output.sequences, **{ARGUMENT: cache_of(output)})
    assert assert_same_where_clear(model, output.sequences, more, recompute(model, output.sequences)) > 0
    windows = AAHConfig.uniform(model, 8, sink_tokens=2)
    limited = patch_model(model, config=windows)
    held = AAHCache(limited)
    generate(limited, ids, assistant_model=assistant, **{ARGUMENT: held})
    generate(limited, random_ids(1, 200), **{ARGUMENT: held})
    assert held.nbytes("allocated") == held.nbytes() == coverage(limited, 10**6).kv_bytes


def test_plain_model_assisted_by_a_patched_one():
    model, ids = tiny_model(), random_ids(1, 30)
    got = generate(model, ids, assistant_model=patched(seed=5))
    assert assert_same_where_clear(model, ids, got, recompute(model, ids)) > 10


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", [0, 2], ids=lambda i: FAMILIES[i][0])
def test_early_exit_equals_greedy(family, layers, monkeypatch):
    made, original = [], AAHCache.__init__

    def init(self, config, **settings):
        made.append(config.config.num_hidden_layers)
        original(self, config, **settings)

    monkeypatch.setattr(AAHCache, "__init__", init)
    model = patched(FAMILIES[family][1], 1, **FAMILIES[family][2])
    rows = [random_ids(1, 30), random_ids(1, 3)]
    for ids in rows:
        output = generate(model, ids, assistant_early_exit=layers, return_dict_in_generate=True)
        assert assert_same_where_clear(model, ids, output.sequences, generate(model, ids)) > 10
        assert type(cache_of(output)) is AAHCache and model.config.num_hidden_layers == 3
    assert set(made) == {3}  # the early exit drafts over a DynamicCache


def test_a_cache_that_holds_the_whole_prompt_is_refused_before_anything_runs():
    model, text = patched(), random_ids(2, 30)
    cache = AAHCache(model)
    with torch.no_grad():
        model(text[:, :18], use_cache=True, **{ARGUMENT: cache})
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[0, 0] = 0
    embed = model.get_input_embeddings()
    for prompt in (
        {"inputs": text[:, :10]},
        {"inputs": text[:, :18]},
        {"inputs": text[:, :18], "attention_mask": mask},
        {"inputs": text[:, 18:30], "attention_mask": torch.ones(2, 12, dtype=torch.long)},
        {"inputs_embeds": embed(text[:, :18]).detach()},
    ):
        length = prompt.get("inputs", text[:, :18]).shape[1]
        with pytest.raises(CacheError, match=f"holds 18 tokens and the prompt has {length}.* crop or reset"):
            model.generate(**prompt, **PLAIN, **{ARGUMENT: cache})
        assert cache.get_seq_length() == 18
    want = generate(model, text)
    embeds = embed(text).detach()
    new = {"inputs": text[:, 18:], "attention_mask": torch.ones_like(text)}
    for prompt, skip in (({"inputs": text}, 30), (new, 12), ({"inputs_embeds": embeds}, 0)):
        got = model.generate(**prompt, **PLAIN, **{ARGUMENT: copy.deepcopy(cache)})
        assert torch.equal(got[:, skip:], want[:, 30:])


def test_a_conversation_goes_on_with_the_same_cache():
    model, cache = patched("qwen2", 1), None
    cache, text = AAHCache(model), random_ids(2, 25)
    for turn in range(4):
        text = generate(model, text, max_new_tokens=15, **{ARGUMENT: cache})
        assert cache.get_seq_length() == text.shape[1] - 1
        fresh = generate(model, text[:, :-15], max_new_tokens=15, cache_implementation="dynamic")
        assert torch.equal(text, fresh)
        text = torch.cat([text, random_ids(2, 9, seed=turn)], 1)


def test_a_prompt_is_cached_once_and_copied_for_many():
    model, prompt = patched(), random_ids(1, 40)
    prefix = AAHCache(model)
    with torch.no_grad():
        model(prompt, use_cache=True, **{ARGUMENT: prefix})
    for seed in (7, 8):
        text = torch.cat([prompt, random_ids(1, 5, seed)], 1)
        got = generate(model, text, **{ARGUMENT: copy.deepcopy(prefix)})
        assert torch.equal(got, generate(model, text, cache_implementation="dynamic"))
    assert prefix.get_seq_length() == 40
    many = copy.deepcopy(prefix)
    many.batch_repeat_interleave(3)
    text = torch.cat([prompt.expand(3, -1), random_ids(3, 4)], 1)
    assert torch.equal(generate(model, text, **{ARGUMENT: many}), generate(model, text, cache_implementation="dynamic"))


def test_a_prefix_made_in_inference_mode_is_used_outside_of_it():
    model, prompt = patched(), random_ids(1, 40)
    prefix = AAHCache(model)
    with torch.inference_mode():
        model(prompt, use_cache=True, **{ARGUMENT: prefix})
    text = torch.cat([prompt, random_ids(1, 5)], 1)
    assert torch.equal(
        generate(model, text, **{ARGUMENT: prefix}), generate(model, text, cache_implementation="dynamic")
    )


def test_streaming_puts_every_token_once():
    class Streamer:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self):
            self.ended = True

    model, ids, streamer = patched(), random_ids(1, 12), Streamer()
    want = generate(model, ids, streamer=streamer)
    assert streamer.ended and streamer.tokens == want[0].tolist()


class FailAt(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            raise KeyboardInterrupt
        return scores


def test_an_exception_in_a_logits_processor_leaves_a_cache_that_goes_on():
    model, ids, cache = patched(), random_ids(1, 30), None
    want = generate(model, ids)
    for length in (30, 31, 45):
        cache = AAHCache(model)
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, logits_processor=LogitsProcessorList([FailAt(length)]), **{ARGUMENT: cache})
        seen = cache.get_seq_length()
        assert seen == length
        rest = generate(model, torch.cat([want[:, :seen], want[:, seen : seen + 1]], 1), **{ARGUMENT: cache})
        assert torch.equal(rest[:, : want.shape[1]], want)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_exception_inside_the_forward_pass_leaves_an_invalid_cache(layer):
    model, ids, cache = patched(), random_ids(1, 30), None
    cache = AAHCache(model)
    with torch.no_grad():
        model(ids, use_cache=True, **{ARGUMENT: cache})

        def fail(*args):
            raise RuntimeError("out of memory")

        projection = model.model.layers[layer].self_attn.o_proj
        hook = projection.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, :1], use_cache=True, **{ARGUMENT: cache})
        hook.remove()
        for use in (lambda: model(ids[:, :1], use_cache=True, **{ARGUMENT: cache}), lambda: cache.crop(-1)):
            if layer < 2:  # behind the last attention everything was stored
                with pytest.raises(CacheError, match="interrupted"):
                    use()
        with pytest.raises(CacheError, match="interrupted" if layer < 2 else "holds 31 tokens and the prompt has 30"):
            generate(model, ids, **{ARGUMENT: cache})
        cache.reset()
        assert torch.equal(generate(model, ids, **{ARGUMENT: cache}), generate(model, ids))


def test_an_interrupted_reordering_leaves_an_invalid_cache(monkeypatch):
    model, ids = patched(), random_ids(2, 30)
    cache = AAHCache(model)
    with torch.no_grad():
        model(ids, use_cache=True, **{ARGUMENT: cache})
        monkeypatch.setattr(cache.layers[1], "reorder_cache", lambda indices: cache.nothing_like_it)
        with pytest.raises(AttributeError):
            cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(CacheError, match="interrupted"):
            model(ids[:, :1], use_cache=True, **{ARGUMENT: cache})
        cache.reset()
        model(ids, use_cache=True, **{ARGUMENT: cache})


def test_two_threads_with_two_caches_do_not_disturb_each_other():
    model = patched()
    prompts = [random_ids(1, n, n) for n in (30, 17, 50, 3)]
    want, got = [generate(model, p) for p in prompts], [None] * 4

    def work(i):
        for _ in range(3):
            got[i] = generate(model, prompts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", [0, 2, 5], ids=lambda i: FAMILIES[i][0])
def test_other_caches_stay_what_they_are(family, implementation):
    model = patched(FAMILIES[family][1], **FAMILIES[family][2])
    ids = random_ids(1, 30)
    output = generate(model, ids, cache_implementation=implementation, return_dict_in_generate=True)
    assert not isinstance(cache_of(output), AAHCache)
    assert assert_same_where_clear(model, ids, output.sequences, recompute(model, ids)) > 0


def test_continuous_batching_is_refused_with_an_alternative():
    model = patched()
    for call in (
        lambda: model.generate_batch([[3, 4, 5]], generation_config=GenerationConfig(max_new_tokens=2)),
        lambda: model.generate(torch.tensor([[3, 4, 5]]), cache_implementation="paged", max_new_tokens=2),
        lambda: model.init_continuous_batching(),
    ):
        with pytest.raises(AAHError, match=r"generate\(\) with a padded batch"):
            call()


def test_peft_and_compiled_wrappers_generate_with_it():
    from peft import LoraConfig, get_peft_model

    model, ids = patched(), random_ids(1, 30)
    want = generate(model, ids)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    output = generate(wrapped, ids, return_dict_in_generate=True)
    assert type(cache_of(output)) is AAHCache and torch.equal(output.sequences, want)


@pytest.mark.slow
def test_ten_thousand_tokens_at_constant_memory():
    model = patch_model(tiny_model(), config=AAHConfig.uniform(tiny_model(), 24, sink_tokens=4))
    cache = AAHCache(model)
    buffers = set()

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 60:
                buffers.update((layer.keys.data_ptr(), layer.keys.numel()) for layer in cache.layers)
                assert cache.nbytes("allocated") == cache.nbytes() == coverage(model, 10**6).kv_bytes
            return scores

    generate(
        model,
        random_ids(1, 40),
        max_new_tokens=10_000,
        logits_processor=LogitsProcessorList([Watch()]),
        **{ARGUMENT: cache},
    )
    assert len(buffers) == len(cache.layers)
    assert cache.get_seq_length() == 10_039


@pytest.mark.smollm2
def test_smollm2_generates_as_if_nothing_was_dropped(smollm2):
    model, tokenizer = smollm2
    texts = ["def fibonacci(n):\n" * 12, "The cache keeps what queries still see. " * 12 + "The cache"]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    plan = AAHConfig(tuple(tuple((8, 24, 64)[(layer + h // 3) % 3] for h in range(9)) for layer in range(30)))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    try:
        patch_model(model, config=plan)
        want = model.generate(**batch, **settings, use_cache=False)
        assert torch.equal(model.generate(**batch, **settings), want)
        assert torch.equal(model.generate(**batch, **settings, prefill_chunk_size=37), want)
        one = {name: t[1:, batch["attention_mask"][1].argmax() :] for name, t in batch.items()}
        alone = want[1:, -one["input_ids"].shape[1] - 6 :]
        assert torch.equal(model.generate(**one, **settings, prompt_lookup_num_tokens=5), alone)
        beams = [model.generate(**batch, **settings, num_beams=2, cache_implementation=c) for c in (None, "dynamic")]
        assert torch.equal(*beams)
    finally:
        unpatch_model(model)
