"""The main job on a real pretrained model, at a length that keeps the default suite short."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from aah_hf import AAHAttention, CalibrationConfig, coverage, patch_model, unpatch_model
from aah_hf.demo import documentation

pytestmark = pytest.mark.smollm2


def test_texts_in_patched_model_out_saved_reloaded_and_undone(smollm2, tmp_path):
    model, tokenizer = smollm2
    calibration_text, held_out = documentation()
    ids = tokenizer(held_out[0], return_tensors="pt")["input_ids"][:, :300]
    with torch.no_grad():
        before, keys = model(ids).logits, list(model.state_dict())
    settings = CalibrationConfig(budget=0.5, granularity="head", seq_len=256, num_sequences=2, candidates=(32, 64, 128))
    try:
        patch_model(model, calibration_text, tokenizer=tokenizer, calibration=settings)
        assert coverage(model, 256).causal <= 0.5
        assert list(model.state_dict()) == keys
        with torch.no_grad():
            patched = model(ids).logits
        assert not torch.equal(patched, before)
        model.save_pretrained(tmp_path)
        code = (
            "import sys, json, torch, aah_hf\n"
            "from transformers import AutoModelForCausalLM\n"
            "from safetensors.torch import save_file\n"
            "torch.set_num_threads(1)\n"
            "m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
            "assert all(isinstance(l.self_attn, aah_hf.AAHAttention) for l in m.model.layers)\n"
            "with torch.no_grad(): logits = m(torch.tensor(json.loads(sys.argv[2]))).logits\n"
            "save_file({'logits': logits}, sys.argv[3])\n"
        )
        out = tmp_path / "logits.safetensors"
        subprocess.run([sys.executable, "-c", code, str(tmp_path), json.dumps(ids.tolist()), str(out)], check=True)
        assert torch.equal(load_file(out)["logits"], patched)
    finally:
        unpatch_model(model)
    assert not any(isinstance(m, AAHAttention) for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_generation_from_left_padded_prompts_equals_each_prompt_alone(smollm2):
    model, tokenizer = smollm2
    calibration_text, _ = documentation()
    settings = CalibrationConfig(budget=0.4, granularity="head", seq_len=128, num_sequences=2, candidates=(8, 16, 32))
    tokenizer.padding_side = "left"
    prompts = [
        "def fibonacci(n):",
        "The with statement in Python is used to wrap the execution of a block with methods",
    ]
    try:
        patch_model(model, calibration_text, tokenizer=tokenizer, calibration=settings)
        batch = tokenizer(prompts, return_tensors="pt", padding=True)
        together = model.generate(**batch, max_new_tokens=40, do_sample=False)[:, batch["input_ids"].shape[1] :]
        for row, prompt in enumerate(prompts):
            one = tokenizer([prompt], return_tensors="pt")
            alone = model.generate(**one, max_new_tokens=40, do_sample=False)[:, one["input_ids"].shape[1] :]
            n = alone.shape[1]
            assert torch.equal(together[row, :n], alone[0])
    finally:
        unpatch_model(model)
