"""Pictures of a study: validation curves, and the windows that every regime ended with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from .results import BASELINE, RunResult


def plot_curves(results: Sequence[RunResult], path: str | Path) -> Figure:
    """Validation loss against training step: a line per regime (mean over seeds), a band from least to greatest.

    The right half shows the last half of training as the difference to full attention of the same seed.
    """
    by_regime = _by_regime(results)
    baseline = {run.seed: dict(run.curve) for run in by_regime.get(BASELINE, [])}
    figure = Figure(figsize=(12, 5), dpi=130)
    left, right = figure.subplots(1, 2)
    colors = matplotlib.colormaps["tab20"](np.linspace(0, 1, max(len(by_regime), 2)))
    for color, (regime, runs) in zip(colors, by_regime.items()):
        steps = sorted(set.intersection(*(set(dict(run.curve)) for run in runs)))
        losses = np.array([[dict(run.curve)[step] for step in steps] for run in runs])
        width = 2.2 if regime == BASELINE else 1.2
        left.plot(steps, losses.mean(0), color=color, label=regime, linewidth=width)
        left.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.12, linewidth=0)
        paired = [run for run in runs if run.seed in baseline]
        late = [step for step in steps[len(steps) // 2 :] if all(step in baseline[run.seed] for run in paired)]
        if paired and late:
            gaps = np.array([[dict(run.curve)[step] - baseline[run.seed][step] for step in late] for run in paired])
            right.plot(late, gaps.mean(0), color=color, marker=".", linewidth=width)
            right.fill_between(late, gaps.min(0), gaps.max(0), color=color, alpha=0.12, linewidth=0)
    left.set(xlabel="training step", ylabel="validation loss, nats/token", title="Validation loss")
    left.legend(fontsize=7)
    right.set(xlabel="training step", title=f"Difference to {BASELINE} of the same seed", ylabel="nats/token")
    right.axhline(0, color="black", linewidth=0.6)
    figure.tight_layout()
    figure.savefig(path)
    return figure


def plot_windows_grid(results: Sequence[RunResult], path: str | Path) -> Figure:
    """One heatmap per regime, of its lowest seed: layers downwards, query heads across, colour the window."""
    first = {regime: min(runs, key=lambda run: run.seed) for regime, runs in _by_regime(results).items()}
    values = sorted({w for run in first.values() for layer in run.windows for w in layer if w is not None})
    labels = [*map(str, values), "full"]
    rank = {w: index for index, w in enumerate(values)} | {None: len(values)}
    colors = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.05, 0.98, len(labels))))
    norm = BoundaryNorm(np.arange(len(labels) + 1) - 0.5, len(labels))
    across = min(4, len(first))
    down = math.ceil(len(first) / across)
    figure = Figure(figsize=(3.2 * across + 1, 2.2 * down + 0.4), dpi=130, layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes in panels[len(first) :]:
        axes.set_axis_off()
    for axes, (regime, run) in zip(panels, first.items()):
        grid = np.array([[rank[w] for w in layer] for layer in run.windows])
        image = axes.imshow(grid, cmap=colors, norm=norm, aspect="auto", interpolation="nearest")
        axes.set_title(f"{regime} (seed {run.seed})\nACR {run.acr:.2f}, causal {run.causal:.2f}", fontsize=8)
        axes.set(xlabel="query head", ylabel="layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=panels.tolist(), ticks=range(len(labels)), shrink=0.8)
    bar.ax.set_yticklabels(labels)
    bar.set_label("window (keys per query)")
    figure.savefig(path)
    return figure


def _by_regime(results: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    grouped: dict[str, list[RunResult]] = {}
    for run in results:
        grouped.setdefault(run.regime, []).append(run)
    return grouped
