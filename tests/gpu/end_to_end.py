"""Patched models of real shapes, small and with random weights: prefill and generate() against full recomputation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from cases import error
from check import Check
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from aah_hf import AAHConfig, patch_model, unpatch_model
from aah_hf.ops import attention as operator

# Heads, head size, width, q/k-norm and rotary base of Qwen3-0.6B and Llama-3.2-1B; small all around attention.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "rope_theta": 1e6,
    },
    "llama": {
        "hidden_size": 2048, "intermediate_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "rope_theta": 5e5,
    },
}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS, VOCABULARY = 4, 1009


def run(check: Check) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    dtypes = [torch.float32] if check.small else [torch.float32, torch.bfloat16]
    for name in MODELS:
        model = _model(name, check)
        plan = _plan(model, check)
        for dtype in dtypes:
            label = f"{name}, {dtype}"
            facts[label] = _check_model(check, label, copy.deepcopy(model), plan, dtype)
    return facts


def _model(name: str, check: Check) -> Any:
    settings = MODELS[name] | (SMALL | {"head_dim": MODELS[name]["head_dim"] // 4} if check.small else {})
    theta = settings.pop("rope_theta")
    config = AutoConfig.for_model(
        name,
        **settings,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        num_hidden_layers=2 if check.small else LAYERS,
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.04,  # attention that depends on what it sees
    )  # fmt: skip
    torch.manual_seed(check.seed)
    return AutoModelForCausalLM.from_config(config).eval()


def _plan(model: Any, check: Check) -> AAHConfig:
    """Windows of all kinds in every layer; query heads that share a KV head differ."""
    widths: list[int | None] = [3, 16, 33, None] if check.small else [17, 64, 256, None, 129, 512]
    config = model.config
    return AAHConfig(
        tuple(
            tuple(widths[(layer + head) % len(widths)] for head in range(config.num_attention_heads))
            for layer in range(config.num_hidden_layers)
        ),
        sink_tokens=4,
    )


def _check_model(check: Check, label: str, model: Any, plan: AAHConfig, dtype: torch.dtype) -> dict[str, Any]:
    model = model.to(dtype)
    exact = patch_model(copy.deepcopy(model).double(), config=plan)  # float64 on the CPU, in pure PyTorch
    base = model.to(check.device)
    generator = torch.Generator().manual_seed(check.seed)
    length = 90 if check.small else 700
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    stock = _logits(base, ids)
    patched = patch_model(base, config=plan)
    facts: dict[str, Any] = {}

    with Counted() as counted:
        got = _logits(patched, ids)
    check.expect(counted.calls >= 1, f"{label}: the forward pass did not run the native operator")
    with pure_pytorch():
        eager, want = _logits(patched, ids), _logits(exact, ids)
    facts["prefill"], facts["prefill_eager"] = error(got, want), error(eager, want)
    # whatever the dtype rounds away, the kernel may not be worse than pure PyTorch by much
    bound = max(2e-4 if dtype == torch.float32 else 2e-2, 1.5 * facts["prefill_eager"])
    check.expect(facts["prefill"] <= bound, f"{label}: prefill is off by {facts['prefill']:.3g}, allowed {bound:.3g}")
    hidden = error(got, stock.double())
    check.expect(hidden > 10 * bound, f"{label}: the windows change nothing ({hidden:.3g}), so this shows nothing")

    for batch, settings in _generations(check):
        rows = torch.randint(3, VOCABULARY, (len(batch), max(batch)), generator=generator)
        mask = torch.zeros_like(rows)
        for row, real in enumerate(batch):
            mask[row, -real:] = 1
        what = f"generate, {len(batch)} rows, {settings.get('cache_implementation') or 'dynamic'} cache"
        facts[what] = _generation(check, f"{label}, {what}", patched, rows * mask, mask, settings, dtype)

    back = unpatch_model(patched)
    check.expect(torch.equal(_logits(back, ids), stock), f"{label}: unpatching does not bring the model back")
    for name, value in facts.items():
        check.say(f"{label}, {name}: {value if isinstance(value, str) else f'{value:.2e}'}")
    return facts


def _generations(check: Check) -> list[tuple[list[int], dict[str, Any]]]:
    """Lengths of the (left-padded) rows, and how to generate."""
    lengths = [(40,), (60, 33, 2)] if check.small else [(300,), (600, 333, 2)]
    # without compiling: that is torch's business, and takes longer than all else here
    static = {"cache_implementation": "static", "disable_compile": True}
    return [(list(rows), settings) for rows in lengths for settings in ({}, static)]


def _generation(
    check: Check, label: str, model: Any, ids: Tensor, mask: Tensor, settings: dict[str, Any], dtype: torch.dtype
) -> float:
    """Greedy decoding; every step's logits are held against one forward pass over the finished text, without a cache."""
    ids, mask = ids.to(check.device), mask.to(check.device)
    steps = 12 if check.small else 24
    with Counted() as counted:
        result = model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
            return_dict_in_generate=True, output_logits=True, **settings,
        )  # fmt: skip
    check.expect(counted.calls >= steps, f"{label}: {counted.calls} calls of the native operator in {steps} steps")
    text = result.sequences
    whole = torch.cat([mask, torch.ones_like(text[:, ids.shape[1] :])], 1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        again = model(text, attention_mask=whole, position_ids=positions, use_cache=False).logits
    again = again[:, ids.shape[1] - 1 : -1]
    found = error(torch.stack(result.logits, 1), again)
    check.expect(found <= (5e-4 if dtype == torch.float32 else 6e-2), f"{label}: logits are off by {found:.3g}")
    return found


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids.to(model.device), use_cache=False).logits.double().cpu()


@contextmanager
def pure_pytorch() -> Iterator[None]:
    with mock.patch.object(operator, "_missing", lambda q: ""):
        yield


class Counted(TorchDispatchMode):
    """Counts the calls of native operators, whichever of them a path takes."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "aah"
        return func(*args, **(kwargs or {}))
