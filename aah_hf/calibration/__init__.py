"""Choosing windows: text → token sequences → error curves → windows within a budget (method.md §8)."""

from .allocation import Budget, allocate
from .calibrate import calibrate, calibration_text, plan_from_text
from .check import calibrate_and_check, check
from .config import CalibrationConfig
from .paper import decide_offline
from .recall import RecallSequence, recall_sequences
from .regimes import REGIMES, RegimeConfig, paper_windows, regime
from .statistics import ErrorCurves, output_error_curves
from .text import CalibrationText, prepare, token_sequences
from .weights import CONTROLLER_FILE, Controllers, load_controllers, save_controllers

__all__ = [
    "CONTROLLER_FILE",
    "REGIMES",
    "Budget",
    "CalibrationConfig",
    "CalibrationText",
    "Controllers",
    "ErrorCurves",
    "RecallSequence",
    "RegimeConfig",
    "allocate",
    "calibrate",
    "calibrate_and_check",
    "calibration_text",
    "check",
    "decide_offline",
    "load_controllers",
    "output_error_curves",
    "paper_windows",
    "plan_from_text",
    "prepare",
    "recall_sequences",
    "regime",
    "save_controllers",
    "token_sequences",
]
