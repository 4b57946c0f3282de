"""Windows that follow a regime while a model trains (method.md §5, §6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import attention
from ..calibration.features import moments
from ..calibration.regimes import RegimeConfig
from ..calibration.run import RegimeRun
from ..calibration.weights import Controllers
from ..checkpoint import attach_controllers
from ..errors import CalibrationError
from ..families import attention_modules
from ..masks import AAHMask
from ..patching import renew_plan, set_plan, unwrap
from ..plan import AAHConfig, head_counts
from .state import load_state, save_state


class AdaptiveWindows:
    """A model whose windows follow a regime of the paper, for any training loop.

        windows = AdaptiveWindows(model, regime("shallow_freeze", seq_len=1024))
        for batch in loader:
            with windows.step():  # around every forward and backward pass of one optimizer step
                model(**batch).loss.backward()
            optimizer.step()
        model.save_pretrained("trained")  # the windows in force are the checkpoint's plan

    Decisions happen inside the forward pass, layer by layer, as in the paper: q, k and v are those of this step,
    entropy, output norm and usage those of the step before. Only at these two steps anything is measured; in all
    others the model is an ordinary patched one. With several micro-batches the first decides. In a padded or packed
    batch the features are those of the largest rectangle of real tokens of one sequence. In a distributed job rank 0
    decides on its own data and the others follow.

    Args:
        model: a supported transformers model, patched or not; it is patched in place (PEFT wrappers are looked
            through).
        regime: see `aah_hf.calibration.regime`.
        sink_tokens: first tokens that stay visible to every query; the paper's mechanism is 0.
        controllers: one per layer, to go on with; None draws them from the regime's seed, and the paper's loop
            never trains them (argmax passes no gradient, method.md §7).

    Raises:
        AAHError: an unsupported model, or controllers that do not fit it or the regime.
    """

    def __init__(
        self,
        model: Any,
        regime: RegimeConfig,
        *,
        sink_tokens: int = 0,
        controllers: Controllers | None = None,
    ) -> None:
        base = unwrap(model)
        layers, heads, _ = head_counts(base)
        self.run = RegimeRun(regime, layers, heads, controllers, sink_tokens)
        self.model = base
        set_plan(base, self.plan())
        self._in_force = self.run.windows
        attach_controllers(base, self.run.controllers)
        self._modules = [module for _, module in attention_modules(base)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step; if it raises, windows and states are those from before."""
        self.begin_step()
        try:
            yield
        except BaseException:
            self.abandon_step()
            raise
        self.end_step()

    def begin_step(self) -> None:
        """Put this step's windows in force, or let the first forward pass decide them."""
        self.run.begin()
        for layer, module in enumerate(self._modules):
            if self.run.looks:
                module.__dict__[attention.NEXT_CALL] = partial(self._take, layer)
            else:
                attention.set_windows(module, self.run.windows[layer])

    def end_step(self) -> None:
        """Close the step; the model's config carries the windows that ran.

        Raises:
            CalibrationError: a decision was due and the model ran no forward pass.
        """
        self._let_go()
        try:
            self.run.end()
        except CalibrationError:
            self._renew()
            raise
        if self.run.decided or self.run.windows != self._in_force:
            self._renew()

    def abandon_step(self) -> None:
        """Undo a step that was begun."""
        self._let_go()
        self.run.abandon()
        self._renew()

    def plan(self) -> AAHConfig:
        """The windows in force; its provenance names the regime and counts steps and decisions."""
        return self.run.plan()

    @property
    def seq_len(self) -> int:
        """Tokens that coverages refer to: of the last sequence decided on, before that the largest candidate."""
        return self.run.seq_len or self.run.regime.candidate_windows[-1]

    def restore(self, folder: str | os.PathLike) -> None:
        """Go on where `save_state` left off: decisions, smoothed features, hierarchy and controllers.

        Raises:
            CalibrationError: nothing usable there, or it belongs to another regime or model.
        """
        load_state(self.run, folder)
        attach_controllers(self.model, self.run.controllers)
        self._renew()

    def save_state(self, folder: str | os.PathLike) -> Path:
        """Write what `restore` needs into a checkpoint's folder (not needed to run or load the model)."""
        return save_state(self.run, folder)

    def _renew(self) -> None:
        renew_plan(self.model, self.plan())
        self._in_force = self.run.windows

    def _let_go(self) -> None:
        for module in self._modules:
            module.__dict__.pop(attention.NEXT_CALL, None)

    def _take(
        self, layer: int, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The module's next call of attention, decided and looked at."""
        module.__dict__.pop(attention.NEXT_CALL, None)
        rows, span = _sequences(query, key, mask, kwargs)
        limit = mask.limit if isinstance(mask, AAHMask) else None
        q, k, v = (x.detach()[rows, :, span] for x in (query, key, value))
        if layer in self.run.pending:
            self._decide(layer, q, k, v)
        attention.set_windows(module, self.run.windows[layer])
        out, weights = attention.aah_attention_forward(module, query, key, value, mask, **kwargs)
        if self.run.observing and _leads():
            seen = out.detach().transpose(1, 2)[rows, :, span]
            self.run.look(layer, q, k, v, seen, scale=kwargs.get("scaling"), limit=limit)
        return out, weights

    def _decide(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if _leads():
            self.run.decide(layer, moments(q, k, v), q.shape[2])
        if not _distributed():
            return
        heads = q.shape[1]
        sent = torch.zeros(3, heads, dtype=torch.float32, device=q.device)
        if _leads():
            sent.copy_(torch.from_numpy(self.run.choice(layer)))
        dist.broadcast(sent, src=0)
        if not _leads():
            self.run.follow(layer, sent.cpu().numpy().astype(np.float64), q.shape[2])


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _leads() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _sequences(query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> tuple[Any, slice]:
    """(rows, positions) of the batch that features are taken from: everything, unless there is padding or packing."""
    everything = slice(None), slice(None)
    if query.shape[2] != key.shape[2]:
        raise CalibrationError(
            f"a decision looks at whole sequences, and attention was called with {query.shape[2]} queries over "
            f"{key.shape[2]} keys: train with use_cache=False."
        )
    if isinstance(mask, Tensor) or (isinstance(mask, AAHMask) and mask.dense is not None):
        raise CalibrationError(
            "decisions cannot be taken under a 4D attention mask of your own; pass a 2D mask (padding) or position_ids "
            "that restart at 0 (packing)."
        )
    if not isinstance(mask, AAHMask):
        return everything
    mask.note_packing(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
    if mask.sequences is None:
        return everything
    runs = mask.sequences.runs
    if not runs:
        raise CalibrationError("decisions cannot be taken where padding lies inside a sequence; pad on one side.")
    largest = max(runs, key=lambda run: len(run.rows) * (run.end - run.start))
    return list(largest.rows), slice(largest.start, largest.end)
