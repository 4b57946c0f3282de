"""Choosing windows: text → token sequences → error curves → windows within a budget (method.md §8)."""

from .allocation import Budget, allocate
from .calibrate import calibrate, calibration_text, plan_from_text
from .check import calibrate_and_check, check
from .config import CalibrationConfig
from .recall import RecallSequence, recall_sequences
from .statistics import ErrorCurves, output_error_curves
from .text import CalibrationText, prepare, token_sequences

__all__ = [
    "Budget",
    "CalibrationConfig",
    "CalibrationText",
    "ErrorCurves",
    "RecallSequence",
    "allocate",
    "calibrate",
    "calibrate_and_check",
    "calibration_text",
    "check",
    "output_error_curves",
    "plan_from_text",
    "prepare",
    "recall_sequences",
    "token_sequences",
]
