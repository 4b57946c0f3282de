"""Weights of the depth: measured where errors in a block of layers reach the predictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import random_ids, tiny_model

from aah_hf.calibration import output_error_curves
from aah_hf.calibration.sensitivity import depth_weights, spread
from aah_hf.calibration.taps import products, windowed_products
from aah_hf.evaluation.quality import last_logits, mean_kl

CANDIDATES, LAYERS, HEADS, LENGTH = (4, 16, None), 3, 4, 96


@pytest.fixture
def model():
    model = tiny_model(num_hidden_layers=LAYERS)
    with torch.no_grad():  # attention must matter
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 40
    return model


def test_weights_are_divergence_per_error_of_each_block(model):
    sequences, windows = list(random_ids(2, LENGTH)), [[4] * HEADS] * LAYERS
    curves = output_error_curves(model, sequences, CANDIDATES)
    weights = depth_weights(model, sequences, windows, curves)

    run, expected = last_logits(model, 0.75), []
    for layer in range(LAYERS):
        plan = [[4] * HEADS if index == layer else [None] * HEADS for index in range(LAYERS)]
        divergence = 0.0
        for ids in sequences:
            with torch.no_grad():
                base = run(ids[None])
                with products(model, windowed_products(plan, 4)):
                    divergence += mean_kl(base[0, :-1], run(ids[None])[0, :-1]) / len(sequences)
        expected.append(divergence / (curves.errors[layer, :, 0].sum() / curves.tokens))
    expected = np.array(expected)
    expected = np.clip(expected, np.median(expected) / 4, np.median(expected) * 4)
    np.testing.assert_allclose(weights, expected / expected.mean(), rtol=1e-5)
    assert weights.std() > 0.01


def test_blocks_that_say_nothing_get_a_middle_weight(model):
    sequences = list(random_ids(1, LENGTH))
    curves = output_error_curves(model, sequences, CANDIDATES)
    windows = [[4] * HEADS, [None] * HEADS, [4] * HEADS]
    first, silent, last = depth_weights(model, sequences, windows, curves)
    assert min(first, last) < silent < max(first, last)
    np.testing.assert_array_equal(depth_weights(model, sequences, [[None] * HEADS] * LAYERS, curves), np.ones(LAYERS))


def test_a_layer_that_cannot_reach_the_predictions_weighs_least(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 2000  # what attention wrote is drowned right after
    sequences = list(random_ids(2, LENGTH))
    curves = output_error_curves(model, sequences, CANDIDATES)
    weights = depth_weights(model, sequences, [[4] * HEADS] * LAYERS, curves)
    assert len(weights) == LAYERS and weights.min() > 0 and weights.mean() == pytest.approx(1)
    assert weights.argmin() == 0


def test_the_model_is_left_as_it_was_and_progress_is_told(model):
    sequences = list(random_ids(2, LENGTH))
    curves = output_error_curves(model, sequences, CANDIDATES)
    model.train()
    told = []
    depth_weights(model, sequences, [[4] * HEADS] * LAYERS, curves, progress=lambda *step: told.append(step))
    assert told == [("weigh", n, 2 * LAYERS) for n in range(1, 2 * LAYERS + 1)]
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_sequences_are_picked_from_first_to_last():
    assert spread([0, 1, 2, 3], 2) == [0, 3]
    assert spread([0, 1, 2, 3, 4], 3) == [0, 2, 4]
    assert spread([7], 2) == [7]
