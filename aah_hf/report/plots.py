"""Pictures of a plan."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..plan import AAHConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_windows(plan: AAHConfig, path: str | os.PathLike | None = None, *, title: str | None = None) -> Figure:
    """The windows as a picture, layers downwards and query heads across.

    Args:
        plan: what to draw.
        path: where to save it (the ending chooses the format); None saves nothing.
        title: default names the calibrated length.

    Returns:
        The matplotlib figure.
    """
    import numpy as np
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    values = sorted({w for layer in plan.windows for w in layer if w is not None})
    labels = [str(w) for w in values] + ["full"]
    rank = {w: i for i, w in enumerate(values)} | {None: len(values)}
    grid = np.full((plan.num_layers, plan.num_heads), np.nan)
    for i, layer in enumerate(plan.windows):
        grid[i, : len(layer)] = [rank[w] for w in layer]

    import matplotlib

    colors = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.05, 0.98, len(labels))))
    figure = Figure(figsize=(max(4.0, 0.32 * plan.num_heads + 2.4), max(2.8, 0.2 * plan.num_layers + 1.2)), dpi=150)
    axes = figure.add_subplot()
    image = axes.imshow(
        grid, cmap=colors, norm=BoundaryNorm(np.arange(len(labels) + 1) - 0.5, len(labels)), aspect="auto"
    )
    axes.set_xlabel("query head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(0, plan.num_heads, max(1, plan.num_heads // 16)))
    axes.set_yticks(range(0, plan.num_layers, max(1, plan.num_layers // 16)))
    at = f" (calibrated at {plan.calibrated_at} tokens)" if plan.calibrated_at else ""
    axes.set_title(title or f"Window per head{at}, {plan.sink_tokens} sink tokens", fontsize=9)
    bar = figure.colorbar(image, ax=axes, ticks=range(len(labels)))
    bar.ax.set_yticklabels(labels)
    bar.set_label("window (keys per query)")
    figure.tight_layout()
    if path is not None:
        figure.savefig(path)
    return figure
