"""Groups of heads and their hierarchy, as the paper forms them (method.md §4).

Everything here is a pure function of a small feature matrix, [items, features] with at most a few
dozen rows, on the CPU and in float32 as in the paper's implementation. Plain numpy, because at this
size the cost is the number of calls. Groups are tuples of item indices in the order in which the
items joined; nothing is ever sorted, since that order decides which groups are paired as siblings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aah_hf.errors import CalibrationError

METRICS = ("cosine", "cosine_normdiff", "centered_cosine")
Groups = tuple[tuple[int, ...], ...]
"""groups[group]: indices of its items, in joining order."""

_TINY = np.float32(1e-12)  # a zero row stays zero instead of becoming NaN
_TIE = np.float32(1e-8)  # scalar products closer than this count as equal in a forced split


@dataclass(frozen=True)
class GroupingConfig:
    """Thresholds of the hierarchy; the defaults are the paper's.

    Attributes:
        head_threshold: cosine similarity from which a head joins a group (level 0).
        group_threshold: similarity `metric` from which a group joins a group (upper levels).
        min_group_size: groups smaller than this are merged where that is allowed; 1 never merges.
        max_depth: levels at most, level 0 included.
        together_bonus: added to the similarity of heads that were in one group before. It moves only
            the anchors of a forced split.
        norm_scale: weight of the relative difference of norms in `cosine_normdiff`.
        metric: similarity of the upper levels, one of `METRICS`.
    """

    head_threshold: float = 0.72
    group_threshold: float = 0.76
    min_group_size: int = 3
    max_depth: int = 4
    together_bonus: float = 0.02
    norm_scale: float = 16.0
    metric: str = "cosine_normdiff"

    def __post_init__(self) -> None:
        _check_metric(self.metric)
        if self.min_group_size < 1 or self.max_depth < 1:
            raise CalibrationError(
                f"min_group_size {self.min_group_size} and max_depth {self.max_depth} must both be at least 1."
            )


@dataclass(frozen=True)
class Clustering:
    """One level's groups, and whether they come from a forced split of a single group in two."""

    groups: Groups
    forced: bool = False


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy.

    Attributes:
        groups: level 0 holds heads, level l holds groups of level l - 1.
        features: [groups, features] float32.
    """

    groups: Groups
    features: np.ndarray


def cluster(
    features: Any,
    threshold: float,
    *,
    metric: str = "cosine",
    min_group_size: int = 1,
    forced_split: bool = False,
    previous: Sequence[int] | None = None,
    together_bonus: float = 0.02,
    norm_scale: float = 16.0,
) -> Clustering:
    """Groups similar items, visiting them once in index order (method.md §4).

    Args:
        features: [items, features], numpy array, CPU tensor or nested lists.
        threshold: an item joins the most similar group from this similarity on, else opens a new one.
        metric: one of `METRICS`.
        min_group_size: merge groups smaller than this into similar ones. Not after a forced split.
        forced_split: split in two if everything falls into one group of at least two items.
        previous: the group of each item before, for `together_bonus` (metric `cosine` only).
        together_bonus, norm_scale: as in `GroupingConfig`.

    Raises:
        CalibrationError: features that are not a finite matrix, or an unknown metric.
    """
    raw = _matrix(features)
    _check_metric(metric)
    if metric == "centered_cosine":
        raw = raw - raw.mean(axis=0)
    unit = _unit(raw)
    groups = _join(unit, threshold, raw if metric == "cosine_normdiff" else None, norm_scale)
    if forced_split and len(groups) == 1 and len(unit) >= 2:
        pairwise = similarity(features, metric, norm_scale=norm_scale)
        if previous is not None and metric == "cosine":
            pairwise = add_bonus(pairwise, previous, together_bonus)
        return Clustering(_split(unit, pairwise), forced=True)
    if min_group_size > 1:
        groups = merge_small(unit, groups, threshold, min_group_size)
    return Clustering(tuple(tuple(group) for group in groups))


def hierarchy(features: Any, config: GroupingConfig, previous: Sequence[int] | None = None) -> tuple[Level, ...]:
    """Heads → groups → groups of groups (method.md §4).

    Args:
        features: [heads, features].
        config: thresholds, sizes and depth.
        previous: the level-0 group of each head before, if there were groups.

    Returns:
        Levels, level 0 first; at least one, at most `config.max_depth`.
    """
    raw = _matrix(features)
    heads = cluster(
        raw,
        config.head_threshold,
        min_group_size=config.min_group_size,
        forced_split=True,
        previous=previous,
        together_bonus=config.together_bonus,
    )
    return upper_levels(Level(heads.groups, member_means(raw, heads.groups)), config)


def upper_levels(bottom: Level, config: GroupingConfig) -> tuple[Level, ...]:
    """Builds the levels above a given level 0, until the depth or a collapse to one group."""
    levels = [bottom]
    while len(levels) < config.max_depth:
        below = levels[-1].features
        if len(levels) > 1 and len(below) == len(levels[-2].features):
            # nothing was joined, so the items and hence the result are those of the level below
            levels.append(Level(levels[-1].groups, below))
            continue
        groups = cluster(
            below,
            config.group_threshold,
            metric=config.metric,
            min_group_size=config.min_group_size,
            norm_scale=config.norm_scale,
        ).groups
        if len(groups) == 1:
            break
        levels.append(Level(groups, member_means(below, groups)))
    return tuple(levels)


def parents(levels: Sequence[Level]) -> list[list[int]]:
    """parents[l][g]: the group of level l + 1 that holds group g of level l; one list less than levels."""
    return [group_of(level.groups) for level in levels[1:]]


def group_of(groups: Groups) -> list[int]:
    """The group of every item."""
    items = [(item, index) for index, group in enumerate(groups) for item in group]
    return [index for _, index in sorted(items)]


def member_means(features: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """[groups, features] float32: the mean of each group's members."""
    return shares(groups, len(features)) @ features


def shares(groups: Sequence[Sequence[int]], items: int) -> np.ndarray:
    """[groups, items] float32: the weight of each item in its group's mean, so that rows sum to 1."""
    weights = np.zeros((len(groups), items), dtype=np.float32)
    for index, group in enumerate(groups):
        weights[index, list(group)] = 1 / len(group)
    return weights


def similarity(features: Any, metric: str, *, norm_scale: float = 16.0) -> np.ndarray:
    """[items, items] similarity under one of `METRICS`."""
    raw = _matrix(features)
    _check_metric(metric)
    if metric == "centered_cosine":
        raw = raw - raw.mean(axis=0)
    unit = _unit(raw)
    cosine = unit @ unit.T
    if metric != "cosine_normdiff":
        return cosine
    norms = _norms(raw)
    return cosine - _norm_gap(norms[:, None], norms[None, :], norm_scale)


def add_bonus(pairwise: np.ndarray, previous: Sequence[int], bonus: float) -> np.ndarray:
    """Raises the similarity of items that shared a group before, up to 1."""
    group = np.asarray(previous)
    if group.shape != pairwise.shape[:1]:
        raise CalibrationError(f"previous names the group of {len(group)} items, but there are {len(pairwise)}.")
    together = group[:, None] == group[None, :]
    return np.where(together, np.minimum(pairwise + np.float32(bonus), np.float32(1)), pairwise)


def merge_small(unit: np.ndarray, groups: list[list[int]], threshold: float, min_size: int) -> list[list[int]]:
    """Moves groups that are too small into the most similar group (method.md §4, merging).

    Args:
        unit: [items, features], normalised rows.
        groups: groups in joining order; not changed.
        threshold: least scalar product of group means that allows a move.
        min_size: groups smaller than this move.
    """
    small = [index for index, group in enumerate(groups) if len(group) < min_size]
    if not small or len(groups) <= 2:
        return groups
    groups = [list(group) for group in groups]
    means = member_means(unit, groups)
    for source in small:
        members = groups[source]
        if len(members) >= min_size or sum(map(bool, groups)) <= 2:
            continue
        closeness = means @ means[source]
        closeness[~may_receive(groups, source)] = -np.inf
        target = int(closeness.argmax())
        if closeness[target] < threshold:
            continue
        groups[source] = []  # its mean stays: the place remains a candidate
        groups[target] = groups[target] + members
        means[target] = unit[groups[target]].sum(axis=0) / len(groups[target])
    return [group for group in groups if group]


def may_receive(groups: list[list[int]], source: int) -> np.ndarray:
    """[groups] bool: which groups a small group may move into: all others, emptied ones included."""
    allowed = np.ones(len(groups), dtype=bool)
    allowed[source] = False
    return allowed


def _join(unit: np.ndarray, threshold: float, raw: np.ndarray | None, norm_scale: float) -> list[list[int]]:
    """One pass in index order; `raw` is None unless the metric looks at norms.

    Everything follows from scalar products with the sum of a group's members (it points where their mean
    does), and those are sums of rows of one matrix. Lists, because a numpy call costs more than such a row.
    """
    groups: list[list[int]] = []
    direction = _Sums(unit)
    size = None if raw is None else _Sums(raw)
    for item in range(len(unit)):
        best, joined = -math.inf, len(groups)
        for index, members in enumerate(groups):
            closeness = direction.dots[index][item] / direction.norms[index]
            if size is not None:
                a, b = size.norms[index] / len(members), size.lengths[item]
                closeness -= norm_scale * abs(a - b) / max(a, b)
            if closeness > best:  # the first of equals wins
                best, joined = closeness, index
        if best < threshold:
            joined = len(groups)
            groups.append([])
        groups[joined].append(item)
        direction.add(joined, item)
        if size is not None:
            size.add(joined, item)
    return groups


class _Sums:
    """Sums of rows per group, known through scalar products only.

    dots[group][item]: of the group's sum with an item; norms[group]: length of the sum; lengths[item].
    """

    def __init__(self, rows: np.ndarray):
        self._gram = (rows @ rows.T).tolist()
        self.lengths = [max(math.sqrt(row[item]), 1e-12) for item, row in enumerate(self._gram)]
        self.dots: list[list[float]] = []
        self.norms: list[float] = []

    def add(self, group: int, item: int) -> None:
        row = self._gram[item]
        if group == len(self.dots):
            self.dots.append(row)
            self.norms.append(self.lengths[item])
        else:
            square = self.norms[group] ** 2 + 2 * self.dots[group][item] + row[item]
            self.norms[group] = max(math.sqrt(max(square, 0.0)), 1e-12)
            self.dots[group] = [a + b for a, b in zip(self.dots[group], row)]


def _split(unit: np.ndarray, pairwise: np.ndarray) -> Groups:
    """Two groups around the least similar pair of items."""
    count = len(unit)
    upper = np.where(np.triu(np.ones((count, count), dtype=bool), k=1), pairwise, np.inf)
    first, second = divmod(int(upper.argmin()), count)  # first of equals in row-major order
    left, right = [first], [second]
    lean = unit @ unit[first] - unit @ unit[second]
    for item in range(count):
        if item in (first, second):
            continue
        if abs(lean[item]) <= _TIE:
            side = left if len(left) <= len(right) else right
        else:
            side = left if lean[item] > 0 else right
        side.append(item)
    return tuple(left), tuple(right)


def _norm_gap(a: Any, b: Any, scale: float) -> np.ndarray:
    return np.float32(scale) * np.abs(a - b) / np.maximum(np.maximum(a, b), _TINY)


def _norms(rows: np.ndarray) -> np.ndarray:
    return np.sqrt((rows * rows).sum(axis=1))


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(_norms(rows), _TINY)[:, None]


def _matrix(features: Any) -> np.ndarray:
    matrix = np.asarray(features, dtype=np.float32)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise CalibrationError(f"features must be a matrix [items, features] with items, not of shape {matrix.shape}.")
    if not np.isfinite(matrix).all():
        raise CalibrationError(
            "features hold NaN or infinity: the model's activations overflowed; use bfloat16 or float32 weights."
        )
    return matrix


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise CalibrationError(f"metric {metric!r} is unknown; choose one of {', '.join(METRICS)}.")
