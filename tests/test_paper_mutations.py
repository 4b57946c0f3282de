"""Tests of the tests: each rule of the paper, dropped from our code, makes a golden case fail.

Always on the bundled numbers, since others need not exercise every rule.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from test_golden import BUNDLED, cases, check_cluster, check_controller, check_hierarchy, check_trace

from aah_hf.calibration import controller as controllers
from aah_hf.calibration import features, grouping, regimes

CHECKS = {
    "clusters": check_cluster,
    "hierarchies": check_hierarchy,
    "controllers": partial(check_controller, folder=BUNDLED),
    "traces": partial(check_trace, folder=BUNDLED),
}


def some_case_fails(kind: str, **changes) -> bool:
    """Does any golden case of this kind fail? `changes` are options of the decision or regime."""
    for case in cases(kind, BUNDLED):
        try:
            CHECKS[kind](case, **changes)
        except AssertionError:
            return True
    return False


def test_no_bonus_for_heads_that_were_together(monkeypatch):
    monkeypatch.setattr(grouping, "add_bonus", lambda pairwise, previous, bonus: pairwise)
    assert some_case_fails("clusters")


def test_no_smoothing_of_the_window_index():
    assert some_case_fails("traces", window_ema=0.0)


def test_no_parent_constraint():
    assert some_case_fails("controllers", parent_constraint=False)
    assert some_case_fails("traces", parent_constraint=False)


def test_merging_without_emptied_candidates(monkeypatch):
    rule = grouping.may_receive
    monkeypatch.setattr(
        grouping,
        "may_receive",
        lambda groups, source: rule(groups, source) & np.array([bool(group) for group in groups]),
    )
    assert some_case_fails("clusters")


def test_no_merging(monkeypatch):
    monkeypatch.setattr(grouping, "merge_small", lambda unit, groups, *rest: groups)
    assert some_case_fails("clusters")


def test_features_smoothed_at_every_step(monkeypatch):
    original = regimes.advance

    def advance(state, activations, controller, config):
        decided = regimes.needs_features(state, config)
        after, step = original(state, activations, controller, config)
        if not decided:
            raw = features.head_features(activations, state.attention)
            after = replace(after, smoothed=features.smooth(after.smoothed, raw, config.feature_ema))
        return after, step

    monkeypatch.setattr(regimes, "advance", advance)
    assert some_case_fails("traces")


def test_kept_groups_described_by_smoothed_features(monkeypatch):
    original = regimes.form_levels

    def form_levels(state, smoothed, raw, activations, config):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(regimes, "group_features", lambda a, b, groups: grouping.member_means(smoothed, groups))
            return original(state, smoothed, raw, activations, config)

    monkeypatch.setattr(regimes, "form_levels", form_levels)
    assert some_case_fails("traces")


def test_groups_of_the_warmup_kept_at_the_first_decision(monkeypatch):
    original = regimes.form_levels

    def form_levels(state, *rest):
        return original(replace(state, decisions=1) if state.levels else state, *rest)

    monkeypatch.setattr(regimes, "form_levels", form_levels)
    assert some_case_fails("traces")


def test_siblings_scored_one_by_one():
    assert some_case_fails("controllers", joint_siblings=False)
    assert some_case_fails("traces", joint_siblings=False)


def test_siblings_paired_in_the_order_in_which_they_joined(monkeypatch):
    def sibling_pairs(levels):
        pairs, row = [], 0
        for level, above in zip(levels, [*levels[1:], None]):
            for family in [range(len(level.groups))] if above is None else above.groups:
                pairs += zip([row + group for group in family[::2]], [row + group for group in family[1::2]])
            row += len(level.groups)
        return np.array(pairs).reshape(-1, 2)

    monkeypatch.setattr(controllers, "sibling_pairs", sibling_pairs)
    assert some_case_fails("controllers")
