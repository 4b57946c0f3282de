"""What a shorter window would cost each head, measured for all candidate windows in one pass (method.md §8).

The model runs full attention on the calibration sequences. At every layer the attention function
hands over q, k and v as the attention product sees them (after q/k-norm and RoPE), and the error of
each candidate window is

    c[h, w] = Σ_t ‖(o_w(t) − o_full(t)) · W_o[h]‖² / ‖x_t‖²

with `o_w` the output of head h under window w and `x_t` the residual stream after attention. A second
pass can measure the same with a plan in force, against what the full model's heads put out: it sees that
errors of early layers have already changed what late layers read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import CalibrationError
from ..families import attention_modules, decoder_layers, family_of
from .taps import Product, forward, full_product, native_limit, products, undisturbed, windowed_products

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in total)."""

_LOWEST = -1e30  # instead of -inf for "no key": the difference of two of these is 0, not NaN


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
        CalibrationError: candidates that are not ascending or do not end in None, no sequences, a model that
            softcaps its scores or has learned sinks, or one that is being calibrated already.
        UnsupportedModelError: the family is not supported.
    """
    windows = tuple(candidates)
    finite = [w for w in windows if w is not None]
    if not windows or windows[-1] is not None or len(finite) != len(windows) - 1 or finite != sorted(set(finite)):
        raise CalibrationError(f"candidates are {windows}; expected ascending windows and None (full) at the end.")
    if len(sequences) == 0:
        raise CalibrationError("there are no sequences to measure; pass at least one.")
    collector = _Collector(len(attention_modules(model)), tuple(finite), sink_tokens, query_stride, measure_from)
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
    """Show the collector the residual stream after the attention of every layer."""
    tap = family_of(model).residual_tap
    handles = []
    try:
        for index, layer in enumerate(decoder_layers(model)):
            hook = _residual_hook(collector, index)
            handles.append(layer.get_submodule(tap).register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _residual_hook(collector: _Collector, layer: int) -> Callable:
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        collector.residual(layer, args[0] if args else kwargs["hidden_states"])

    return hook


class _Collector:
    """Sums the error curves of one call, in float64 and in data order."""

    def __init__(self, layers: int, windows: tuple[int, ...], sink_tokens: int, query_stride: int, measure_from: float):
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
                self.attention(layer, module, q, k, v, mask, kwargs.get("scaling"))
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
            factors = self._factors[layer] = output_factors(module.o_proj, q.shape[1], v.shape[-1], like=v)
        return factors

    def attention(
        self, layer: int, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> None:
        """q: [1, query_heads, seq_len, head_dim]; k, v: [1, kv_heads, seq_len, head_dim]."""
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
        )

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
                stop - start for start, stop in _blocks(x.shape[1], self.query_stride, self.measure_from)
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


def output_factors(o_proj: nn.Module, heads: int, head_dim: int, *, like: Tensor) -> Tensor:
    """R [query_heads, head_dim, head_dim] with `‖Δ · R_h‖ = ‖Δ · W_o[h]‖` for every error Δ of head h.

    W_o is read by pushing unit vectors through the module, because it may be quantised or wrapped in
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


QUERY_BLOCK = 64


def _blocks(seq_len: int, stride: int, measure_from: float) -> list[tuple[int, int]]:
    """(start, stop) of the blocks of queries that are measured; the last block is always one of them."""
    first = min(int(seq_len * measure_from), seq_len - 1) // QUERY_BLOCK * QUERY_BLOCK
    blocks = [(start, min(start + QUERY_BLOCK, seq_len)) for start in range(first, seq_len, QUERY_BLOCK)]
    return blocks[::-1][::stride][::-1]


def window_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Tensor,
    windows: Sequence[int],
    *,
    sink_tokens: int,
    scale: float,
    target: Tensor | None = None,
    limit: int | None = None,
    query_stride: int = 1,
    measure_from: float = 0.0,
) -> Tensor:
    """Squared output error of every candidate window and of full attention, per head and query.

    The keys of nested windows form rings of growing distance. Scores and exponentials are computed
    once, each ring's sums are added to those of the rings inside it, and sink tokens are the innermost
    ring of all. Every ring carries its own maximum, so a window that misses the strongest keys does
    not underflow. Work goes block by block over the queries: the largest tensor is
    [query_heads, 64, seq_len].

    Args:
        q: [query_heads, seq_len, head_dim]; k, v: [kv_heads, seq_len, head_dim].
        factors: [query_heads, head_dim, head_dim], see `output_factors`.
        windows: ascending.
        target: [query_heads, seq_len, head_dim], multiplied by the factors; what outputs are compared with.
            Default: full attention of these q, k and v.
        limit: the layer's own sliding window, which hides sink tokens too.

    Returns:
        [windows + 1, query_heads, seq_len] float32; 0 at queries that `query_stride` and `measure_from` skip.
    """
    q, k, v = q.float() * scale, k.float().transpose(1, 2).contiguous(), v.float()
    heads, seq_len, dim = q.shape
    group = heads // k.shape[0]
    # zero rows in front: the rings of a block's first queries reach before the first key
    values = torch.zeros(heads, QUERY_BLOCK - 1 + seq_len, dim, dtype=torch.float32, device=q.device)
    torch.matmul(v.repeat_interleave(group, 0), factors.to(q.device), out=values[:, QUERY_BLOCK - 1 :])
    errors = torch.zeros(len(windows) + 1, heads, seq_len, dtype=torch.float32, device=q.device)
    work = torch.empty(2, heads * QUERY_BLOCK * (seq_len + QUERY_BLOCK), dtype=torch.float32, device=q.device)
    q = q.view(-1, group, seq_len, dim)
    for start, stop in _blocks(seq_len, query_stride, measure_from):
        count = sum(w < stop for w in windows)  # windows that may hide something from this block
        if target is None and (not count or windows[0] + sink_tokens >= stop):
            continue
        rows = q[:, :, start:stop].reshape(len(q), -1, dim)
        outputs = _nested_outputs(rows, k[:, :, :stop], values, windows[:count], sink_tokens, limit, stop - start, work)
        wanted = outputs[-1].clone() if target is None else target[:, start:stop].to(q.device)
        squares = [output.sub_(wanted).square_().sum(-1) for output in outputs]
        for index, row in enumerate(errors):
            row[:, start:stop] = squares[min(index, count)]  # windows beyond the block are full attention
    return errors


def _nested_outputs(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    windows: Sequence[int],
    sinks: int,
    limit: int | None,
    block: int,
    work: Tensor,
) -> list[Tensor]:
    """Attention outputs [query_heads, block, dim] of one block of queries under every window, then full attention.

    Args:
        rows: [kv_heads, group · block, head_dim] queries, scaled; keys: [kv_heads, head_dim, stop], those
            up to the block's last query.
        values: [query_heads, QUERY_BLOCK − 1 + seq_len, dim].
        windows: ascending, below `stop`.
        work: two scratch buffers; fresh ones for every ring would be dominated by page faults.
    """
    heads, stop = len(values), keys.shape[2]
    pad, width = block - 1, stop + block - 1
    scores = work[0, : heads * block * width].view(heads, block, width)
    scores[:, :, :pad] = -torch.inf
    torch.bmm(rows, keys, out=scores.view(len(keys), -1, width)[:, :, pad:])
    # A row stride of width + 1 shifts each query's scores by one against the query before it: columns turn into
    # distances (column c is distance stop - 1 - c), a ring is a slice, and keys after the query are never read.
    by_distance = scores.as_strided((heads, block, stop), (block * width, width + 1, 1))
    if limit is not None and limit < stop:
        by_distance[..., : stop - limit] = -torch.inf

    outputs: list[Tensor] = []
    top = torch.full((heads, block, 1), _LOWEST, dtype=rows.dtype, device=rows.device)
    total, summed = torch.zeros_like(top), rows.new_zeros(heads, block, values.shape[2])
    if sinks:
        sink_scores = scores[:, :, pad : pad + sinks].clone()
        positions = torch.arange(stop - block, stop, device=rows.device)
        later = torch.arange(sink_scores.shape[2], device=rows.device) > positions[:, None]
        sink_scores.masked_fill_(later, -torch.inf)
        scores[:, :, pad : pad + sinks] = -torch.inf  # from here on they belong to no ring
        top = sink_scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        weights = sink_scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        first = QUERY_BLOCK - 1
        summed = torch.bmm(weights, values[:, first : first + weights.shape[2]])

    edges = [0, *windows, stop]
    for near, far in pairwise(edges):
        ring = by_distance[..., stop - far : stop - near]  # distances far - 1 … near
        columns = far - near + pad
        weights = work[1, : heads * block * columns].view(heads, block, columns)
        weights[..., :pad] = 0  # two triangles of neighbouring rings
        weights[..., columns - pad :] = 0
        slanted = weights.as_strided(ring.shape, (block * columns, columns + 1, 1))
        ring_top = ring.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        torch.sub(ring, ring_top, out=slanted)
        slanted.exp_()
        first = stop - block - far + 1 + QUERY_BLOCK - 1  # key at distance far - 1 of the block's first query
        both = torch.maximum(top, ring_top)
        old, new = (top - both).exp_(), (ring_top - both).exp_()
        total = total * old + slanted.sum(-1, keepdim=True) * new
        summed = summed * old + torch.bmm(weights, values[:, first : first + columns]) * new
        top = both
        outputs.append(summed / total)
    return outputs
