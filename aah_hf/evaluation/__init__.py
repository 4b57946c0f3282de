"""Measuring what a plan costs: paired perplexity, KL and recall of a patched model against its base."""

from .quality import Limits, Quality, compare, concerns, last_logits

__all__ = ["Limits", "Quality", "compare", "concerns", "last_logits"]
