"""The paper's regimes on calibration data: every sequence is one of its steps, the last decision is the plan.

The paper decides while it trains. Offline, the first sequence runs with full attention (its warm-up), so that
entropy, output norm and usage are known when the next one decides; after that every sequence decides anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..ops import windowed_attention
from ..plan import AAHConfig, head_counts
from .regimes import RegimeConfig, regime
from .run import RegimeRun, Windows, beyond
from .statistics import Progress
from .taps import Product, forward, full_product, native_limit, products, undisturbed
from .weights import Controllers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def offline(name: str | RegimeConfig, *, seq_len: int, seed: int = 0) -> RegimeConfig:
    """A preset for calibration data: one warm-up sequence, then a decision on each; a configuration stays as it is.

    Candidate windows are the paper's at `seq_len`, see `paper_windows`.

    Raises:
        CalibrationError: an unknown name; the message lists the choices.
    """
    if isinstance(name, RegimeConfig):
        return name
    return regime(name, seq_len=seq_len, warmup_steps=1, control_interval=1, seed=seed)


def decide_offline(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    config: RegimeConfig,
    *,
    sink_tokens: int,
    seq_len: int,
    controllers: Controllers | None = None,
    progress: Progress | None = None,
) -> AAHConfig:
    """Run a regime over token sequences and keep the windows it ends with; the model is left exactly as it was.

    Args:
        model: a supported causal language model, patched or not.
        sequences: token ids, each [seq_len], without padding; taken again from the first where the regime's
            warm-up needs more.
        config: the regime (method.md §6).
        sink_tokens: first tokens that stay visible; the paper's mechanism is 0.
        seq_len: tokens; windows that cover them become full attention.
        controllers: trained ones, see `aah_hf.training.retrofit`; None draws them from the regime's seed, as the
            paper's training loop leaves them.
        progress: called with ("decide", done, total).

    Raises:
        CalibrationError: controllers for another regime or model, or activations that are not finite.
    """
    layers, heads, _ = head_counts(model)
    run = RegimeRun(config, layers, heads, controllers, sink_tokens)
    total = max(len(sequences), config.warmup_steps + 1)
    with undisturbed(model):
        for done in range(total):
            run.begin()
            if run.looks:
                with products(model, watched(run)):
                    forward(model, sequences[done % len(sequences)])
            run.end()
            if progress is not None:
                progress("decide", done + 1, total)
    plan = run.plan(seq_len=seq_len)
    return replace(plan, windows=beyond(plan.windows, seq_len))


def watched(run: RegimeRun) -> list[Product]:
    """Attention under a run's windows, for every layer, while the run looks at it."""

    def product_of(layer: int) -> Product:
        def product(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
        ) -> Tensor:
            def attention(windows: Windows) -> Tensor:
                if all(w is None for w in windows):
                    return full_product(module, q, k, v, mask, kwargs).transpose(1, 2)
                return windowed_attention(
                    q, k, v, windows, run.sink_tokens, scale=kwargs.get("scaling"), limit=native_limit(mask)
                )

            out = run.attend(layer, q, k, v, attention, scale=kwargs.get("scaling"), limit=native_limit(mask))
            return out.transpose(1, 2).contiguous()

        return product

    return [product_of(layer) for layer in range(len(run.states))]
