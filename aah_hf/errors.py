"""Exceptions of this package; every one says what was wrong, with the value, and what to do."""


class AAHError(Exception):
    """Base class of every error that aah_hf raises on purpose."""


class PlanError(AAHError, ValueError):
    """A plan (windows, sink tokens, version) is malformed or does not fit the model."""


class UnsupportedModelError(AAHError, ValueError):
    """The model's family or configuration cannot run per-head windows; the message says why."""


class CalibrationError(AAHError, ValueError):
    """Calibration data or settings cannot work: too little text, an unreachable budget, ..."""


class OperatorError(AAHError, ValueError):
    """Tensors or options given to windowed attention are inconsistent or unsupported."""


class CacheError(AAHError, RuntimeError):
    """A cache is used in a way that it cannot answer exactly: another plan or batch, an interrupted forward pass, ..."""
