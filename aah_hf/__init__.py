"""Asymmetric attention heads for Hugging Face Transformers: every attention head gets its own context.

Importing this package is what makes `AutoModelForCausalLM.from_pretrained` understand patched checkpoints.
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from . import attention as _attention
from . import hooks as _hooks
from .attention import AAHAttention
from .cache import AAHCache
from .calibration import Budget, CalibrationConfig, calibrate
from .coverage import Coverage
from .errors import AAHError, CacheError, CalibrationError, OperatorError, PlanError, UnsupportedModelError
from .ops import Sequences, windowed_attention
from .patching import is_patched, patch_model, unpatch_model
from .plan import AAHConfig, plan_of
from .plan import coverage_of as _coverage_of

try:
    __version__ = _version("aah-hf")
except PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"


def coverage(model, seq_len: int) -> Coverage:
    """Coverage of a patched model (or a config with a plan) at `seq_len` tokens; 1.0 for an unpatched one.

    Returns:
        Coverage(acr, causal, kv, kv_bytes): the paper's attention coverage ratio, the share of causal
        pairs that is computed, the share of keys and values that a shrinking cache keeps, and its bytes for
        one sequence.
    """
    return _coverage_of(plan_of(model), model, seq_len)


_attention.register()
_hooks.install()

__all__ = [
    "AAHAttention",
    "AAHCache",
    "AAHConfig",
    "AAHError",
    "Budget",
    "CacheError",
    "CalibrationConfig",
    "CalibrationError",
    "Coverage",
    "OperatorError",
    "PlanError",
    "Sequences",
    "UnsupportedModelError",
    "calibrate",
    "coverage",
    "is_patched",
    "patch_model",
    "unpatch_model",
    "windowed_attention",
]
