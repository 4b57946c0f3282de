"""What a shorter window would cost each head, measured for all candidate windows in one pass (method.md §8).

The model runs full attention on the calibration sequences. At every layer the attention function
hands over q, k and v as the attention product sees them (after q/k-norm and RoPE), and the error of
each candidate window is

    c[h, w] = Σ_t ‖(o_w(t) − o_full(t)) · W_o[h]‖² / ‖x_t‖²

with `o_w` the output of head h under window w and `x_t` the residual stream after attention. Where a family
sends the attention output through an RMSNorm before it is added, `W_o[h]` is followed by the norm's weights
and by the factor that it multiplied token t with: the heads' errors still add up, and the norm's own answer
to a change of length is left out.

A second pass can measure the same with a plan in force, against what the full model's heads put out: it sees
that errors of early layers have already changed what late layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attention import score_rules
from ..errors import CalibrationError
from ..families import decoder_layers, family_of
from .rings import query_blocks, window_errors
from .taps import Product, forward, full_product, native_limit, products, undisturbed, windowed_products

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in total)."""


@dataclass(frozen=True)
class ErrorCurves:
    """Output error of every head and candidate window.

    Attributes:
        errors: [layers, query_heads, candidates] float64, summed over tokens; 0 for full attention, unless
            measured under a plan.
        candidates: ascending windows in keys, the last one None (full, or what the layer natively sees).
        sink_tokens: first tokens that stayed visible under every window.
        tokens: query tokens that were measured.
    """

    errors: np.ndarray
    candidates: tuple[int | None, ...]
    sink_tokens: int
    tokens: int


def output_error_curves(
    model: nn.Module,
    sequences: Sequence[Tensor],
    candidates: Sequence[int | None],
    *,
    sink_tokens: int = 4,
    plan: Sequence[Sequence[int | None]] | None = None,
    query_stride: int = 1,
    measure_from: float = 0.0,
    progress: Progress | None = None,
) -> ErrorCurves:
    """Measure the error curves of method.md §8; the model is left exactly as it was.

    Args:
        model: a supported causal language model, on any device(s) and in any floating dtype.
        sequences: token ids, each [seq_len]; no padding.
        candidates: windows in keys, strictly ascending, the last one None.
        sink_tokens: first tokens that every window includes.
        plan: windows[layer][query_head] that are in force while the heads are measured (method.md §8,
            "refinement"); errors are then against the heads of the full model, which runs first on each
            sequence. Its outputs take `4 · layers · query_heads · seq_len · head_dim` bytes meanwhile.
        query_stride: measure every n-th block of 64 queries (default 1: all). Curves of neighbouring
            queries are alike, so 2 saves a third of the time and moves few windows.
        measure_from: share of each sequence that is only context (default 0: every query is measured).
        progress: called after every sequence with stage "measure", under a plan "refine".

    Raises:
        CalibrationError: candidates that are not ascending or do not end in None, no sequences, or a model
            that is being calibrated already.
        UnsupportedModelError: the family is not supported.
    """
    windows = tuple(candidates)
    finite = [w for w in windows if w is not None]
    if not windows or windows[-1] is not None or len(finite) != len(windows) - 1 or finite != sorted(set(finite)):
        raise CalibrationError(f"candidates are {windows}; expected ascending windows and None (full) at the end.")
    if len(sequences) == 0:
        raise CalibrationError("there are no sequences to measure; pass at least one.")
    norms = [_output_norm(model, layer) for layer in decoder_layers(model)]
    collector = _Collector(norms, tuple(finite), sink_tokens, query_stride, measure_from)
    with undisturbed(model):
        for done, ids in enumerate(sequences, 1):
            if plan is not None:
                with products(model, collector.teachers()):
                    forward(model, ids)
            with products(model, collector.products(plan)), _residual_taps(model, collector):
                forward(model, ids)
            if progress is not None:
                progress("measure" if plan is None else "refine", done, len(sequences))
    return ErrorCurves(collector.curves(), windows, sink_tokens, collector.tokens)


@contextmanager
def _residual_taps(model: nn.Module, collector: _Collector) -> Iterator[None]:
    """Show the collector the residual stream after the attention of every layer, and what its norm did before."""
    tap = family_of(model).residual_tap
    handles = []
    try:
        for index, layer in enumerate(decoder_layers(model)):
            hook = _residual_hook(collector, index)
            handles.append(layer.get_submodule(tap).register_forward_pre_hook(hook, with_kwargs=True))
            norm = _output_norm(model, layer)
            if norm is not None:
                handles.append(norm.register_forward_hook(_norm_hook(collector, index)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output_norm(model: nn.Module, layer: nn.Module) -> nn.Module | None:
    name = family_of(model).output_norm
    return None if name is None else layer.get_submodule(name)


def _residual_hook(collector: _Collector, layer: int) -> Callable:
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        collector.residual(layer, args[0] if args else kwargs["hidden_states"])

    return hook


def _norm_hook(collector: _Collector, layer: int) -> Callable:
    def hook(_module: nn.Module, args: tuple, output: Tensor) -> None:
        collector.normalised(layer, args[0], output)

    return hook


class _Collector:
    """Sums the error curves of one call, in float64 and in data order."""

    def __init__(
        self,
        norms: Sequence[nn.Module | None],
        windows: tuple[int, ...],
        sink_tokens: int,
        query_stride: int,
        measure_from: float,
    ):
        layers = len(norms)
        self._norms = norms
        self._gains: dict[int, Tensor] = {}  # weights of the norms, [hidden]
        self.windows, self.sink_tokens = windows, sink_tokens
        self.query_stride, self.measure_from = query_stride, measure_from
        self.tokens = 0
        self._sums: list[np.ndarray | None] = [None] * layers
        self._factors: list[Tensor | None] = [None] * layers
        self._pending: dict[int, Tensor] = {}  # errors of layers whose residual has not come by yet
        self._targets: dict[int, Tensor] = {}  # outputs of the full model's heads, seen through the factors

    def products(self, plan: Sequence[Sequence[int | None]] | None) -> list[Product]:
        """Attention, full or under `plan`, for every layer that shows q, k and v to `attention` first."""
        layers = len(self._sums)
        inner = [full_product] * layers if plan is None else windowed_products(plan, self.sink_tokens)

        def product_of(layer: int) -> Product:
            def product(module, q, k, v, mask, kwargs):
                self.attention(layer, module, q, k, v, mask, kwargs)
                return inner[layer](module, q, k, v, mask, kwargs)

            return product

        return [product_of(layer) for layer in range(layers)]

    def teachers(self) -> list[Product]:
        """Stock attention for every layer that leaves its heads' outputs as targets."""

        def product_of(layer: int) -> Product:
            def product(module, q, k, v, mask, kwargs):
                out = full_product(module, q, k, v, mask, kwargs)
                self._targets[layer] = out[0].transpose(0, 1).float() @ self._factor(layer, module, q, v)
                return out

            return product

        return [product_of(layer) for layer in range(len(self._sums))]

    def _factor(self, layer: int, module: Any, q: Tensor, v: Tensor) -> Tensor:
        factors = self._factors[layer]
        if factors is None:
            factors = self._factors[layer] = output_factors(
                lambda x: self._gain(layer, module.o_proj(x)), q.shape[1], v.shape[-1], like=v
            )
        return factors

    def _gain(self, layer: int, y: Tensor) -> Tensor:
        norm = self._norms[layer]
        if norm is None:
            return y
        if layer not in self._gains:
            self._gains[layer] = norm(torch.ones_like(y[:1]))[0]  # an RMSNorm turns ones into its weights
        return y * self._gains[layer].to(y.device)

    def attention(
        self,
        layer: int,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        """q: [1, query_heads, seq_len, head_dim]; k, v: [1, kv_heads, seq_len, head_dim]."""
        scale = kwargs.get("scaling")
        self._pending[layer] = window_errors(
            q[0],
            k[0],
            v[0],
            self._factor(layer, module, q, v),
            self.windows,
            target=self._targets.pop(layer, None),
            sink_tokens=self.sink_tokens,
            scale=scale if scale is not None else q.shape[-1] ** -0.5,
            limit=native_limit(mask),
            query_stride=self.query_stride,
            measure_from=self.measure_from,
            **score_rules(kwargs),
        )

    def normalised(self, layer: int, y: Tensor, output: Tensor) -> None:
        """y, output: [1, seq_len, hidden], the attention output before and after its norm."""
        if layer not in self._pending:  # the norm is being asked for its weights
            return
        before = self._gain(layer, y[0]).float().square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        self._pending[layer] *= (output[0].float().square().sum(-1) / before).to(self._pending[layer].device)

    def residual(self, layer: int, x: Tensor) -> None:
        """x: [1, seq_len, hidden], the residual stream after attention."""
        errors = self._pending.pop(layer, None)
        if errors is None:
            return
        norms = x[0].float().square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny).to(errors.device)
        sums = (errors / norms).double().sum(-1).cpu().numpy().T  # [query_heads, windows]
        self._sums[layer] = sums if self._sums[layer] is None else self._sums[layer] + sums
        if layer == 0:
            self.tokens += sum(
                stop - start for start, stop in query_blocks(x.shape[1], self.query_stride, self.measure_from)
            )

    def curves(self) -> np.ndarray:
        """[layers, query_heads, windows + 1]; the last column is full attention."""
        missing = [index for index, sums in enumerate(self._sums) if sums is None]
        if missing:
            raise CalibrationError(f"layers {missing} did not run attention or never reached their residual tap.")
        sums = np.stack([sums for sums in self._sums if sums is not None])
        if not np.isfinite(sums).all():
            raise CalibrationError("the model's activations are not finite (NaN or inf); check its weights and dtype.")
        return sums


def output_factors(o_proj: Callable[[Tensor], Tensor], heads: int, head_dim: int, *, like: Tensor) -> Tensor:
    """R [query_heads, head_dim, head_dim] with `‖Δ · R_h‖ = ‖Δ · W_o[h]‖` for every error Δ of head h.

    W_o is read by pushing unit vectors through the projection, because it may be quantised or wrapped in
    LoRA. With `R Rᵀ = W Wᵀ` errors are measured in head_dim instead of hidden numbers, and R can be
    multiplied into the values once, before attention.
    """
    eye = torch.eye(heads * head_dim, dtype=like.dtype, device=like.device)
    bias = o_proj(torch.zeros_like(eye[:1])).double()
    factors = []
    for rows in eye.split(head_dim):
        weight = o_proj(rows).double() - bias
        if not torch.isfinite(weight).all():
            raise CalibrationError("an output projection holds NaN or inf; check the model's weights and dtype.")
        values, vectors = torch.linalg.eigh(weight @ weight.T)  # not Cholesky: the slice may be rank-deficient
        factors.append(vectors * values.clamp_min(0).sqrt())
    return torch.stack(factors).float()
