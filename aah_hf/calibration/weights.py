"""The controllers of a whole model: made from a seed, written beside the model, read back.

They are a file of their own, `aah_controller.safetensors`: the model loads and runs without it, because its
windows stand in the plan. Only to go on deciding are they needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CalibrationError
from ..files import replacing
from ..plan import AAHConfig
from .controller import Controller
from .regimes import RegimeConfig

CONTROLLER_FILE = "aah_controller.safetensors"
FORMAT_VERSION = 1
MAX_FILE_BYTES = 2**30
_LAYER = re.compile(r"layers\.(\d+)\.")


class Controllers(nn.ModuleList):
    """One controller per layer, and the regime that they decide under (method.md §5).

    Attributes:
        regime: what they were made or trained for.
    """

    def __init__(self, layers: list[Controller], regime: RegimeConfig) -> None:
        super().__init__(layers)
        self.regime = regime

    @classmethod
    def untrained(cls, regime: RegimeConfig, layers: int) -> Controllers:
        """Randomly initialised controllers, drawn from the regime's seed; torch's own generator is not touched.

        In the paper's training loop they stay like this: argmax passes them no gradient (method.md §7).
        """
        joint = regime.joint_siblings and regime.groups != "heads"
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(regime.seed)
            made = [
                Controller(len(regime.candidate_windows), sibling_hidden=64 if joint else None) for _ in range(layers)
            ]
        return cls([controller.requires_grad_(False) for controller in made], regime)

    @classmethod
    def of_plan(cls, plan: AAHConfig) -> Controllers | None:
        """The untrained controllers that made a plan with objective "paper"; None where it has none."""
        if plan.provenance.get("objective") != "paper":
            return None
        regime = RegimeConfig.from_dict(plan.provenance.get("regime"))
        return cls.untrained(regime, plan.num_layers) if regime.windows == "controller" else None

    def check_fits(self, regime: RegimeConfig, layers: int) -> None:
        """Raise CalibrationError unless these can decide under `regime` in a model of `layers` layers."""
        if len(self) != layers:
            raise CalibrationError(f"there are controllers for {len(self)} layers and the model has {layers}.")
        wanted, joint = len(regime.candidate_windows), regime.joint_siblings and regime.groups != "heads"
        for index, controller in enumerate(self):
            assert isinstance(controller, Controller)
            if controller.candidates != wanted:
                raise CalibrationError(
                    f"the controller of layer {index} scores {controller.candidates} windows and the regime has {wanted} "
                    f"candidates {regime.candidate_windows}; they belong to another regime."
                )
            if joint and controller.sibling is None:
                raise CalibrationError(
                    f"regime {regime.name!r} scores siblings jointly and the controller of layer {index} has no weights "
                    "for that; they belong to another regime, or pass joint_siblings=False."
                )


def save_controllers(controllers: Controllers, folder: str | os.PathLike) -> Path:
    """Write the controllers into a checkpoint's folder, whole or not at all.

    Returns:
        The path of the file.
    """
    tensors = {f"layers.{name}": x.detach().cpu().contiguous() for name, x in controllers.state_dict().items()}
    metadata = {"aah_controller": str(FORMAT_VERSION), "regime": json.dumps(controllers.regime.to_dict())}
    return write_safetensors(tensors, Path(folder) / CONTROLLER_FILE, metadata)


def load_controllers(folder: str | os.PathLike) -> Controllers:
    """Read the controllers of a checkpoint.

    Args:
        folder: the checkpoint's folder, or the file itself.

    Raises:
        CalibrationError: there are none, or the file is truncated, of another kind or written by a newer version.
    """
    path = Path(folder)
    path = path / CONTROLLER_FILE if path.is_dir() else path
    tensors, metadata = read_safetensors(path, "controllers")
    if metadata.get("aah_controller") != str(FORMAT_VERSION):
        raise CalibrationError(
            f"{path} has controller format {metadata.get('aah_controller')!r} and this aah_hf reads {FORMAT_VERSION}: "
            "it is no controller file, or `pip install -U aah-hf`."
        )
    try:
        regime = RegimeConfig.from_dict(json.loads(metadata.get("regime", "")))
    except (ValueError, RecursionError) as error:  # CalibrationError is a ValueError
        raise CalibrationError(f"{path} holds no valid regime: {error}") from error
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if not layers or layers != set(range(len(layers))):
        raise CalibrationError(f"{path} has controllers of layers {sorted(layers)}; expected 0, 1, 2, … without gaps.")
    try:
        made = [Controller.from_tensors(tensors, f"layers.{index}.") for index in range(len(layers))]
    except (RuntimeError, ValueError, AttributeError) as error:
        raise CalibrationError(f"{path} holds controller weights that do not fit each other: {error}") from error
    controllers = Controllers([controller.requires_grad_(False) for controller in made], regime)
    controllers.check_fits(regime, len(made))
    return controllers


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> Path:
    """Write a safetensors file so that a reader sees the old one or the new one, never half of it."""
    with replacing(path) as unfinished:
        save_file(dict(tensors), unfinished, metadata=metadata)
    return path


def read_safetensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a small safetensors file.

    Raises:
        CalibrationError: missing, too large, truncated, of another format, or holding NaN or infinity.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CalibrationError(f"{path} has {path.stat().st_size} bytes; {what} take at most {MAX_FILE_BYTES}.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise CalibrationError(f"there are no {what} at {path}.") from error
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{path} cannot be read as {what} (truncated, or no safetensors file): {error}. Save it again."
        ) from error
    broken = sorted(name for name, x in tensors.items() if x.is_floating_point() and not bool(torch.isfinite(x).all()))
    if broken:
        raise CalibrationError(f"{path} holds NaN or infinity in {broken[:3]}.")
    return tensors, metadata
