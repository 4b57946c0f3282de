"""Measuring what a plan costs: paired perplexity, KL and recall of a patched model against its base."""

from .models import Evaluation, control_plan, evaluate, full_attention, implementation, uniform_of_coverage
from .quality import Limits, Quality, compare, concerns, last_logits

__all__ = [
    "Evaluation",
    "Limits",
    "Quality",
    "compare",
    "concerns",
    "control_plan",
    "evaluate",
    "full_attention",
    "implementation",
    "last_logits",
    "uniform_of_coverage",
]
