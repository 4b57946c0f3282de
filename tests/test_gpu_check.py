"""tests/gpu/check.py, as far as it runs without a GPU: its model part, its cases, and what it says."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aah_hf.ops import native

SCRIPT = Path(__file__).parent / "gpu" / "check.py"


@pytest.fixture
def gpu_folder(monkeypatch):
    """Its modules as the script sees them."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def test_models_on_a_cpu(tmp_path):
    if not native.available():
        pytest.skip(f"no native operator: {native.status().reason}")
    report = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--cpu-end-to-end", "--seed", "7", "--json", report]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALL PASSED" in done.stdout
    found = json.loads(report.read_text())
    facts = found["end_to_end"]["facts"]
    assert found["seed"] == 7 and set(facts) == {"qwen3, torch.float32", "llama, torch.float32"}
    assert all(0 <= error < 1e-4 for model in facts.values() for error in model.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 3 and "no NVIDIA GPU" in done.stdout


def test_its_cases_agree_with_the_reference_and_notice_a_wrong_window(gpu_folder):
    if not native.available():
        pytest.skip(f"no native operator: {native.status().reason}")
    import cases

    rng = random.Random(3)
    noticed = 0
    for dtype in cases.DTYPES:
        for head_dim in cases.HEAD_DIMS:
            case = cases.draw(rng, dtype, head_dim, max_len=150)
            t = cases.inputs(case, "cpu")
            want, want_lse = cases.truth(case, t)
            out, lse = cases.kernel(case, t)
            assert cases.error(out, want) <= cases.TOLERANCE[dtype], case
            assert cases.error(lse, want_lse) <= cases.LSE_TOLERANCE, case
            wrong = cases.replace(case, windows=tuple(None if w is None else w + 1 for w in case.windows))
            out, lse = cases.kernel(wrong, t)
            noticed += cases.error(lse, want_lse) > cases.LSE_TOLERANCE
    assert noticed >= 12  # in many cases every window is wider than what there is to see


def test_what_is_not_a_number_is_an_infinite_error(gpu_folder):
    from cases import error

    want = torch.tensor([1.0, -torch.inf, 0.0])
    assert error(want, want) == 0
    assert error(torch.tensor([1.0, -torch.inf, torch.nan]), want) == torch.inf
    assert error(torch.tensor([1.0, 0.0, 0.0]), want) == torch.inf
    assert error(torch.tensor([1.5, -torch.inf, 0.0]), want) == 0.5


def test_a_section_that_breaks_does_not_end_the_run(gpu_folder, capsys):
    from check import Check, run

    def breaks(check):
        raise ZeroDivisionError("by zero")

    def fails(check):
        check.fail("one thing")
        check.fail("another")

    report: dict = {}
    assert run(Check("cpu", 0, 0.0), {"a": breaks, "b": fails, "c": lambda check: {"x": 1}}, report) == []
    assert [report[name]["passed"] for name in "abc"] == [False, False, True]
    assert report["b"]["failures"] == ["one thing", "another"] and report["c"]["facts"] == {"x": 1}
    assert "ZeroDivisionError: by zero" in capsys.readouterr().out
