"""The CUDA forward kernel on its emulator, against the float64 reference: no GPU is needed, and none is used."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import subprocess

import pytest
import sim_backend as sim
import torch
from grid import Case, cases, tensors
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sim_mutants import MUTANTS

from aah_hf.ops import native, reference

pytestmark = pytest.mark.skipif(sim.COMPILER is None, reason="the emulator needs a C++ compiler")

# what a row of probabilities rounded to the dtype may lose, relative to the largest value
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)  # fragments, tiles of keys, tiles of queries


def error(got: torch.Tensor, want: torch.Tensor, least: float = 1.0) -> float:
    """Largest difference relative to the largest entry; inf where one is NaN or differs from an infinite other."""
    same = (got.double() == want) & want.isinf()
    difference = torch.where(same, 0.0, (got.double() - want).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    size = torch.where(want.isinf(), 0.0, want.abs())
    return (difference.max() / size.max().clamp_min(least)).item() if want.numel() else 0.0


def assert_close(got, want, dtype):
    (out, lse, *_), (want_out, want_lse) = got, want
    assert error(out, want_out) <= TOLERANCE[dtype]
    assert error(lse, want_lse) <= 3e-6


def truth(case: Case, t):
    return reference.attention(
        t.q,
        t.k,
        t.v,
        case.windows,
        case.sink_tokens,
        softcap=case.softcap,
        sink_logits=t.sink_logits,
        q_start=case.q_start,
        valid=t.valid,
        documents=t.documents,
        limit=case.limit,
    )


def run(case: Case, t, **how):
    """A case of the shared grid on the emulator. Tokens of padding are NaN there: whoever reads one shows it."""
    rows: dict = {"q_start": case.q_start}
    q, k, v = (x.detach().clone() for x in (t.q, t.k, t.v))
    if t.sequences is not None:
        rows = native.arrange(t.sequences.runs, case.batch, case.q_len, case.kv_len, q_start=case.q_start)
        padding = ~t.sequences.valid[:, None, : case.kv_len, None]
        k.masked_fill_(padding, torch.nan)
        v.masked_fill_(padding, torch.nan)
        q.masked_fill_(padding[:, :, case.q_start : case.q_start + case.q_len], torch.nan)
    return sim.forward(
        q,
        k,
        v,
        case.windows,
        case.sink_tokens,
        softcap=case.softcap,
        sink_logits=t.sink_logits,
        limit=case.limit,
        **rows,
        **how,
    )


@st.composite
def sim_cases(draw, dims, max_len: int):
    """The shared grid, with these kernels' head sizes and edges. Returns (case, how to run it)."""
    case = draw(cases(layouts=("none", "left", "right", "packed"), max_len=max_len))
    edges = st.sampled_from([*EDGES, case.kv_len, case.kv_len + 1, 2**31 - 1])
    case = dataclasses.replace(
        case,
        head_dim=draw(st.sampled_from(dims)),
        windows=tuple(draw(edges) for _ in range(case.kv_heads * case.group)),
        mask="none",
    )
    how = {
        "seed": draw(st.integers(0, 9)),
        "lazy": draw(st.booleans()),
        "most": draw(st.sampled_from([0, 2, 3])),
        "processors": draw(st.sampled_from([1, 132])),
    }
    return case, how


def check(drawn, dtype):
    case, how = drawn
    t = tensors(case, dtype)
    assert_close(run(case, t, **how), truth(case, t), dtype)


settings = {"suppress_health_check": [HealthCheck.too_slow], "deadline": None}


@pytest.mark.parametrize("dtype", sim.DTYPES, ids=str)
@hypothesis_settings(max_examples=12, **settings)
@given(sim_cases((8, 40, 64), 140))
def test_kernel_equals_the_reference(dtype, drawn):
    check(drawn, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sim.DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(8, 24, 64), (72, 80), (88, 96), (104, 128), (136, 192), (200, 256)], ids=str)
@hypothesis_settings(max_examples=40, **settings)
@given(st.data())
def test_kernel_equals_the_reference_for_every_head_size(dtype, dims, data):
    check(data.draw(sim_cases(dims, 300)), dtype)


def plain(length, dtype=torch.float16, heads=2, kv_heads=1, dim=64, batch=1, kv_len=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    kv_len = length if kv_len is None else kv_len
    q = torch.randn(batch, heads, length, dim, generator=g).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, dim, generator=g).to(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("lazy", [True, False])
def test_no_schedule_of_warps_changes_a_bit(seed, lazy):
    q, k, v = plain(200)
    first = sim.forward(q, k, v, [65, None], 3)
    other = sim.forward(q, k, v, [65, None], 3, seed=seed, lazy=lazy)
    assert torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])


@pytest.mark.parametrize("dtype", sim.DTYPES, ids=str)
def test_split_keys_merge_to_the_same_result(dtype):
    q, k, v = plain(7, dtype, kv_len=300)
    logits = torch.tensor([0.5, -1.0])
    for sink_logits in (None, logits):
        arguments = {"sink_logits": sink_logits, "q_start": 293}
        got = sim.forward(q, k, v, [None, 130], 4, **arguments, most=2)
        assert got[2] == 2  # both heads
        assert_close(got, reference.attention(q, k, v, [10**6, 130], 4, **arguments), dtype)


def test_few_queries_are_split_without_being_told():
    q, k, v = plain(1, kv_len=1000)
    got = sim.forward(q, k, v, [None, 20], 1, q_start=999, processors=132)
    assert got[2] > 0
    assert_close(got, reference.attention(q, k, v, [10**6, 20], 1, q_start=999), torch.float16)


def test_float32_is_not_computed_in_less():
    """One tf32 product would be off by 1e-4 and more."""
    q, k, v = plain(96, torch.float32)
    got = sim.forward(q, k, v, [None, 33])
    assert error(got[0], reference.attention(q, k, v, [96, 33])[0]) < 1e-6


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale):
    q, k, v = plain(70)
    assert_close(
        sim.forward(q, k, v, [9, None], 1, scale=scale),
        reference.attention(q, k, v, [9, 70], 1, scale=scale),
        torch.float16,
    )


def test_rows_that_see_nothing_are_zero():
    q, k, v = plain(40)
    end = torch.tensor([0], dtype=torch.int32)
    out, lse, _ = sim.forward(q, k, v, [5, None], 2, end=end)
    assert (out == 0).all() and (lse == -torch.inf).all()
    out, lse, _ = sim.forward(q, k, v, [5, None], 2, end=end, sink_logits=torch.tensor([1.5, 2.5]))
    assert (out == 0).all() and (lse == torch.tensor([1.5, 2.5])[:, None]).all()
    out, lse, _ = sim.forward(q, k[:, :, :0], v[:, :, :0], [5, None])
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_rows_need_not_touch():
    """Strides of a fused projection: q, k and v are slices of one tensor, and rows lie far apart."""
    g = torch.Generator().manual_seed(1)
    fused = torch.randn(2, 90, 4, 72, generator=g).half()
    q, k, v = (
        fused[:, :, :2, :64].transpose(1, 2),
        fused[:, :, 2:3, 8:].transpose(1, 2),
        fused[:, :, 3:, :64].transpose(1, 2),
    )
    assert_close(sim.forward(q, k, v, [7, None], 2), reference.attention(q, k, v, [7, 90], 2), torch.float16)


def test_lengths_on_the_device_may_be_nonsense():
    """The host cannot check what only the device holds: results are wrong then, but no memory is touched that is not ours."""
    q, k, v = plain(64, batch=2)
    for cu in ([0, 1000, -5, 128], [5, 3, 2, 1], [-7, -7, 2**31 - 1, 2**31 - 1]):
        packed = torch.tensor(cu, dtype=torch.int32)
        sim.forward(q, k, v, [9, None], 2, cu_seqlens=(packed, packed))
    far = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    sim.forward(q, k, v, [9, None], 2, q_start=far, start=far, end=far)


@pytest.mark.parametrize("max_lengths", [(1, 1), (200, 200), (10**6, 10**6)])
def test_packed_documents_of_any_lengths_are_covered(max_lengths):
    """The slots of the work list hold every tile, whatever is hinted."""
    lengths = [1, 0, 127, 128, 129, 1, 0, 214]
    q, k, v = plain(sum(lengths), dim=64)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    got = sim.forward(q, k, v, [100, None], 2, cu_seqlens=(cu, cu), max_lengths=max_lengths)
    assert_close(got, reference.attention(q, k, v, [100, 600], 2, documents=documents), torch.float16)


# --- does the emulator see what is wrong? -----------------------------------------------------------------------


def battery(emulator: sim.Emulator) -> str | None:
    """What is wrong with a kernel, by a few calls that touch every path of it; None if nothing is."""
    try:
        for seed, lazy in ((0, True), (1, True), (2, False)):
            how = {"seed": seed, "lazy": lazy, "with_emulator": emulator}
            q, k, v = plain(200, heads=4, kv_heads=2)
            assert_close(
                sim.forward(q, k, v, [65, None, 3, 130], 3, **how),
                reference.attention(q, k, v, [65, 200, 3, 130], 3),
                torch.float16,
            )
        q, k, v = plain(150, dim=56)
        valid = torch.arange(150)[None] >= 37
        want = reference.attention(q, k, v, [20, 150], 2, valid=valid)
        for x in (q, k, v):
            x.masked_fill_(~valid[:, None, :, None], torch.nan)
        start = torch.tensor([37], dtype=torch.int32)
        assert_close(sim.forward(q, k, v, [20, None], 2, start=start, **how), want, torch.float16)
        q, k, v = plain(7, kv_len=300)
        arguments = {"q_start": 293, "sink_logits": torch.tensor([3.0, -1.0])}
        assert_close(
            sim.forward(q, k, v, [None, 130], 4, **arguments, most=2, **how),
            reference.attention(q, k, v, [10**6, 130], 4, **arguments),
            torch.float16,
        )
        lengths = torch.tensor([120, 4, 4, 4, 124])
        q, k, v = plain(256)
        cu = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
        documents = torch.repeat_interleave(torch.arange(5), lengths)[None]
        assert_close(
            sim.forward(q, k, v, [9, None], 2, cu_seqlens=(cu, cu), **how),
            reference.attention(q, k, v, [9, 256], 2, documents=documents),
            torch.float16,
        )
        q, k, v = plain(70, torch.float32)
        assert_close(sim.forward(q, k, v, [9, None], **how), reference.attention(q, k, v, [9, 70]), torch.float32)
    except AssertionError as found:
        return f"{type(found).__name__}: {found}"
    return None


def test_battery_finds_nothing_wrong_with_the_kernel():
    assert battery(sim.emulator(64)) is None


FAST = {"no barrier", "window one too large"}


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=m.name, marks=() if m.name in FAST else pytest.mark.slow) for m in MUTANTS]
)
def test_mutant_is_caught(mutant, tmp_path):
    root = tmp_path / "csrc"
    shutil.copytree(sim.CSRC, root)
    text = (root / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}"
    (root / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    emulator = sim.Emulator(64, root, ("-O1",), tmp_path)
    assert emulator.function  # it compiles: what is caught is caught by running

    def child():
        found = battery(emulator)
        print(f"caught: {found}" if found else "missed", flush=True)
        os._exit(0 if found else 77)

    process = multiprocessing.get_context("fork").Process(target=child)  # a wrong kernel may end its process
    process.start()
    process.join(120)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert hangs or process.exitcode != 77


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_no_access_outside_of_tensors(dim, tmp_path):
    """csrc/check/grid.cpp under AddressSanitizer: allocations of exactly their size, padding is NaN."""
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DAAH_SIM", f"-DAAH_DIM={dim}")
    program = sim.compile_once("check/grid.cpp sim/forward.cpp sim/machine.cpp", flags, suffix="")
    done = subprocess.run([program, "40", "1", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- the launcher, on a runtime that is not there ---------------------------------------------------------------


def test_launcher_gives_what_the_kernel_gives():
    q, k, v = plain(150, batch=2)
    got = sim.launch(q, k, v, [33, None], 2)
    want = sim.forward(q, k, v, [33, None], 2, seed=1)
    assert got.status == 0 and torch.equal(got.out, want[0]) and torch.equal(got.lse, want[1])


def test_launcher_splits_keys_in_a_workspace_of_exactly_its_size():
    q, k, v = plain(3, kv_len=900, batch=2)
    rule = {"q_start": 897, "sink_logits": torch.tensor([0.3, -2.0])}
    before = sim.launch(q, k, v, [None, 20], 1, **rule)
    got = sim.launch(q, k, v, [None, 20], 1, **rule)
    assert got.launches == before.launches + 2  # the second one merges
    assert_close((got.out, got.lse), reference.attention(q, k, v, [900, 20], 1, **rule), torch.float16)


def test_lists_are_made_once_also_while_capturing():
    q, k, v = plain(40)
    first = sim.launch(q, k, v, [11, None])
    again = sim.launch(q, k, v, [11, None], capturing=True)
    assert again.allocations == first.allocations
    captured = sim.launch(q, k, v, [12, None], capturing=True)
    assert captured.status == 0 and captured.allocations == first.allocations + 1
    growing = [sim.launch(*plain(1, kv_len=n), [12, None], q_start=n - 1).allocations for n in (1025, 1026, 1100)]
    assert len(set(growing)) == 1  # lengths are rounded, or every step of decoding would make a list


def test_lists_are_dropped_but_not_those_of_graphs():
    """The runtime objects if memory is freed that a captured launch reads."""
    q, k, v = plain(1)
    first = sim.launch(q, k, v, [7, 7], capturing=True)
    for i in range(1200):
        last = sim.launch(q, k, v, [i + 1, 7])
    assert first.allocations + 1100 < last.allocations and last.live < 1100 and last.device_waits > 0
    assert sim.launch(q, k, v, [7, 7]).allocations == last.allocations


def test_launcher_says_what_is_wrong():
    q, k, v = plain(20)
    out_of_memory = sim.launch(q, k, v, [19, 18], no_memory=True)
    assert out_of_memory.status == 12 and "out of memory" in out_of_memory.error
    assert sim.launch(q, k, v, [19, 18]).status == 0  # and the next call is well again
    assert sim.launch(q, k, v, [19, 18], major=7).status == 13
    assert sim.launch(q, k, v, [0, 18]).status == 4
    assert sim.launch(q[..., :60], k[..., :60], v[..., :60], [1, 1]).status == 3
    odd = torch.empty(1, 2, 20, 65, dtype=torch.float16)[..., 1:]
    assert sim.launch(odd, k, v, [19, 18]).status == 11


# --- schedules --------------------------------------------------------------------------------------------------


def test_schedule_is_close_to_ideal_by_its_cost_model():
    """Windows 512, 1024, 2048 and full in turn on 132 processors; longest first, long rows split where blocks are few."""
    done = subprocess.run(
        [sim.compile_once("sim/schedule.cpp", (), suffix="")], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines() if line[0].isdigit()]
    ratio = {(int(row[0]), int(row[1])): float(row[7]) for row in rows}
    unsplit = {(int(row[0]), int(row[1])): float(row[8]) for row in rows}
    assert ratio[32, 2048] <= 1.12 and ratio[32, 4096] <= 1.05 and ratio[32, 8192] <= 1.05
    assert ratio[8, 4096] <= 1.20 and ratio[8, 8192] <= 1.20
    assert ratio[8, 2048] <= 1.35  # storing, merging and starting parts take a fifth of so short a call
    assert all(ratio[key] <= unsplit[key] for key in ratio)
