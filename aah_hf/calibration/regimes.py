"""The paper's regimes and controls, and what a layer does from step to step under one (method.md §5, §6).

A layer's life is a value, `LayerState`:

    state = LayerState.start(query_heads)
    state, step = advance(state, moments(q, k, v) if needs_features(state, config) else None, controller, config)
    ...attention under step.windows...
    if needs_features(state, config):  # the next step decides, and looks at this step's attention
        state = observe(state, head_statistics(q, k, v, step.windows))

Between decisions nothing is measured and nothing is decided. Grouping and choice run on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from aah_hf.calibration.controller import Controller, Decision, decide
from aah_hf.calibration.features import HeadStatistics, Moments, group_features, head_features, smooth
from aah_hf.calibration.grouping import GroupingConfig, Groups, Level, group_of, hierarchy, member_means, upper_levels
from aah_hf.errors import CalibrationError

GROUP_RULES = ("none", "heads", "renew", "freeze", "reuse", "random")
WINDOW_RULES = ("controller", "full", "fixed", "random")


@dataclass(frozen=True)
class RegimeConfig:
    """One regime or control of the paper (method.md §6). Make one with `regime(name)`.

    Attributes:
        name: what tables and logs call it.
        candidate_windows: ascending keys per query; the paper's for 4096 tokens.
        groups: "none"; "heads" (every head alone); "renew" (clustered at each decision); "freeze" (at the
            first only); "reuse" (level 0 of the first, upper levels rebuilt); "random" (two fixed halves).
        windows: "controller"; "full"; "fixed" (`fixed_window`); "random" (drawn once per head).
        joint_siblings: score pairs of siblings together.
        parent_constraint: a child's window is at most its parent's.
        shuffle_windows: permute the chosen windows over heads, by one permutation per layer.
        fixed_window: keys per query for windows="fixed".
        feature_ema: α, weight of the past in smoothed features; 0 does not smooth.
        window_ema: β, weight of the past in the executed window index; 0 does not smooth.
        control_interval: steps from one decision to the next.
        warmup_steps: first steps, in which every head is full.
        grouping: thresholds and depth of the hierarchy.
        seed: of random groups, random windows and the shuffle; layers draw independently.
    """

    name: str = "shallow_freeze"
    candidate_windows: tuple[int, ...] = (512, 1024, 2048, 4096)
    groups: str = "freeze"
    windows: str = "controller"
    joint_siblings: bool = True
    parent_constraint: bool = True
    shuffle_windows: bool = False
    fixed_window: int | None = None
    feature_ema: float = 0.9
    window_ema: float = 0.15
    control_interval: int = 5
    warmup_steps: int = 0
    grouping: GroupingConfig = field(default_factory=GroupingConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "candidate_windows", tuple(self.candidate_windows))
            self._check()
        except TypeError as error:  # a number that is none, as in a file that somebody edited
            raise CalibrationError(f"a setting of regime {self.name!r} is of the wrong type: {error}.") from error

    def _check(self) -> None:
        candidates = self.candidate_windows
        if not candidates or any(not isinstance(w, int) or isinstance(w, bool) for w in candidates):
            raise CalibrationError(f"candidate_windows must be integers, got {candidates}.")
        if candidates[0] < 1 or any(a >= b for a, b in pairwise(candidates)):
            raise CalibrationError(f"candidate_windows must be ascending and positive, got {candidates}.")
        for value, allowed, what in ((self.groups, GROUP_RULES, "groups"), (self.windows, WINDOW_RULES, "windows")):
            if value not in allowed:
                raise CalibrationError(f"{what} {value!r} is unknown; choose one of {', '.join(allowed)}.")
        for what in ("control_interval", "warmup_steps", "seed", "fixed_window"):
            value = getattr(self, what)
            if not isinstance(value, int) and not (what == "fixed_window" and value is None):
                raise CalibrationError(f"{what} is {value!r}; expected an integer.")
        if self.windows == "controller" and self.groups == "none":
            raise CalibrationError('windows="controller" scores groups: choose another groups than "none".')
        if (self.windows == "fixed") != (self.fixed_window is not None) or (self.fixed_window or 1) < 1:
            raise CalibrationError(
                f'fixed_window {self.fixed_window} with windows {self.windows!r}: "fixed" needs a window of at '
                "least 1, the others take none."
            )
        if not (0 <= self.feature_ema < 1 and 0 <= self.window_ema < 1):
            raise CalibrationError(
                f"feature_ema {self.feature_ema} and window_ema {self.window_ema} must be at least 0 and below 1."
            )
        if self.control_interval < 1 or self.warmup_steps < 0:
            raise CalibrationError(
                f"control_interval {self.control_interval} must be at least 1, warmup_steps {self.warmup_steps} at "
                "least 0."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, for provenance and for controller files."""
        return {**asdict(self), "candidate_windows": list(self.candidate_windows)}

    @classmethod
    def from_dict(cls, data: Any) -> RegimeConfig:
        """Read the form of `to_dict`.

        Raises:
            CalibrationError: not of that form, or a setting out of range.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("grouping", {}), Mapping):
            raise CalibrationError(f"a regime must be a JSON object with an object `grouping`, not {data!r:.80}.")
        known = {f.name for f in fields(cls)}, {f.name for f in fields(GroupingConfig)}
        settings, inner = dict(data), dict(data.get("grouping", {}))
        if unknown := sorted(map(str, (settings.keys() - known[0]) | (inner.keys() - known[1]))):
            raise CalibrationError(f"{', '.join(unknown)}: no such setting of a regime.")
        try:
            settings["grouping"] = GroupingConfig(**inner)
        except TypeError as error:
            raise CalibrationError(f"a threshold of the grouping is of the wrong type: {error}.") from error
        return cls(**settings)


def paper_windows(seq_len: int) -> tuple[int, ...]:
    """The paper's four candidates at another length: an eighth, a quarter, half and all of the sequence.

    At the paper's 4096 tokens these are its 512, 1024, 2048 and 4096.

    Raises:
        CalibrationError: fewer than 8 tokens.
    """
    if seq_len < 8:
        raise CalibrationError(f"seq_len is {seq_len}; the paper's four candidate windows need at least 8 tokens.")
    return seq_len // 8, seq_len // 4, seq_len // 2, seq_len


_PRESETS: dict[str, dict[str, Any]] = {
    "full_attention": {"groups": "none", "windows": "full"},
    "grouping_off": {"groups": "heads", "joint_siblings": False},
    "full_adaptive": {"groups": "renew"},
    "shallow_freeze": {"groups": "freeze", "grouping": GroupingConfig(max_depth=1)},
    "deep_practical_reuse": {"groups": "reuse"},
    "fixed_random_grouping": {"groups": "random"},
    "independent_scoring": {"groups": "renew", "joint_siblings": False},
    "no_feature_ema": {"groups": "renew", "feature_ema": 0.0},
    "no_parent_constraint": {"groups": "renew", "parent_constraint": False},
    "control_off": {"groups": "renew", "windows": "full"},
    "fixed_window": {"groups": "none", "windows": "fixed", "fixed_window": 1024},
    "random_uniform": {"groups": "none", "windows": "random"},
    "shuffle_post_select": {
        "groups": "freeze",
        "shuffle_windows": True,
        "grouping": GroupingConfig(max_depth=1),
    },
}
REGIMES = tuple(_PRESETS)
"""Names of the regimes and controls."""


def regime(name: str, *, seq_len: int | None = None, **changes: Any) -> RegimeConfig:
    """The preset `name` of `REGIMES`, with fields of `RegimeConfig` changed.

    Fields of `GroupingConfig` may be given as well: `regime("full_adaptive", max_depth=2, seed=1)`.

    Args:
        name: one of `REGIMES`.
        seq_len: tokens; candidates become `paper_windows(seq_len)` and a fixed window a quarter of it. Default:
            the paper's 4096.

    Raises:
        CalibrationError: an unknown name or setting, or a setting out of range; the message lists the choices.
    """
    if name not in REGIMES:
        raise CalibrationError(f"regime {name!r} is unknown; choose one of {', '.join(REGIMES)}.")
    settings, inner = dict(_PRESETS[name]), dict(changes)
    if seq_len is not None:
        settings["candidate_windows"] = paper_windows(seq_len)
        if settings.get("fixed_window") is not None:
            settings["fixed_window"] = seq_len // 4
    known = {f.name for f in fields(GroupingConfig)}
    settings |= {key: inner.pop(key) for key in changes if key not in known}
    if unknown := settings.keys() - {f.name for f in fields(RegimeConfig)}:
        raise CalibrationError(
            f"{', '.join(sorted(unknown))}: no such setting of a regime; there are "
            f"{', '.join(f.name for f in (*fields(RegimeConfig), *fields(GroupingConfig)) if f.name != 'name')}."
        )
    try:
        settings["grouping"] = replace(settings.get("grouping", GroupingConfig()), **inner)
    except TypeError as error:
        raise CalibrationError(f"a threshold of the grouping is of the wrong type: {error}.") from error
    return RegimeConfig(name=name, **settings)


@dataclass(frozen=True, eq=False)
class LayerState:
    """Everything one layer carries from step to step; starts empty.

    Attributes:
        attention: how the heads attended in the step before.
        layer: index of the layer; makes random draws differ between layers.
        step: steps so far.
        decisions: decisions so far.
        smoothed: [query_heads, 9], features smoothed over decision steps.
        levels: the hierarchy in force.
        index: [query_heads], candidate that the last decision chose.
        executed: [query_heads] float32, `index` smoothed; rounded, it is the candidate that runs.
    """

    attention: HeadStatistics
    layer: int = 0
    step: int = 0
    decisions: int = 0
    smoothed: np.ndarray | None = None
    levels: tuple[Level, ...] = ()
    index: np.ndarray | None = None
    executed: np.ndarray | None = None

    @staticmethod
    def start(query_heads: int, layer: int = 0) -> LayerState:
        """The state before a layer's first step."""
        return LayerState(HeadStatistics.zeros(query_heads), layer)


@dataclass(frozen=True, eq=False)
class Step:
    """What one layer does in one step.

    Attributes:
        windows: keys per query for each query head, None for full attention.
        groups: level 0 of the hierarchy in force; empty where heads are not grouped.
        path: what happened, in the words of the paper's implementation.
        decision: the new decision, None where an earlier one is in force.
    """

    windows: tuple[int | None, ...]
    groups: Groups
    path: str
    decision: Decision | None = None


def decides(step: int, config: RegimeConfig) -> bool:
    """Is a decision due: at the first step after warm-up, then every `control_interval` steps?"""
    return step >= config.warmup_steps and (step - config.warmup_steps) % config.control_interval == 0


def needs_features(state: LayerState, config: RegimeConfig) -> bool:
    """Does the next `advance` look at activations, and at the attention of the step before it?"""
    return config.groups != "none" and (state.step == 0 or decides(state.step, config))


def observe(state: LayerState, attention: HeadStatistics) -> LayerState:
    """Remembers how the heads attended in the step just taken."""
    return replace(state, attention=attention)


def advance(
    state: LayerState, activations: Moments | None, controller: Controller | None, config: RegimeConfig
) -> tuple[LayerState, Step]:
    """One step of one layer (method.md §5, §6): the windows to run now, and the state after.

    Args:
        activations: this step's q, k and v; looked at only where `needs_features(state, config)`.
        controller: looked at only at decisions with windows="controller".

    Raises:
        CalibrationError: activations or controller missing where needed, or of another size; a state that
            another configuration made.
    """
    heads = len(state.attention.entropy)
    warm = state.step < config.warmup_steps
    deciding = decides(state.step, config)
    smoothed, levels = state.smoothed, state.levels
    if needs_features(state, config):
        if activations is None or activations.mean.shape[1] != heads:
            raise CalibrationError(f"step {state.step} needs the moments of q, k and v of {heads} query heads.")
        features = head_features(activations, state.attention)
        smoothed = smooth(smoothed, features, config.feature_ema)
        levels = form_levels(state, smoothed, features, activations, config)
    after = replace(state, step=state.step + 1, decisions=state.decisions + deciding, smoothed=smoothed, levels=levels)
    groups = levels[0].groups if levels and config.groups != "heads" else ()

    if warm or config.windows == "full":
        return after, Step((None,) * heads, groups, _path(state, config, warm, deciding))
    if config.windows == "fixed":
        return after, Step((config.fixed_window,) * heads, groups, _path(state, config, warm, deciding))
    decision, index = None, state.index
    if config.windows == "random":
        if index is None:
            draw = torch.randint(len(config.candidate_windows), (heads,), generator=_generator(state, config))
            index = draw.numpy()
    elif deciding:
        if controller is None or controller.candidates != len(config.candidate_windows):
            raise CalibrationError(
                f"step {state.step} needs a controller that scores {len(config.candidate_windows)} candidate windows."
            )
        decision = decide(
            levels,
            controller,
            joint_siblings=config.joint_siblings and config.groups != "heads",
            parent_constraint=config.parent_constraint,
        )
        index = decision.index[0][group_of(levels[0].groups)]
        if config.shuffle_windows:
            index = index[torch.randperm(heads, generator=_generator(state, config)).numpy()]
    if index is None:
        raise CalibrationError(
            f"step {state.step} reuses a decision, but none was taken: the state comes from a longer warm-up or "
            "another regime; start from LayerState.start()."
        )
    executed = smooth(state.executed, index, config.window_ema)
    return replace(after, index=index, executed=executed), Step(
        executed_windows(executed, config), groups, _path(state, config, warm, deciding), decision
    )


def executed_windows(executed: np.ndarray, config: RegimeConfig) -> tuple[int, ...]:
    """The windows of smoothed candidate indices [query_heads]: rounded, half to even (method.md §5)."""
    return tuple(config.candidate_windows[i] for i in np.rint(executed).astype(int))


def form_levels(
    state: LayerState, smoothed: np.ndarray, features: np.ndarray, activations: Moments, config: RegimeConfig
) -> tuple[Level, ...]:
    """The hierarchy of this step, under the regime's rule of grouping (method.md §3, §6).

    Freshly clustered groups are described by their members' smoothed features, kept ones by this step's.
    """
    heads = len(features)
    if config.groups == "heads":
        return (Level(tuple((head,) for head in range(heads)), features),)
    if config.groups == "random":
        order = torch.randperm(heads, generator=_generator(state, config)).tolist()
        groups = tuple(tuple(half) for half in (order[: heads // 2], order[heads // 2 :]) if half)
        values = group_features(activations, state.attention, groups)
        copies = Level(tuple((group,) for group in range(len(groups))), values)
        return (Level(groups, values), *[copies] * (config.grouping.max_depth - 1))
    if config.groups == "renew" or not state.decisions:
        # kept groups are those of the first decision: warm-up's only steer it through the bonus
        previous = group_of(state.levels[0].groups) if state.levels else None
        return hierarchy(smoothed, config.grouping, previous)
    kept = [level.groups for level in state.levels]
    levels = [Level(kept[0], group_features(activations, state.attention, kept[0]))]
    if config.groups == "reuse":
        return upper_levels(levels[0], config.grouping)
    for groups in kept[1:]:
        levels.append(Level(groups, member_means(levels[-1].features, groups)))
    return tuple(levels)


def _generator(state: LayerState, config: RegimeConfig) -> torch.Generator:
    """A CPU generator of its own; the stride keeps seed s + 1 of one layer from being seed s of the next."""
    return torch.Generator().manual_seed(config.seed + 1_000_003 * state.layer)


def _path(state: LayerState, config: RegimeConfig, warm: bool, deciding: bool) -> str:
    if warm:
        return "warmup_or_disabled_control"
    if config.windows == "full":
        return "full_attention" if config.groups == "none" else "grouping_only_full_attention"
    if config.windows != "controller":
        return f"{config.windows}_windows"
    prefix = "ungrouped_control" if config.groups == "heads" else "grouped_control"
    if not deciding:
        return f"{prefix}_cached"
    if config.groups == "random":
        return f"{prefix}_fixed_random_update"
    if state.decisions and config.groups == "freeze":
        return f"{prefix}_frozen_learned_topology_update"
    if state.decisions and config.groups == "reuse":
        return f"{prefix}_reuse_update"
    return f"{prefix}_update"
