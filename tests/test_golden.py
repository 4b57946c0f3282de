"""The numbers of the paper's own implementation, through our public functions.

`tests/golden/README.md` says what the files hold. Discrete results must be equal, floats to 1e-5
relative plus 1e-6 absolute. AAH_GOLDEN_DIR points the same tests at other reference numbers.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from aah_hf.calibration import controller as controllers
from aah_hf.calibration import features, grouping, regimes
from aah_hf.coverage import measure
from aah_hf.ops import reference

BUNDLED = Path(__file__).parent / "golden" / "aah_v3"


def golden_folder() -> Path:
    """Where the reference numbers lie: the folder itself or one that holds `aah_v3/`."""
    folder = Path(os.environ.get("AAH_GOLDEN_DIR") or BUNDLED)
    return folder / "aah_v3" if (folder / "aah_v3").is_dir() else folder


@cache
def cases(kind: str, folder: Path) -> list[dict]:
    data = json.loads((folder / f"{kind}.json").read_text())
    return data["traces" if kind == "traces" else "cases"]


@cache
def tensors(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{kind}.safetensors")


def every(kind: str):
    """Parametrises a test over all cases of one file."""
    found = cases(kind, golden_folder())
    return pytest.mark.parametrize(
        "case", found, ids=[f"{i}-{c.get('kind', c.get('regime', ''))}".rstrip("-") for i, c in enumerate(found)]
    )


def close(actual, expected, what: str) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-5, atol=1e-6, err_msg=what)


def as_lists(groups) -> list[list[int]]:
    return [list(group) for group in groups]


def check_cluster(case: dict) -> None:
    result = grouping.cluster(
        case["features"],
        case["threshold"],
        metric=case["metric"],
        min_group_size=case["min_group_size"],
        forced_split=case["allow_forced_bipartition"],
        previous=case["previous_group_of_head"],
        together_bonus=case["churn_bonus"],
        norm_scale=case["normdiff_scale"],
    )
    assert as_lists(result.groups) == case["groups"]
    assert result.forced == case["forced"]


def check_hierarchy(case: dict) -> None:
    config = grouping.GroupingConfig(
        head_threshold=case["head_threshold"],
        group_threshold=case["group_threshold"],
        min_group_size=case["min_group_size"],
        max_depth=case["max_depth"],
    )
    levels = grouping.hierarchy(case["features"], config)
    assert [as_lists(level.groups) for level in levels] == [level["groups"] for level in case["levels"]]
    for height, (level, expected) in enumerate(zip(levels, case["levels"])):
        close(level.features, expected["features"], f"features of level {height}")


def check_controller(case: dict, folder: Path, **changes) -> None:
    """`changes` override the options of the decision (for the mutation tests)."""
    below, levels = np.array(case["features"], dtype=np.float32), []
    for groups in case["levels"]:
        below = grouping.member_means(below, groups)
        levels.append(grouping.Level(tuple(tuple(group) for group in groups), below))
    controller = controllers.Controller.from_tensors(tensors("controllers", folder), f"{case['case']}.")
    options = {"joint_siblings": case["joint_sibling"], "parent_constraint": case["parent_constraint"], **changes}
    decision = controllers.decide(levels, controller, **options)

    assert grouping.parents(levels) == case["parent_of_group"]
    for height, inputs in enumerate(controllers.controller_inputs(levels)):
        close(inputs, case["controller_inputs"][height], f"inputs of level {height}")
        close(decision.logits[height], case["logits"][height], f"logits of level {height}")
    assert [index.tolist() for index in decision.raw_index] == case["raw_window_index"]
    assert [index.tolist() for index in decision.index] == case["window_index"]


def trace_config(trace: dict, **changes) -> regimes.RegimeConfig:
    """The preset that a trace's name begins with (`full_adaptive_six_windows`), under the trace's settings."""
    name = max((name for name in regimes.REGIMES if trace["regime"].startswith(name)), key=len)
    settings = ("candidate_windows", "control_interval", "warmup_steps", "feature_ema", "window_ema")
    sizes = ("min_group_size", "max_depth")
    return regimes.regime(name, **{key: trace[key] for key in settings + sizes} | changes)


def attention(q, k, v, windows) -> torch.Tensor:
    """Attention in float32 as the paper computes it, over the keys that our rule makes visible.

    (The float64 reference differs by more than the tolerance where the float32 sum nearly cancels.)
    """
    seen = reference.visibility(windows, q.shape[2], k.shape[2])
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ v


def check_trace(trace: dict, folder: Path, *, lazy: bool = False, **changes) -> None:
    """Replays a trace; `lazy` measures only what the next decision needs, `changes` override settings."""
    name, recorded = trace["regime"], tensors("traces", folder)
    config = trace_config(trace, **changes)
    weighted = f"{name}.group.mlp.2.weight" in recorded
    controller = controllers.Controller.from_tensors(recorded, f"{name}.") if weighted else None
    state = regimes.LayerState.start(recorded[f"{name}.0.q"].shape[1])
    for index, expected in enumerate(trace["steps"]):
        here = f"step {index}: "
        q, k, v = (recorded[f"{name}.{index}.{x}"] for x in "qkv")
        time = q.shape[2]
        activations = features.moments(q, k, v)
        if not lazy:
            close(
                features.head_features(activations, state.attention),
                recorded[f"{name}.{index}.features"],
                here + "features",
            )
        needed = not lazy or regimes.needs_features(state, config)
        state, step = regimes.advance(state, activations if needed else None, controller, config)
        windows = [time if w is None else min(w, time) for w in step.windows]
        assert windows == expected["windows"], here
        assert (grouping.group_of(step.groups) if step.groups else []) == expected["group_of_head"], here
        assert step.path == expected["path"], here
        assert (step.decision is not None) == (expected["path"].endswith("_update")), here
        close(measure([windows], time, kv_heads=len(windows)).acr, expected["acr"], here + "acr")

        out = attention(q, k, v, windows)
        close(out, recorded[f"{name}.{index}.attention_output"], here + "attention_output")
        if not lazy or regimes.needs_features(state, config):
            measured = features.head_statistics(q, k, v, step.windows, output=out if index % 2 else None)
            for field in ("entropy", "output_norm", "usage"):
                close(getattr(measured, field), expected[field], here + field)
            state = regimes.observe(state, measured)


@every("clusters")
def test_clustering_gives_the_papers_groups_in_order(case):
    check_cluster(case)


@every("hierarchies")
def test_hierarchy_gives_the_papers_levels_and_features(case):
    check_hierarchy(case)


@every("controllers")
def test_decision_gives_the_papers_inputs_logits_and_windows(case):
    check_controller(case, golden_folder())


@every("traces")
def test_eight_steps_of_a_layer_give_the_papers_windows_groups_and_output(case):
    check_trace(case, golden_folder())


@every("traces")
def test_measuring_only_before_decisions_changes_nothing(case):
    check_trace(case, golden_folder(), lazy=True)


@every("traces")
def test_reference_attention_agrees_with_the_papers_output(case):
    recorded = tensors("traces", golden_folder())
    for index, expected in enumerate(case["steps"]):
        q, k, v, out = (recorded[f"{case['regime']}.{index}.{x}"] for x in ("q", "k", "v", "attention_output"))
        exact = reference.attention(q, k, v, expected["windows"])[0]
        # float32 rounding of the recorded sums, relative to the largest value that enters them
        torch.testing.assert_close(exact.float(), out, rtol=1e-5, atol=1e-6 * float(v.abs().max()))
