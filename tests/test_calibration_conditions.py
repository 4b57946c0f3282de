"""Calibration where the caller's surroundings are unusual: the same curves as ever, or a clear error."""

from __future__ import annotations

import accelerate
import numpy as np
import pytest
import torch
from conftest import mixed_plan, random_ids, tiny_model
from transformers import AutoModelForCausalLM

import aah_hf
from aah_hf import CalibrationConfig, CalibrationError, calibrate, patch_model
from aah_hf.calibration import output_error_curves

CANDIDATES, LENGTH = (4, 16, None), 96
CONFIG = CalibrationConfig(candidates=(4, 16), seq_len=LENGTH, num_sequences=2, recall_fraction=0)


def measured(model) -> np.ndarray:
    """Error curves under full attention and, against these, under a plan."""
    ids = list(random_ids(2, LENGTH))
    plain = output_error_curves(model, ids, CANDIDATES)
    under = output_error_curves(model, ids, CANDIDATES, plan=mixed_plan().windows)
    return np.stack([plain.errors, under.errors])


@pytest.mark.parametrize("model_type", ["llama", "glm4", "gpt_oss"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_is_measured_like_one_in_memory(model_type, where, tmp_path):
    """accelerate's hooks replace every `forward`, and between calls the weights are on `meta`."""
    model = tiny_model(model_type)
    expected, plan = measured(model), calibrate(model, random_ids(3, LENGTH), calibration=CONFIG)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        model.save_pretrained(tmp_path / "model")
        places = {name: "disk" for name, _ in model.named_children()}
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model",
            device_map={**places, "lm_head": "cpu"},
            offload_folder=tmp_path / "weights",
            attn_implementation=model.config._attn_implementation,
        )
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"
    np.testing.assert_allclose(measured(model), expected, rtol=1e-5, atol=1e-12)
    patch_model(model, random_ids(3, LENGTH), calibration=CONFIG)
    assert aah_hf.AAHConfig.from_model(model).windows == plan.windows
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"


def test_autocast_of_the_caller_changes_no_measurement():
    model = tiny_model()
    expected = measured(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(measured(model), expected)
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_another_default_dtype_changes_no_measurement(model_type, dtype):
    model = tiny_model(model_type)
    expected = measured(model)
    plan = calibrate(model, random_ids(3, LENGTH), calibration=CONFIG)
    torch.set_default_dtype(dtype)
    try:
        np.testing.assert_array_equal(measured(model), expected)
        assert calibrate(model, random_ids(3, LENGTH), calibration=CONFIG).windows == plan.windows
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_projection_that_is_not_finite_is_named(value):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, 5] = value
    with pytest.raises(CalibrationError, match="an output projection holds NaN or inf"):
        output_error_curves(model, random_ids(1, LENGTH), CANDIDATES)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_config_object_are_not_calibrated_at_the_same_time():
    """Which attention runs is said by the config: the second model would run the first one's, or stock attention."""
    first = tiny_model()
    second = type(first)(first.config).eval()
    refused = []

    def meanwhile(*_):
        with pytest.raises(CalibrationError, match="same config object"):
            output_error_curves(second, random_ids(1, LENGTH), CANDIDATES)
        refused.append(True)

    expected = output_error_curves(first, random_ids(1, LENGTH), CANDIDATES).errors
    handle = first.model.norm.register_forward_pre_hook(meanwhile)
    np.testing.assert_array_equal(output_error_curves(first, random_ids(1, LENGTH), CANDIDATES).errors, expected)
    handle.remove()
    assert refused and first.config._attn_implementation == "sdpa"
    assert output_error_curves(second, random_ids(1, LENGTH), CANDIDATES).errors.any()


@pytest.mark.parametrize("tokenizer", ["HuggingFaceTB/SmolLM2-135M", 3, {"vocab": 1}])
def test_a_tokenizer_that_is_only_a_name_is_refused(tokenizer):
    model = tiny_model()
    for data in (["some text"], random_ids(3, LENGTH)):
        with pytest.raises(CalibrationError, match=r"tokenizer is .*; pass the object"):
            patch_model(model, data, tokenizer=tokenizer)
    assert not aah_hf.is_patched(model)


@pytest.mark.parametrize("settings", [{"budget": 0.5}, 0.5, "kv:0.5", CalibrationConfig])
def test_settings_of_another_type_are_refused(settings):
    model = tiny_model()
    for call in (calibrate, patch_model):
        with pytest.raises(CalibrationError, match="pass a CalibrationConfig"):
            call(model, random_ids(3, LENGTH), calibration=settings)
    assert not aah_hf.is_patched(model)
