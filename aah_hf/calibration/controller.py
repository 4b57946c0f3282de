"""The paper's controller: from a hierarchy of groups to a window for every group (method.md §5).

A group is described by 29 numbers; a small MLP scores the candidate windows from them, a second one
scores pairs of siblings jointly; the best candidate wins, bounded by the parent's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from aah_hf.calibration.features import FEATURES
from aah_hf.calibration.grouping import Level, parents
from aah_hf.errors import CalibrationError

INPUTS = 3 * len(FEATURES) + 2
"""Numbers that describe a group to the controller: 29."""


class _Scorer(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))


class Controller(nn.Module):
    """Scores candidate windows for the groups of one layer (method.md §5).

    Args:
        candidates: candidate windows.
        hidden: width of the group scorer.
        sibling_hidden: width of the joint scorer of sibling pairs; None leaves it out.
    """

    def __init__(self, candidates: int = 4, hidden: int = 16, sibling_hidden: int | None = 64):
        super().__init__()
        self.candidates = candidates
        self.group = _Scorer(INPUTS, hidden, candidates)
        self.sibling = None if sibling_hidden is None else _Scorer(4 * INPUTS, sibling_hidden, 2 * candidates)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "") -> Controller:
        """A controller from named weights (`<prefix>group.mlp.0.weight`, …); sizes come from their shapes."""
        own = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
        own = {name: x for name, x in own.items() if name.startswith(("group.mlp.", "sibling.mlp."))}
        if "group.mlp.2.weight" not in own:
            raise CalibrationError(f"no controller weights under {prefix!r}: {prefix}group.mlp.2.weight is missing.")
        candidates, hidden = own["group.mlp.2.weight"].shape
        joint = own.get("sibling.mlp.0.weight")
        controller = cls(candidates, hidden, None if joint is None else joint.shape[0])
        controller.load_state_dict(own)
        return controller

    def forward(self, inputs: Tensor, pairs: Tensor | None = None) -> Tensor:
        """Logits [groups, candidates] of inputs [groups, 29].

        Args:
            pairs: [pairs, 2] rows of siblings; their joint scores replace both rows' own. None scores
                every row by itself.
        """
        logits = self.group.mlp(inputs)
        if pairs is None or not len(pairs):
            return logits
        if self.sibling is None:
            raise CalibrationError("this controller has no weights for sibling pairs; use independent scoring.")
        a, b = inputs[pairs.T]
        joint = self.sibling.mlp(torch.cat([a, b, a - b, b - a], dim=1))
        return logits.index_copy(0, pairs.reshape(-1), joint.reshape(-1, self.candidates))


@dataclass(frozen=True, eq=False)
class Decision:
    """What the controller chose for one layer; lists hold one entry per level, level 0 first.

    Attributes:
        logits: [groups, candidates] float32.
        raw_index: the best candidate of every group.
        index: the same under the parent constraint.
    """

    logits: list[np.ndarray]
    raw_index: list[np.ndarray]
    index: list[np.ndarray]

    @property
    def margins(self) -> list[np.ndarray]:
        """By how much the best candidate of each group won; infinite with one candidate."""
        best = [np.sort(np.pad(x, ((0, 0), (1, 0)), constant_values=-np.inf), axis=1) for x in self.logits]
        return [x[:, -1] - x[:, -2] for x in best]


def controller_inputs(levels: Sequence[Level]) -> list[np.ndarray]:
    """[groups, 29] float32 per level: features, height, difference to parent and to the level, share."""
    above = parents(levels)
    inputs = []
    for height, level in enumerate(levels):
        x, count = level.features, len(level.groups)
        row = np.zeros((count, INPUTS), dtype=np.float32)
        row[:, :9] = x
        row[:, 9] = height / max(len(levels) - 1, 1)
        if height < len(above):
            row[:, 10:19] = x - levels[height + 1].features[above[height]]
        row[:, 19:28] = x - x.sum(axis=0) / count
        size = [len(group) for group in level.groups]
        row[:, 28] = np.array(size) / sum(size)
        inputs.append(row)
    return inputs


def sibling_pairs(levels: Sequence[Level]) -> np.ndarray:
    """[pairs, 2] rows of all levels' inputs stacked: neighbours among the groups of one parent.

    Siblings stand in index order, at the top all groups are siblings; an odd one out has no pair.
    """
    pairs: list[tuple[int, int]] = []
    row = 0
    for level, above in zip(levels, [*parents(levels), None]):
        count = len(level.groups)
        families: dict[int, list[int]] = {}
        for group in range(count):
            families.setdefault(0 if above is None else above[group], []).append(row + group)
        for family in families.values():
            pairs += zip(family[::2], family[1::2])
        row += count
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def score(levels: Sequence[Level], controller: Controller, joint_siblings: bool = True) -> list[Tensor]:
    """Logits [groups, candidates] per level, differentiable in the controller's weights."""
    weight = next(controller.parameters())
    inputs = torch.from_numpy(np.concatenate(controller_inputs(levels))).to(weight)
    pairs = torch.from_numpy(sibling_pairs(levels)).to(weight.device) if joint_siblings else None
    return list(controller(inputs, pairs).split([len(level.groups) for level in levels]))


@torch.no_grad()
def decide(
    levels: Sequence[Level], controller: Controller, *, joint_siblings: bool = True, parent_constraint: bool = True
) -> Decision:
    """Chooses a candidate for every group: the first of the best, at most its parent's if constrained."""
    logits = [x.float().cpu().numpy() for x in score(levels, controller, joint_siblings)]
    raw = [x.argmax(axis=1) for x in logits]
    return Decision(logits, raw, constrain(raw, levels) if parent_constraint else raw)


def constrain(index: Sequence[np.ndarray], levels: Sequence[Level]) -> list[np.ndarray]:
    """From the top down, lowers every group's candidate index to its parent's."""
    bounded = list(index)
    for height, above in reversed(list(enumerate(parents(levels)))):
        bounded[height] = np.minimum(bounded[height], bounded[height + 1][above])
    return bounded
