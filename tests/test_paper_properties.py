"""What the paper's mechanism promises on any input: grouping, features, decisions, regimes."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aah_hf.calibration import features, grouping, regimes
from aah_hf.calibration.controller import Controller, constrain, decide, score
from aah_hf.calibration.grouping import GroupingConfig, Level, cluster, group_of, hierarchy
from aah_hf.errors import CalibrationError
from aah_hf.ops import reference


@st.composite
def feature_matrices(draw, max_items: int = 16):
    """[items, 9] in sixteenths: exact in float32, with ties and zero rows."""
    items = draw(st.integers(1, max_items))
    row = st.lists(st.integers(-48, 48), min_size=9, max_size=9)
    return np.array(draw(st.lists(row, min_size=items, max_size=items)), dtype=np.float32) / 16


def members(groups) -> list[int]:
    return sorted(item for group in groups for item in group)


@given(
    feature_matrices(), st.floats(-1, 1), st.integers(1, 4), st.sampled_from(grouping.METRICS), st.booleans(), st.data()
)
def test_every_item_is_in_exactly_one_group(x, threshold, size, metric, forced, data):
    previous = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=len(x), max_size=len(x)))
    result = cluster(x, threshold, metric=metric, min_group_size=size, forced_split=forced, previous=previous)
    assert members(result.groups) == list(range(len(x)))
    assert all(result.groups)
    assert not forced or len(result.groups) > 1 or len(x) == 1


@given(feature_matrices(), st.floats(-1, 1))
def test_groups_and_their_members_keep_the_order_in_which_they_joined(x, threshold):
    groups = cluster(x, threshold).groups
    assert all(list(group) == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(feature_matrices(), st.floats(-1, 1), st.integers(2, 4), st.sampled_from(grouping.METRICS))
def test_merging_moves_only_small_groups_and_leaves_at_least_two(x, threshold, size, metric):
    before = cluster(x, threshold, metric=metric).groups
    after = cluster(x, threshold, metric=metric, min_group_size=size).groups
    assert len(after) >= min(len(before), 2)
    assert len(after) <= len(before)
    for group in before:  # members that were together stay together
        assert any(set(group) <= set(kept) for kept in after)


@given(feature_matrices(), st.sampled_from([0.25, 4.0]), st.sampled_from(grouping.METRICS))
def test_groups_do_not_depend_on_the_unit_of_the_features(x, factor, metric):
    # powers of two change no rounding
    assert cluster(x, 0.5, metric=metric, min_group_size=2) == cluster(x * factor, 0.5, metric=metric, min_group_size=2)


def test_heads_that_are_all_alike_split_in_two_equal_halves():
    result = cluster(np.ones((6, 9)), 0.72, forced_split=True)
    assert result.forced and result.groups == ((0, 2, 4), (1, 3, 5))


@given(feature_matrices(), st.integers(1, 4), st.integers(1, 3))
def test_hierarchy_partitions_every_level_and_stops_at_its_depth(x, depth, size):
    levels = hierarchy(x, GroupingConfig(max_depth=depth, min_group_size=size))
    assert 1 <= len(levels) <= depth
    below = len(x)
    for level in levels:
        assert members(level.groups) == list(range(below))
        assert level.features.shape == (len(level.groups), 9)
        below = len(level.groups)
    assert all(len(level.groups) > 1 for level in levels[1:])
    assert [len(row) for row in grouping.parents(levels)] == [len(level.groups) for level in levels[:-1]]


@pytest.mark.parametrize(
    "x, error", [([[math.nan] * 9], "NaN"), ([], "matrix"), (np.zeros((2, 3, 4)), "matrix"), ([1.0, 2.0], "matrix")]
)
def test_bad_features_are_refused(x, error):
    with pytest.raises(CalibrationError, match=error):
        cluster(x, 0.5)


def activations(seed: int = 0, heads: int = 6, kv_heads: int = 2, length: int = 33):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, length, 8)
    q, k, v = (torch.randn(shape, generator=generator) * 2 + 0.5 for _ in range(3))
    return q, k[:, :kv_heads], v[:, :kv_heads]


def test_features_are_those_of_the_kv_head_that_a_query_head_reads():
    q, k, v = activations()
    x = features.head_features(features.moments(q, k, v), features.HeadStatistics.zeros(6))
    for head in range(6):
        expected = [
            f(t) for t in (q[:, head], k[:, head // 3], v[:, head // 3]) for f in (lambda t: t.abs().mean(), torch.std)
        ]
        np.testing.assert_allclose(x[head, :6], torch.stack(expected), rtol=1e-5)
    assert not x[:, 6:].any()


@given(st.integers(0, 5), st.permutations(range(6)), st.integers(1, 5))
def test_group_features_are_those_of_the_members_activations_together(seed, order, cut):
    q, k, v = activations(seed)
    known = features.HeadStatistics(*np.random.default_rng(seed).random((3, 6), dtype=np.float32))
    groups = (tuple(order[:cut]), tuple(order[cut:]))
    x = features.group_features(features.moments(q, k, v), known, groups)
    for row, group in zip(x, groups):
        together = [torch.cat([t[:, h // ratio] for h in group]) for t, ratio in ((q, 1), (k, 3), (v, 3))]
        expected = [f(t).item() for t in together for f in (lambda t: t.abs().mean(), torch.std)]
        expected += [y[list(group)].mean() for y in (known.entropy, known.output_norm, known.usage)]
        np.testing.assert_allclose(row, expected, rtol=2e-5)


@pytest.mark.parametrize("windows", [(None,) * 6, (5, 5, 1, None, 40, 16)])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("block", [7, 512])
def test_head_statistics_are_those_of_the_whole_attention_matrix(windows, sinks, block):
    q, k, v = activations()
    seen = reference.visibility([w or 33 for w in windows], 33, 33, sinks)
    scores = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * 8**-0.5
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    out = p @ v.repeat_interleave(3, 1)
    entropy = -(p * torch.log(p + 1e-9)).sum(-1).mean(dim=(0, 2)) / math.log(33)
    measured = features.head_statistics(q, k, v, windows, sink_tokens=sinks, query_block=block)
    np.testing.assert_allclose(measured.entropy, entropy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(measured.output_norm, out.norm(dim=-1).mean(dim=(0, 2)), rtol=1e-5)
    np.testing.assert_allclose(measured.usage, p[..., -1].mean(dim=(0, 2)), rtol=1e-5)
    known = features.head_statistics(q, k, v, windows, sink_tokens=sinks, output=out)
    np.testing.assert_allclose(known.output_norm, measured.output_norm, rtol=1e-5)


@settings(max_examples=40)
@given(feature_matrices(), st.integers(0, 3), st.integers(1, 6))
def test_a_child_never_sees_further_than_its_parent(x, seed, candidates):
    torch.manual_seed(seed)
    levels = hierarchy(x, GroupingConfig(min_group_size=1))
    decision = decide(levels, Controller(candidates))
    for height, above in enumerate(grouping.parents(levels)):
        assert (decision.index[height] <= decision.index[height + 1][above]).all()
        assert (decision.index[height] <= decision.raw_index[height]).all()
    assert all((margin >= 0).all() for margin in decision.margins)
    free = decide(levels, Controller(candidates), parent_constraint=False)
    assert all((a == b).all() for a, b in zip(free.index, free.raw_index))


def test_the_constraint_reaches_from_the_top_to_the_bottom():
    flat = np.zeros((2, 9), dtype=np.float32)
    levels = [Level(((0,), (1,)), flat)] * 3
    index = constrain([np.array([3, 3]), np.array([2, 3]), np.array([1, 3])], levels)
    assert [row.tolist() for row in index] == [[1, 3], [1, 3], [1, 3]]


def test_logits_carry_gradients_to_both_scorers():
    controller = Controller()
    levels = hierarchy(np.random.default_rng(0).random((8, 9), dtype=np.float32), GroupingConfig(min_group_size=1))
    sum(x.square().sum() for x in score(levels, controller)).backward()
    assert controller.sibling.mlp[0].weight.grad.abs().sum() > 0
    odd = score([Level(((0, 1),), levels[0].features[:1])], controller)  # no sibling: its own logits
    sum(x.square().sum() for x in odd).backward()
    assert controller.group.mlp[0].weight.grad.abs().sum() > 0


def run(config: regimes.RegimeConfig, steps: int = 9, heads: int = 6, layer: int = 0) -> list[regimes.Step]:
    torch.manual_seed(0)
    controller = Controller(len(config.candidate_windows))
    state, taken = regimes.LayerState.start(heads, layer), []
    for index in range(steps):
        q, k, v = activations(index, heads)
        known = features.moments(q, k, v) if regimes.needs_features(state, config) else None
        state, step = regimes.advance(state, known, controller, config)
        if regimes.needs_features(state, config):
            state = regimes.observe(state, features.head_statistics(q, k, v, step.windows))
        taken.append(step)
    return taken


@pytest.mark.parametrize("name", regimes.REGIMES)
@pytest.mark.parametrize("warmup", [0, 2])
def test_every_regime_decides_when_due_and_reuses_in_between(name, warmup):
    config = regimes.regime(name, candidate_windows=(4, 8, 16, 32), control_interval=3, warmup_steps=warmup)
    taken = run(config)
    decided = [index for index, step in enumerate(taken) if step.decision]
    assert decided == (
        [i for i in range(9) if i >= warmup and (i - warmup) % 3 == 0] if config.windows == "controller" else []
    )
    assert all(step.windows == (None,) * 6 for step in taken[:warmup])
    for before, step in zip(taken[warmup:], taken[warmup + 1 :]):
        if not step.decision:
            assert step.windows == before.windows
    if config.groups not in ("none", "heads"):
        assert all(members(step.groups) == list(range(6)) for step in taken)
    if config.groups in ("freeze", "reuse", "random"):
        assert len({step.groups for step in taken[warmup:]}) == 1
    if config.windows == "controller" and config.groups != "heads" and not config.shuffle_windows:
        for step in (taken[i] for i in decided):
            by_group = {(group, w) for group, w in zip(group_of(step.groups), step.windows)}
            assert len(by_group) == len(step.groups)  # four candidates: smoothing never changes the choice


def test_random_controls_differ_between_layers_and_leave_the_global_generator_alone():
    config = regimes.regime("random_uniform", candidate_windows=(4, 8, 16, 32))
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    state = regimes.LayerState.start(64)
    first = regimes.advance(state, None, None, config)[1].windows
    again = regimes.advance(state, None, None, config)[1].windows
    other = regimes.advance(regimes.LayerState.start(64, layer=1), None, None, config)[1].windows
    assert torch.rand(1) == expected
    assert first == again != other
    assert set(first) == {4, 8, 16, 32}


def test_shuffling_keeps_the_windows_and_moves_the_heads():
    small = dict(candidate_windows=(4, 8, 16, 32), max_depth=1)
    plain = run(regimes.regime("shallow_freeze", **small))
    mixed = run(regimes.regime("shuffle_post_select", **small))
    assert sorted(plain[0].windows) == sorted(mixed[0].windows)


@pytest.mark.parametrize(
    "name, changes, error",
    [
        ("shallow", {}, "shallow_freeze"),
        ("full_adaptive", {"depth": 2}, "depth"),
        ("full_adaptive", {"candidate_windows": (8, 4)}, "ascending"),
        ("full_adaptive", {"groups": "none"}, "scores groups"),
        ("full_adaptive", {"groups": "tree"}, "choose one of"),
        ("full_adaptive", {"window_ema": 1.0}, "below 1"),
        ("full_adaptive", {"control_interval": 0}, "at least 1"),
        ("full_adaptive", {"max_depth": 0}, "at least 1"),
        ("full_adaptive", {"metric": "euclid"}, "cosine_normdiff"),
        ("fixed_window", {"fixed_window": None}, "needs a window"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(name, changes, error):
    with pytest.raises(CalibrationError, match=error):
        regimes.regime(name, **changes)


def test_a_decision_without_what_it_needs_says_what_is_missing():
    state, config = regimes.LayerState.start(6), regimes.regime("full_adaptive")
    known = features.moments(*activations())
    with pytest.raises(CalibrationError, match="moments"):
        regimes.advance(state, None, Controller(), config)
    with pytest.raises(CalibrationError, match="4 candidate windows"):
        regimes.advance(state, known, Controller(6), config)
    with pytest.raises(CalibrationError, match="sibling"):
        regimes.advance(state, known, Controller(4, sibling_hidden=None), config)
    warm = regimes.regime("full_adaptive", warmup_steps=9)
    state, _ = regimes.advance(state, known, Controller(), warm)
    with pytest.raises(CalibrationError, match="longer warm-up"):
        regimes.advance(state, None, Controller(), config)
    with pytest.raises(CalibrationError, match="no controller weights"):
        Controller.from_tensors({}, "layer.")


@pytest.mark.parametrize("name", ["full_adaptive", "deep_practical_reuse", "grouping_off"])
def test_deciding_for_36_layers_of_32_heads_takes_under_50_ms(name):
    config = regimes.regime(name, control_interval=1)
    controllers = [Controller() for _ in range(36)]
    known = [features.moments(*activations(seed, heads=32, kv_heads=8)) for seed in range(36)]
    states = [regimes.LayerState.start(32, layer) for layer in range(36)]
    attention = features.HeadStatistics(*np.random.default_rng(0).random((3, 32), dtype=np.float32))
    spent = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(30):
            start = time.process_time()  # not the time that other processes take
            for layer in range(36):
                observed = regimes.observe(states[layer], attention)
                states[layer], _ = regimes.advance(observed, known[layer], controllers[layer], config)
            spent.append(time.process_time() - start)
            if spent[-1] < 0.050:
                break
    finally:
        torch.set_num_threads(threads)
    assert min(spent) < 0.050, spent
