"""Windowed attention as a torch function. Knows nothing of transformers."""

from .attention import windowed_attention
from .sequences import Run, Sequences

__all__ = ["Run", "Sequences", "windowed_attention"]
