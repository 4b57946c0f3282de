"""What a regime carries from step to step, in one safetensors file: an interrupted training goes on as if it had not been."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration.features import HeadStatistics
from ..calibration.grouping import Level, group_of
from ..calibration.regimes import LayerState, RegimeConfig, Step
from ..calibration.run import RegimeRun
from ..calibration.weights import Controllers, load_controllers, read_safetensors, write_safetensors
from ..errors import CalibrationError

STATE_FILE = "aah_regime.safetensors"
FORMAT_VERSION = 1


def save_state(run: RegimeRun, folder: str | os.PathLike) -> Path:
    """Write a run between two of its steps; the controllers have a file of their own."""
    tensors: dict[str, Tensor] = {}
    for layer, (state, step) in enumerate(zip(run.states, run.steps)):
        for name, values in _arrays(state, step).items():
            tensors[f"layers.{layer}.{name}"] = torch.tensor(values)  # a copy: levels may share one array
    facts = {
        "version": FORMAT_VERSION,
        "regime": run.regime.to_dict(),
        "step": run.step,
        "decisions": run.states[0].decisions,
        "seq_len": run.seq_len,
        "levels": [[level.groups for level in state.levels] for state in run.states],
        "controllers": run.controllers is not None,
    }
    return write_safetensors(tensors, Path(folder) / STATE_FILE, {"aah_regime": json.dumps(facts)})


def load_state(run: RegimeRun, folder: str | os.PathLike) -> None:
    """Bring a fresh run of the same regime and model to where a saved one was.

    Raises:
        CalibrationError: no such file, a damaged one, or one of another regime or model; the run is unchanged then.
    """
    path = Path(folder) / STATE_FILE
    tensors, metadata = read_safetensors(path, "a regime's state")
    try:
        facts = json.loads(metadata.get("aah_regime", ""))
        if facts["version"] != FORMAT_VERSION:
            raise CalibrationError(f"version {facts['version']!r} is not {FORMAT_VERSION}")
        regime = RegimeConfig.from_dict(facts["regime"])
        layers, heads = len(run.states), len(run.states[0].attention.entropy)
        if regime != run.regime:
            raise CalibrationError(f"it was saved under {regime} and this run is under {run.regime}")
        if len(facts["levels"]) != layers:
            raise CalibrationError(f"it has {len(facts['levels'])} layers and the model has {layers}")
        found = [_layer(layer, heads, tensors, facts) for layer in range(layers)]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CalibrationError(f"{path} does not continue this run: {error!s}.") from error
    controllers = _controllers(run, folder, facts)
    run.states, run.steps = [state for state, _ in found], [step for _, step in found]
    run.seq_len, run.controllers = facts["seq_len"], controllers


def _controllers(run: RegimeRun, folder: str | os.PathLike, facts: dict[str, Any]) -> Controllers | None:
    if not facts["controllers"]:
        return None
    controllers = load_controllers(folder)
    controllers.check_fits(run.regime, len(run.states))
    return controllers


def _arrays(state: LayerState, step: Step) -> dict[str, np.ndarray]:
    attention = state.attention
    arrays = {
        "attention": np.stack([attention.entropy, attention.output_norm, attention.usage]),
        "windows": np.array([w or 0 for w in step.windows], dtype=np.int64),  # 0 is full attention
    }
    arrays |= {f"level.{index}": level.features for index, level in enumerate(state.levels)}
    for name in ("smoothed", "index", "executed"):
        value = getattr(state, name)
        if value is not None:
            arrays[name] = value
    return arrays


def _layer(layer: int, heads: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> tuple[LayerState, Step]:
    def array(name: str, *shape: int) -> np.ndarray | None:
        tensor = tensors.get(f"layers.{layer}.{name}")
        if tensor is not None and tuple(tensor.shape) != shape:
            raise CalibrationError(f"{name} of layer {layer} has shape {tuple(tensor.shape)}, expected {shape}")
        return None if tensor is None else tensor.numpy()

    attention, windows = array("attention", 3, heads), array("windows", heads)
    if attention is None or windows is None:
        raise CalibrationError(f"layer {layer} is missing")
    levels, items = [], heads
    for index, stored in enumerate(facts["levels"][layer]):
        groups = tuple(tuple(int(item) for item in group) for group in stored)
        if sorted(item for group in groups for item in group) != list(range(items)):
            raise CalibrationError(f"level {index} of layer {layer} does not hold each of {items} items once")
        features = array(f"level.{index}", len(groups), 9)
        if features is None:
            raise CalibrationError(f"level {index} of layer {layer} has no features")
        levels.append(Level(groups, features))
        items = len(groups)
    state = LayerState(
        HeadStatistics(*attention),
        layer,
        int(facts["step"]),
        int(facts["decisions"]),
        array("smoothed", heads, 9),
        tuple(levels),
        array("index", heads),
        array("executed", heads),
    )
    grouped = (
        levels[0].groups if levels and len(group_of(levels[0].groups)) and facts["regime"]["groups"] != "heads" else ()
    )
    return state, Step(tuple(int(w) or None for w in windows), grouped, "restored")
