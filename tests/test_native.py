"""The native CPU operator against the float64 reference, and everything torch expects of an operator."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from grid import Case, cases, tensors
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from aah_hf import OperatorError
from aah_hf.ops import native, recipes, reference, toolchain

pytestmark = pytest.mark.skipif(
    toolchain.find_compiler() is None and not native.status().available, reason="no native operator and no compiler"
)

CSRC = recipes.CSRC
EDGES = (1, 2, 23, 24, 25, 63, 64, 65, 127, 128, 129, 191, 192, 193)  # lanes, tiles and tasks of the kernels


@pytest.fixture(scope="module", autouse=True)
def operator():
    assert native.available(), native.status().reason


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def arguments(case: Case, t) -> dict:
    """Keyword arguments of native.forward for a case of the shared grid."""
    rows = (
        {}
        if t.sequences is None
        else native.arrange(t.sequences.runs, case.batch, case.q_len, case.kv_len, q_start=case.q_start)
    )
    return {"q_start": case.q_start, "softcap": case.softcap, "sink_logits": t.sink_logits, "limit": case.limit} | rows


def truth(case: Case, t, inputs=None, sink_logits=None):
    q, k, v = inputs or (t.q, t.k, t.v)
    return reference.attention(
        q,
        k,
        v,
        case.windows,
        case.sink_tokens,
        softcap=case.softcap,
        sink_logits=t.sink_logits if sink_logits is None else sink_logits,
        q_start=case.q_start,
        valid=t.valid,
        documents=t.documents,
        limit=case.limit,
    )


@st.composite
def native_cases(draw, **kwargs):
    """The shared grid, with head sizes, larger groups and window edges of these kernels."""
    case = draw(cases(layouts=("none", "left", "right", "packed"), **kwargs))
    group = draw(st.sampled_from([1, 2, 3, 4, 8]))
    edges = st.sampled_from([*EDGES, case.kv_len, case.kv_len + 1, 10**9])
    return dataclasses.replace(
        case,
        group=group,
        head_dim=draw(st.sampled_from([8, 16, 24, 40, 64, 72, 128])),
        windows=tuple(draw(edges) for _ in range(case.kv_heads * group)),
        mask="none",
    )


def finite(lse):
    return torch.where(torch.isfinite(lse), lse, 0.0)


@hypothesis_settings(max_examples=150)
@given(native_cases(max_len=210))
def test_float64_equals_the_reference_forward_and_backward(case):
    t = tensors(case)
    out, lse = native.forward(t.q, t.k, t.v, case.windows, case.sink_tokens, **arguments(case, t))
    want, want_lse = truth(case, t)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(case.seed), dtype=lse.dtype)
    got = torch.autograd.grad((out * t.dout).sum() + (finite(lse) * dlse).sum(), t.inputs)
    want = torch.autograd.grad((want * t.dout).sum() + (finite(want_lse) * dlse).sum(), t.inputs)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def gradients(out, t, inputs):
    return torch.autograd.grad(out, inputs, t.dout.to(out.dtype))


@hypothesis_settings(max_examples=120)
@given(native_cases(max_len=210))
def test_float32_is_within_two_millionths(case):
    t = tensors(case, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in t.inputs]
    out, lse = native.forward(t.q, t.k, t.v, case.windows, case.sink_tokens, **arguments(case, t))
    want, want_lse = truth(case, t, exact[:3], exact[3] if t.sink_logits is not None else None)
    # dq and dk sum differences of v · dout, which cancel where one key takes all: what rounds is what they are made of
    reach = (t.dout @ t.v.repeat_interleave(case.group, 1).mT).abs().max().item() * case.head_dim**-0.5
    floor = [0.1, 0.1, 0.2 * reach * t.k.abs().max().item(), 0.2 * reach * t.q.abs().max().item(), 0.1, 1.0]
    pairs = [(out, want), (finite(lse), finite(want_lse))]
    pairs += list(zip(gradients(out, t, t.inputs), gradients(want, t, exact)))
    for name, (a, b), least in zip(("out", "lse", "dq", "dk", "dv", "d_sink_logits"), pairs, floor):
        error = (a.double() - b).abs().max() / b.abs().max().clamp_min(least)
        assert error <= 2e-6, f"{name}: {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@hypothesis_settings(max_examples=40)
@given(native_cases(max_len=210, plain=True))
def test_halves_are_as_close_to_the_truth_as_sdpa(dtype, case):
    t = tensors(dataclasses.replace(case, layout="none"), dtype)
    exact = [x.detach().double().requires_grad_() for x in t.inputs]
    want, _ = truth(case, t, exact)
    seen = reference.visibility(case.windows, case.q_len, case.kv_len, case.sink_tokens, q_start=case.q_start)
    sdpa = F.scaled_dot_product_attention(t.q, t.k, t.v, attn_mask=seen, enable_gqa=case.group > 1)
    out, _ = native.forward(t.q, t.k, t.v, case.windows, case.sink_tokens, q_start=case.q_start)

    def distance(x, y):
        return (x.double() - y).abs().max()

    eps = torch.finfo(dtype).eps
    assert distance(out, want) <= distance(sdpa, want) + eps / 8 * want.abs().max()
    for a, b, c in zip(*(gradients(o, t, i) for o, i in ((out, t.inputs), (sdpa, t.inputs), (want, exact)))):
        assert (
            distance(a, c) <= 1.1 * distance(b, c) + eps * c.abs().max() + 1e-5
        )  # float32 rounding, where all cancels


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_sequences_of_several_tasks_and_tiles(head_dim, limit):
    """Longer than the other cases: tasks whose sinks lie in tiles of their own, far before their band."""
    case = Case(
        batch=2, kv_heads=1, group=4, head_dim=head_dim, q_len=500, kv_len=500, q_start=0, windows=(1, 30, 200, 10**9),
        sink_tokens=70, layout="left", limit=limit, softcap=None, sink_logits=True, mask="none", seed=5,
    )  # fmt: skip
    t = tensors(case)
    out, lse = native.forward(t.q, t.k, t.v, case.windows, case.sink_tokens, **arguments(case, t))
    want, want_lse = truth(case, t)
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(out, t, t.inputs), gradients(want, t, t.inputs)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("q_start", [0, 3])
def test_gradcheck(q_start):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sink_logits = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sink_logits):
        return native.forward(
            q,
            k,
            v,
            [1, 3, 5, None],
            2,
            q_start=q_start,
            softcap=3.0,
            sink_logits=sink_logits,
            start=torch.tensor([0, 2]),
        )

    assert torch.autograd.gradcheck(call, (q, k, v, sink_logits))


@hypothesis_settings(max_examples=60)
@given(native_cases(max_len=120), st.integers(0, 60))
def test_keys_that_a_cache_has_dropped_still_count_as_sinks(case, dropped):
    case = dataclasses.replace(case, q_start=max(case.q_start, min(dropped, case.kv_len - case.q_len)))
    kv_start = min(dropped, case.q_start)
    t = tensors(case)
    k, v = t.k[:, :, kv_start:], t.v[:, :, kv_start:]
    rows = dict(q_start=case.q_start - kv_start, start=-kv_start, end=case.kv_len - kv_start)
    if t.sequences is not None:
        rows = native.arrange(
            t.sequences.runs, case.batch, case.q_len, k.shape[2], q_start=case.q_start, kv_start=kv_start
        )
    out, _ = native.forward(
        t.q, k, v, case.windows, case.sink_tokens,
        softcap=case.softcap, sink_logits=t.sink_logits, limit=case.limit, **rows,
    )  # fmt: skip
    want, _ = reference.attention(
        t.q, k, v, case.windows, case.sink_tokens,
        softcap=case.softcap, sink_logits=t.sink_logits, limit=case.limit,
        q_start=case.q_start, kv_start=kv_start, valid=t.valid, documents=t.documents,
    )  # fmt: skip
    torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)


def test_rule_in_c_equals_rule_in_python():
    """One head and k = v = one-hot rows: the output's nonzero places are the keys seen."""
    length = 40
    keys = torch.eye(length, dtype=torch.float64)[None, None]
    q = torch.zeros(1, 1, length, length, dtype=torch.float64)
    for window, sinks, limit, left in [(1, 0, None, 0), (5, 3, None, 0), (5, 3, 9, 4), (39, 2, None, 1), (40, 0, 7, 0)]:
        valid = torch.arange(length)[None] >= left
        out, _ = native.forward(q, keys, keys, [window], sinks, limit=limit, start=left)
        seen = reference.visibility([window], length, length, sinks, valid=valid, limit=limit)
        assert torch.equal(out > 0, seen)


def plain_inputs(batch=1, heads=4, kv_heads=2, length=300, head_dim=64, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(*s, generator=g).to(dtype).transpose(1, 2) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_one_thread_and_two_give_equal_bits(dtype, two_threads):
    q, k, v, dout = plain_inputs(heads=6, length=700, head_dim=32, dtype=dtype)
    sink_logits = torch.linspace(-1, 1, 6, requires_grad=True)
    results = []
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        out, lse = native.forward(q, k, v, [16, None, 100, 300, None, 64], 4, sink_logits=sink_logits)
        results.append([out, lse, *torch.autograd.grad(out, (q, k, v, sink_logits), dout)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    q, k, v, dout = plain_inputs(batch=3, length=70)
    start, end = torch.tensor([70, 5, 0]), torch.tensor([70, 40, 70])
    out, lse = native.forward(q, k, v, [3, None, 20, 1], 2, start=start, end=end)
    assert (out[0] == 0).all() and (out[1, :, :5] == 0).all() and (out[1, :, 40:] == 0).all()
    assert (lse[0] == -torch.inf).all() and torch.isfinite(lse[2]).all()
    for grad in torch.autograd.grad(out, (q, k, v), dout):
        assert torch.isfinite(grad).all() and (grad[0] == 0).all()


def test_padding_may_hold_anything():
    """A static cache hands over memory that was never written."""
    q, k, v, dout = (x.detach() for x in plain_inputs(batch=2, length=70))
    start, end = torch.tensor([0, 9]), torch.tensor([50, 70])
    for x in (q, k, v, dout):
        x[0, :, 50:] = torch.nan
        x[1, :, :9] = torch.inf
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = native.forward(q, k, v, [3, None, 20, 70], 2, start=start, end=end)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out, (q, k, v), dout))


def test_nan_inside_the_window_is_not_hidden():
    q, k, v, _ = (x.detach() for x in plain_inputs(length=70))
    k[0, 0, 30, 5] = torch.nan
    out, _ = native.forward(q, k, v, [3, None, 20, 70])
    assert torch.isnan(out[0, 0, 30:33]).all() and torch.isfinite(out[0, 0, 33:]).all()
    assert torch.isnan(out[0, 1, 30:]).all() and torch.isfinite(out[0, 2:]).all()


def test_window_one_returns_the_values():
    q, k, v, _ = plain_inputs(length=50)
    out, _ = native.forward(q, k, v, [1, 1, 1, 1])
    torch.testing.assert_close(out, v.repeat_interleave(2, 1), rtol=3e-7, atol=0)


def test_large_scores_do_not_overflow():
    q, k, v, dout = plain_inputs(length=100)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = native.forward(q, k, v, [7, None, 30, 64], 1, scale=60.0)
    want, want_lse = reference.attention(*exact, [7, 100, 30, 64], 1, scale=60.0)
    assert torch.isfinite(lse).all()
    # scores of some thousand carry absolute errors of some 1e-4
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(out, want.float(), rtol=0.02, atol=0.02)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out, (q, k, v), dout))


def test_any_strides_give_the_same_numbers():
    q, k, v, dout = (x.detach() for x in plain_inputs(batch=2, length=90))
    want = None
    for layout in ("transposed", "contiguous", "sliced", "expanded_grad", "last_strided"):
        a, b, c, g = q, k, v, dout
        if layout == "contiguous":
            a, b, c, g = (x.contiguous() for x in (q, k, v, dout))
        if layout == "sliced":  # a static cache, cut to its used part
            b, c = (F.pad(x, (0, 8, 0, 37))[:, :, :90, :64] for x in (k, v))
        if layout == "last_strided":
            a = q.transpose(2, 3).contiguous().transpose(2, 3)
        a, b, c = (x.detach().requires_grad_() for x in (a, b, c))
        out, _ = native.forward(a, b, c, [5, None, 64, 30], 3)
        result = [out, *torch.autograd.grad(out, (a, b, c), g)]
        want = want or result
        assert all(torch.equal(x, y) for x, y in zip(result, want)), layout
    out, _ = native.forward(a, b, c, [5, None, 64, 30], 3)
    ones = torch.autograd.grad(out, a, torch.ones_like(out), retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), a)[0], ones)  # an expanded gradient has strides 0


def test_tensors_are_not_copied_on_the_way_in():
    q, k, v, _ = plain_inputs(length=2000)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        out, lse = native.forward(q, k, v, [5, None, 64, 30], 3)
    allocated = sum(e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage > 0)
    assert allocated <= out.numel() * 4 + lse.numel() * 4 + 4096


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set_gives_the_same_answer_even_when_first_used_inside_compile(isa):
    """Asked for by AAH_CPU_ISA, which is read once: hence a process of its own."""
    here = native.status().isa
    if isa == "avx2" and here != "avx512":
        pytest.skip("this processor has no AVX2, or uses it in all other tests")
    code = (
        "import sys, types, torch\n"
        "sys.modules['aah_hf'] = types.ModuleType('aah_hf')\n"  # its ops alone, without transformers
        f"sys.modules['aah_hf'].__path__ = [{str(CSRC.parent)!r}]\n"
        "from aah_hf.ops import native, reference\n"
        "def call(q, k, v):\n"
        "    assert native.available()\n"
        "    return native.forward(q, k, v, [1, 30, 64, None], 3, softcap=5.0)[0]\n"
        "torch.manual_seed(0)\n"
        "q, k, v = (torch.randn(2, h, 150, 72, requires_grad=True) for h in (4, 2, 2))\n"
        "out = torch.compile(call, fullgraph=True, backend='aot_eager')(q, k, v)\n"
        "want, _ = reference.attention(q, k, v, [1, 30, 64, 150], 3, softcap=5.0)\n"
        "got, right = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want))\n"
        "for a, b in [(out, want), *zip(got, right)]:\n"
        "    assert (a - b).abs().max() <= 2e-6 * b.abs().max()\n"
        "q, k, v = (x.detach().half() for x in (q, k, v))\n"
        "out, _ = native.forward(q, k, v, [1, 30, 64, None], 3)\n"
        "assert (out - reference.attention(q, k, v, [1, 30, 64, 150], 3)[0]).abs().max() < 2e-3\n"
        "print(native.status().isa)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"AAH_CPU_ISA": isa}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["neon" if here == "neon" else isa]


# --- what torch expects of an operator --------------------------------------------------------------------------


def op_arguments(q, k, v, sinks=2, sink_logits=None, packed=False):
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    cu = ints(0, 11, q.shape[2]) if packed else None
    return (
        *(x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)),
        ints(3, 9, 40, 1), sink_logits, None, cu, cu, None, None,
        q.shape[2], k.shape[2], sinks, native.UNLIMITED, 0.2, 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["plain", "sinks_packed"])
def test_opcheck(dtype, variant):
    q, k, v, dout = plain_inputs(length=30, head_dim=16, dtype=dtype)
    extra = {} if variant == "plain" else {"sink_logits": torch.randn(4, requires_grad=True), "packed": True}
    args = op_arguments(q, k, v, **extra)
    torch.library.opcheck(torch.ops.aah.fwd.default, args)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
    out, lse = torch.ops.aah.fwd(*detached)
    inner = (dout.transpose(1, 2), torch.ones_like(lse), *detached[:3], out, lse, *detached[3:])
    torch.library.opcheck(torch.ops.aah.bwd.default, inner)


def test_compile_captures_the_whole_graph_once_for_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q, k, v, q_start):
        return native.forward(q, k, v, [3, None, 20, 64], 2, q_start=q_start)[0] * 2

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for length in (40, 57, 130):
        q, k, v, dout = plain_inputs(length=length, head_dim=16)
        out, want = compiled(q, k, v, length // 3), call(q, k, v, length // 3)
        assert torch.equal(out, want)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout)):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return native.forward(q, k, v, [3, None, 20, 64], 2)[0]

    q, k, v, _ = (x.detach() for x in plain_inputs(length=40, head_dim=16))
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Attention(), (q, k, v), dynamic_shapes=[{2: length}] * 3)
    q, k, v, _ = (x.detach() for x in plain_inputs(length=77, head_dim=16))
    assert torch.equal(program.module()(q, k, v), Attention()(q, k, v))


def test_windows_kept_from_inference_mode_do_not_break_training():
    q, k, v, dout = plain_inputs(length=20)
    windows = [2, 3, 5, random.Random(7).randint(10**6, 10**8)]  # not seen before
    with torch.inference_mode():
        native.forward(q, k, v, windows)
    out, _ = native.forward(q, k, v, windows)
    out.backward(dout)


def test_second_derivative_says_that_it_does_not_exist():
    q, k, v, _ = plain_inputs(length=20)
    out, _ = native.forward(q, k, v, [2, 3, 5, 7])
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(OperatorError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": [1, 2, 0, 4]}, "at least 1"),
        ({"windows": [1, 2, 3]}, "expected 4"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"start": torch.tensor([0, 1, 2])}, "expand|expected 1"),
        ({"cu_seqlens": torch.tensor([0, 30, 20])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 15, 31])}, "cu_seqlens"),
        ({"q_start": -1}, "q_start"),
        ({"sink_tokens": -1}, "sinks"),
    ],
)
def test_nonsense_is_refused_with_a_reason(change, message):
    q, k, v, _ = plain_inputs(length=20, head_dim=change.pop("head_dim", 16))
    windows, sinks = change.pop("windows", [1, 2, 3, 4]), change.pop("sink_tokens", 0)
    with pytest.raises(RuntimeError, match=message):
        native.forward(q, k, v, windows, sinks, **change)


def test_empty_tensors():
    q, k, v, dout = plain_inputs(length=0)
    out, lse = native.forward(q, k, v, [1, 2, 3, 4])
    assert out.shape == q.shape and lse.shape == (1, 4, 0)
    out.backward(dout)
    q, k, v, _ = plain_inputs(length=9)
    out, lse = native.forward(q, k[:, :, :0], v[:, :, :0], [1, 2, 3, 4])
    assert (out == 0).all() and (lse == -torch.inf).all()
    out.sum().backward()
    assert (q.grad == 0).all()


def test_supports_names_what_is_missing():
    assert native.supports(torch.empty(1, 8)) is None
    assert "multiples of 8" in native.supports(torch.empty(1, 12))
    assert "multiples of 8" in native.supports(torch.empty(1, 264))
    assert "int64" in native.supports(torch.empty(1, 8, dtype=torch.int64))
    assert "meta" in native.supports(torch.empty(1, 8, device="meta"))


# --- the library file -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Path:
    return Path(native.status().path)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_library_needs_libtorch_and_no_cuda_symbol(library):
    dynamic = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not any("python" in name or "cuda" in name or "omp" in name for name in needed)
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic and "TEXTREL" not in dynamic
    symbols = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in symbols.splitlines() if "UND" in line or "aah_" in line]
    strong = [row[7] for row in rows if len(row) > 7 and row[6] == "UND" and row[4] == "GLOBAL"]
    # the number of the device type is in every torch; what only CUDA builds have must be weak or absent
    assert strong and not [n for n in strong if "cuda" in n.lower() and not n.startswith("aoti_torch_device_type_")]
    exported = {row[7] for row in rows if len(row) > 7 and row[6] != "UND"}
    names = {"aah_cpu_fwd", "aah_cpu_bwd", "aah_cpu_decode", "aah_cpu_cache_append", "aah_cpu_isa", "aah_status_text"}
    assert names <= exported
    assert not [name for name in strong if name.startswith("_ZN2at") or name.startswith("_ZN3c10")]  # C only: stable


def test_a_second_copy_is_not_loaded(library, tmp_path):
    """Two libraries that register the same operators end the process without a message."""
    copy = shutil.copy(library, tmp_path)
    with pytest.raises(RuntimeError, match="already loaded"):
        native._open(Path(copy))
    assert native._open(library)["isa"] == native.status().isa


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_instruction_sets_share_no_inline_function(tmp_path):
    """One that two files define is merged by the linker, perhaps to the copy that this processor cannot run."""
    recipe = recipes.default_recipe()
    for unit in recipe.units:
        if "isa_" not in unit.source:
            continue
        target = tmp_path / "unit.o"
        command = [*toolchain.find_compiler().command, *recipe.flags, *unit.flags, "-c", recipe.root / unit.source]
        subprocess.run([*command, "-o", target], check=True)
        symbols = subprocess.run(["nm", "--defined-only", target], capture_output=True, text=True, check=True).stdout
        assert not [line for line in symbols.splitlines() if line.split()[1] in "wWvVu"], unit.source


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_are_clean_under_sanitizers(sanitizer, tmp_path):
    """The torch-free kernels and csrc/check/grid.cpp, a naive loop over the C++ rule."""
    flags = ["-std=c++17", "-O1", "-g", "-U_FORTIFY_SOURCE", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    flags += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
    compiler = toolchain.find_compiler().command
    units = [u for u in recipes.default_recipe().units if "torch" not in u.source] + [recipes.Unit("check/grid.cpp")]
    objects = []
    for unit in units:
        objects.append(tmp_path / f"{len(objects)}.o")
        subprocess.run([*compiler, *flags, *unit.flags, "-c", CSRC / unit.source, "-o", objects[-1]], check=True)
    program = tmp_path / "grid"
    subprocess.run([*compiler, *flags, *objects, "-o", program], check=True)
    for isa in ("best", "avx2", "baseline"):
        for threads, seed in (("1", "1"), ("3", "2")):
            done = subprocess.run(
                [program, "60", threads, seed], env=os.environ | {"AAH_CPU_ISA": isa}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
