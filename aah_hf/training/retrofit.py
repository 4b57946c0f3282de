"""The paper's retrofit of a pretrained model: only the controllers are trained, through a soft choice (method.md §7).

Argmax passes no gradient, so while the controllers learn every head runs *all* candidate windows and mixes their
outputs with the softmax of its group's logits. The model itself is frozen. At the end argmax, under the regime's
parent constraint, chooses the windows, and they are frozen into the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.calibrate import calibration_text
from ..calibration.config import CalibrationConfig
from ..calibration.controller import Controller, score
from ..calibration.grouping import group_of
from ..calibration.paper import decide_offline
from ..calibration.regimes import RegimeConfig, regime
from ..calibration.run import RegimeRun, Windows
from ..calibration.taps import Product, input_device, native_limit, products
from ..calibration.weights import Controllers
from ..checkpoint import attach_controllers
from ..errors import CalibrationError
from ..ops import windowed_attention
from ..patching import set_plan, unwrap
from ..plan import head_counts

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RetrofitConfig:
    """How the controllers are trained.

    Args:
        regime: a name of `REGIMES` whose windows a controller chooses, or a configuration. A name takes the
            paper's four candidates at `seq_len` and one warm-up step.
        steps: optimizer steps, one sequence each.
        learning_rate: of AdamW.
        coverage_weight: what the expected ACR of the mixture costs beside the loss (nats). 0 is the paper's
            objective, under which nothing asks for short windows.
        temperature: of the softmax.
        seq_len, num_sequences: tokens of a sequence, and sequences that are gone through in turn.
        sink_tokens: first tokens that stay visible; the paper's mechanism is 0, pretrained models need some.
        recall_fraction: share of built-in recall text, as in `CalibrationConfig`.
        seed: of the controllers' initialisation and of the recall text.

    Raises:
        CalibrationError: a setting out of range, or a regime without a controller.
    """

    regime: str | RegimeConfig = "shallow_freeze"
    steps: int = 100
    learning_rate: float = 1e-3
    coverage_weight: float = 0.0
    temperature: float = 1.0
    seq_len: int = 2048
    num_sequences: int = 8
    sink_tokens: int = 4
    recall_fraction: float = 0.0
    seed: int = 0
    rules: RegimeConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rules = self.regime
        if not isinstance(rules, RegimeConfig):
            rules = regime(rules, seq_len=self.seq_len, warmup_steps=1, seed=self.seed)
        if rules.windows != "controller":
            raise CalibrationError(
                f"regime {rules.name!r} has no controller to train (its windows are {rules.windows!r}); take one such as "
                "shallow_freeze or full_adaptive."
            )
        object.__setattr__(self, "rules", rules)
        if not isinstance(self.steps, int) or self.steps <= rules.warmup_steps:
            raise CalibrationError(f"steps is {self.steps!r}; expected more than the {rules.warmup_steps} of warm-up.")
        for name in ("learning_rate", "temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CalibrationError(f"{name} is {getattr(self, name)!r}; expected a positive number.")
        if not 0 <= self.coverage_weight < float("inf"):
            raise CalibrationError(f"coverage_weight is {self.coverage_weight!r}; expected a number of at least 0.")
        self.calibration()

    def calibration(self) -> CalibrationConfig:
        """The same settings for the text."""
        return CalibrationConfig(
            objective="paper",
            regime=self.rules,
            seq_len=self.seq_len,
            num_sequences=self.num_sequences,
            sink_tokens=self.sink_tokens,
            recall_fraction=self.recall_fraction,
            holdout_sequences=0,
            seed=self.seed,
        )


def retrofit(
    model: Any,
    data: Any,
    config: RetrofitConfig | None = None,
    *,
    tokenizer: Any = None,
    controllers: Controllers | None = None,
    progress: Progress | None = None,
) -> Any:
    """Train controllers on `data` and patch `model` with the windows they choose, in place.

    Args:
        model: a supported causal language model; its weights are not changed.
        data: text or token ids in any form that `patch_model` takes.
        config: default `RetrofitConfig()`.
        tokenizer: for text, and for recall text.
        controllers: to go on training; default untrained ones. They are trained in place.
        progress: called with ("retrofit", done, total), then ("decide", done, total).

    Returns:
        The same model. Its plan's provenance holds the losses; `save_pretrained` writes the controllers too.

    Raises:
        CalibrationError: unusable data or settings, controllers that do not fit, or a loss that is not finite.
        UnsupportedModelError: the model's family is not supported.
    """
    config = config or RetrofitConfig()
    base = unwrap(model)
    layers, heads, _ = head_counts(base)
    text = calibration_text(base, data, config.calibration(), tokenizer=tokenizer)
    run = RegimeRun(config.rules, layers, heads, controllers, config.sink_tokens)
    assert run.controllers is not None
    losses, acr = train_controllers(base, text.measure, run, config, progress=progress)
    plan = decide_offline(
        base,
        text.measure,
        replace(config.rules, warmup_steps=1, control_interval=1),
        sink_tokens=config.sink_tokens,
        seq_len=config.seq_len,
        controllers=run.controllers,
        progress=progress,
    )
    plan = plan.with_provenance(
        retrofit={
            "steps": config.steps,
            "learning_rate": config.learning_rate,
            "coverage_weight": config.coverage_weight,
            "temperature": config.temperature,
            "sequences": len(text.measure),
            "loss": [round(loss, 5) for loss in _ends(losses)],
            "soft_acr": [round(value, 5) for value in _ends(acr)],
        },
        data_sha256=text.sha256,
    )
    set_plan(base, plan)
    attach_controllers(base, run.controllers)
    return model


def train_controllers(
    model: Any, sequences: Sequence[Tensor], run: RegimeRun, config: RetrofitConfig, *, progress: Progress | None = None
) -> tuple[list[float], list[float]]:
    """Train the controllers of `run` in place, the model being frozen and otherwise left as it was.

    Returns:
        (losses, expected ACRs of the mixtures), one per step after the warm-up.
    """
    assert run.controllers is not None
    mixture = Mixture(run, config.temperature)
    optimizer = torch.optim.AdamW(run.controllers.parameters(), lr=config.learning_rate, weight_decay=0.0)
    losses, expected = [], []
    with frozen(model):
        run.controllers.requires_grad_(True)
        try:
            for step in range(config.steps):
                ids = sequences[step % len(sequences)][None].to(input_device(model))
                run.begin()
                mixture.acr.clear()
                with products(model, mixture.products()):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                run.end()
                if not bool(torch.isfinite(loss)):
                    raise CalibrationError(
                        f"the loss of step {step} is {float(loss.detach())}; check the model's dtype."
                    )
                if mixture.acr:  # none during warm-up, when all heads are full and nothing depends on a controller
                    acr = torch.stack(mixture.acr).mean()
                    optimizer.zero_grad()
                    (loss + config.coverage_weight * acr.to(loss)).backward()
                    optimizer.step()
                    losses.append(float(loss.detach()))
                    expected.append(float(acr.detach()))
                if progress is not None:
                    progress("retrofit", step + 1, config.steps)
        finally:
            run.abandon()
            run.controllers.requires_grad_(False)
    return losses, expected


class Mixture:
    """Attention of every layer as the softmax-weighted mean of its heads' outputs under all candidate windows.

    Groups and features follow the regime's rhythm; logits are computed anew at every step, since the controllers
    change. Entropy and usage are looked at under the windows that argmax would choose, the output norm is the
    mixture's.
    """

    def __init__(self, run: RegimeRun, temperature: float) -> None:
        self.run, self.temperature = run, temperature
        self.acr: list[Tensor] = []
        """Expected ACR of each layer in this step, differentiable."""

    def products(self) -> list[Product]:
        """One function per layer for `taps.products`."""
        return [self._product(layer) for layer in range(len(self.run.states))]

    def weights(self, layer: int) -> Tensor:
        """[query_heads, candidates]: how much of each candidate window a head runs with."""
        assert self.run.controllers is not None
        controller, rules = self.run.controllers[layer], self.run.regime
        assert isinstance(controller, Controller)
        levels = self.run.states[layer].levels
        logits = score(levels, controller, rules.joint_siblings and rules.groups != "heads")[0]
        return torch.softmax(logits / self.temperature, dim=-1)[group_of(levels[0].groups)]

    def _product(self, layer: int) -> Product:
        run = self.run

        def product(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
        ) -> Tensor:
            scale, limit = kwargs.get("scaling"), native_limit(mask)

            def attention(window: int | None) -> Tensor:
                windows = (window,) * q.shape[1]
                return windowed_attention(q, k, v, windows, run.sink_tokens, scale=scale, limit=limit)

            def mixed(_windows: Windows) -> Tensor:
                if run.states[layer].step <= run.regime.warmup_steps:
                    return attention(None)
                share = self.weights(layer)
                time = q.shape[2]
                self.acr.append(
                    (share @ share.new_tensor([min(w, time) / time for w in run.regime.candidate_windows])).mean().cpu()
                )
                share = share.to(q.device, q.dtype)
                parts = [
                    share[None, :, index, None, None] * attention(window)
                    for index, window in enumerate(run.regime.candidate_windows)
                ]
                return torch.stack(parts).sum(0)

            out = run.attend(layer, q.detach(), k.detach(), v.detach(), mixed, scale=scale, limit=limit)
            return out.transpose(1, 2).contiguous()

        return product


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no parameter wants a gradient; both come back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        model.requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, grad in wanted:
            parameter.requires_grad = grad


def _ends(values: list[float]) -> list[float]:
    """First and last tenth of a curve, averaged: enough for provenance."""
    tenth = max(1, len(values) // 10)
    return [sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth]
