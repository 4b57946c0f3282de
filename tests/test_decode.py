"""Attention over a ragged ring cache: streams of tokens against the float64 reference over their full history."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from aah_hf import OperatorError
from aah_hf.ops import native, reference, toolchain
from aah_hf.ops.decode import append_, cached_attention, slots

HAVE_NATIVE = toolchain.find_compiler() is not None or native.status().available
PATHS = pytest.mark.parametrize(
    "use_native", [pytest.param(True, marks=pytest.mark.skipif(not HAVE_NATIVE, reason="no native operator")), False]
)
needs_native = pytest.mark.skipif(not HAVE_NATIVE, reason="no native operator and no compiler")


def path(use_native: bool):
    """Run the native operator, or the pure PyTorch one all the way down."""
    if use_native:
        assert native.available(), native.status().reason
        return mock.patch.dict(os.environ)
    return mock.patch.object(native, "available", lambda: False)


@dataclass(frozen=True)
class Stream:
    """A batch whose tokens arrive in chunks, each attending before it is appended."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    windows: tuple[int | None, ...]
    sink_tokens: int
    spare: tuple[int, ...]  # slots per KV head beyond those it needs
    chunks: tuple[int, ...]
    first: tuple[int, ...]
    limit: int | None
    softcap: float | None
    sink_logits: bool
    seed: int

    @property
    def length(self) -> int:
        return sum(self.chunks)

    def capacities(self) -> list[int]:
        """Slots per KV head: sinks + largest window - 1 and some spare ones; one per token where a window is full."""
        result = []
        for head in range(self.kv_heads):
            windows = self.windows[head * self.group : (head + 1) * self.group]
            ring = max(self.length if w is None else w for w in windows) - 1
            result.append(self.sink_tokens + ring + self.spare[head])
        return result


@st.composite
def streams(draw, max_tokens: int = 120, plain: bool = False) -> Stream:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    batch = draw(st.integers(1, 3))
    chunks = [draw(st.one_of(st.just(0), st.integers(0, 60)))]  # a prompt
    while sum(chunks) < draw(st.integers(1, max_tokens)):
        chunks.append(draw(st.one_of(st.just(1), st.integers(1, 16))))
    length = sum(chunks)
    window = st.one_of(st.none(), st.sampled_from([1, 2, 3, 15, 16, 17, 63, 64, 65]), st.integers(1, length + 2))
    left = st.one_of(st.just(0), st.just(0), st.integers(0, min(length, 70)))
    return Stream(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        head_dim=draw(st.sampled_from([8, 16, 24, 40, 64, 80])),
        windows=tuple(draw(window) for _ in range(kv_heads * group)),
        sink_tokens=draw(st.integers(0, 5)),
        spare=tuple(draw(st.sampled_from([0, 0, 1, 7])) for _ in range(kv_heads)),
        chunks=tuple(chunks),
        first=tuple(draw(left) for _ in range(batch)),
        limit=None if plain else draw(st.one_of(st.none(), st.integers(1, length + 1))),
        softcap=None if plain else draw(st.sampled_from([None, None, 4.0])),
        sink_logits=False if plain else draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass
class Data:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink_logits: torch.Tensor | None
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    offset: torch.Tensor
    first: torch.Tensor
    want: torch.Tensor  # float64, over the full history


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def data(stream: Stream, dtype: torch.dtype = torch.float64, want: bool = True) -> Data:
    """Seeded tokens; padding and unwritten slots are NaN, so that reading them shows."""
    g = torch.Generator().manual_seed(stream.seed)
    heads = stream.kv_heads * stream.group
    real = torch.arange(stream.length)[None] >= torch.tensor(stream.first)[:, None]

    def normal(n):  # [batch, heads, length, head_dim], in memory as projections come
        x = torch.randn(stream.batch, stream.length, n, stream.head_dim, generator=g, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2)

    q, k, v = normal(heads), normal(stream.kv_heads), normal(stream.kv_heads)
    logits = torch.randn(heads, generator=g, dtype=torch.float64) if stream.sink_logits else None
    truth = None
    if want:
        truth, _ = reference.attention(
            q, k, v, [stream.length if w is None else w for w in stream.windows], stream.sink_tokens,
            softcap=stream.softcap, sink_logits=logits, limit=stream.limit, valid=real,
        )  # fmt: skip
    for x in (q, k, v):
        x.masked_fill_(~real[:, None, :, None], torch.nan)
    caps = stream.capacities()
    borders = [sum(caps[:i]) for i in range(len(caps) + 1)]
    cache = [torch.full((stream.batch, borders[-1], stream.head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    logits = logits if logits is None else logits.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return Data(q, k, v, logits, *cache, ints(*borders), ints(*stream.first), truth)


def steps(stream: Stream, d: Data):
    """Feed the stream; yields (past, output) after each chunk's attention and before it is appended."""
    past = 0
    for n in stream.chunks:
        new = slice(past, past + n)
        yield past, cached_attention(
            d.q[:, :, new], d.k[:, :, new], d.v[:, :, new], d.k_cache, d.v_cache, d.offset, stream.windows,
            stream.sink_tokens, past, d.first, limit=stream.limit, softcap=stream.softcap, sink_logits=d.sink_logits,
        )  # fmt: skip
        append_(d.k_cache, d.v_cache, d.k[:, :, new], d.v[:, :, new], d.offset, d.first, past, stream.sink_tokens)
        past += n


def run(stream: Stream, d: Data) -> torch.Tensor:
    return torch.cat([out for _, out in steps(stream, d)], dim=2)


@PATHS
@hypothesis_settings(max_examples=150)
@given(stream=streams())
def test_a_stream_equals_the_reference_over_its_full_history(use_native, stream):
    d = data(stream)
    with path(use_native):
        out = run(stream, d)
    torch.testing.assert_close(out, d.want, rtol=1e-10, atol=1e-10)


@needs_native
@hypothesis_settings(max_examples=60)
@given(stream=streams())
def test_both_paths_write_the_same_slots(stream):
    one, two = data(stream, want=False), data(stream, want=False)
    with path(True):
        run(stream, one)
    with path(False):
        run(stream, two)
    for a, b in ((one.k_cache, two.k_cache), (one.v_cache, two.v_cache)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@needs_native
@hypothesis_settings(max_examples=60)
@given(stream=streams())
def test_float32_is_within_two_millionths(stream):
    d = data(stream, torch.float32)
    out = run(stream, d)
    assert (out.double() - d.want).abs().max() <= 2e-6 * d.want.abs().max().clamp_min(0.1)


@PATHS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@hypothesis_settings(max_examples=20)
@given(stream=streams(plain=True))
def test_halves_round_only_their_result(use_native, dtype, stream):
    d = data(stream, dtype)
    with path(use_native):
        out = run(stream, d)
    # the pure PyTorch path may round probabilities too
    steps_of = 0.51 if use_native else 8
    error = (out.double() - d.want).abs()
    assert out.dtype == dtype
    assert (error <= steps_of * torch.finfo(dtype).eps * d.want.abs().clamp_min(0.1 if use_native else 1) + 1e-6).all()


@PATHS
@pytest.mark.parametrize("head_dim", [72, 128, 256])
def test_long_streams_wrap_many_times_and_span_several_chunks(use_native, head_dim):
    stream = Stream(
        batch=2, kv_heads=3, group=2, head_dim=head_dim, windows=(None, 300, 17, 1, 1, 1), sink_tokens=4, spare=(0, 3, 0),
        chunks=(700, 1, 5, 1, 16, 280, 1, 2), first=(0, 11), limit=None, softcap=None, sink_logits=True, seed=3,
    )  # fmt: skip
    assert stream.capacities()[2] == stream.sink_tokens  # a window of 1 keeps its sinks alone
    d = data(stream)
    with path(use_native):
        torch.testing.assert_close(run(stream, d), d.want, rtol=1e-10, atol=1e-10)


@PATHS
def test_a_linear_buffer_may_grow(use_native):
    """What a cache does before a ring is full: slots stay where they are, also while there are fewer than sinks."""
    stream = Stream(
        batch=2, kv_heads=2, group=2, head_dim=16, windows=(None, 9, 9, 4), sink_tokens=4, spare=(0, 0),
        chunks=(1, 2, 3, 1, 1, 9, 30), first=(0, 1), limit=None, softcap=None, sink_logits=False, seed=1,
    )  # fmt: skip
    d, final, past, outputs = data(stream), stream.capacities(), 0, []
    caches = [[torch.full((2, 0, 16), torch.nan, dtype=torch.float64) for _ in range(2)] for _ in final]
    with path(use_native):
        for n in stream.chunks:
            caps = [min(cap, past + n) for cap in final]
            caches = [
                [torch.cat([x, x.new_full((2, cap - x.shape[1], 16), torch.nan)], 1) for x in pair]
                for pair, cap in zip(caches, caps)
            ]
            k_cache, v_cache = (torch.cat([pair[i] for pair in caches], 1) for i in range(2))
            offset, new = ints(0, caps[0], sum(caps)), slice(past, past + n)
            outputs.append(
                cached_attention(
                    d.q[:, :, new], d.k[:, :, new], d.v[:, :, new], k_cache, v_cache, offset, stream.windows, 4, past, d.first
                )
            )  # fmt: skip
            append_(k_cache, v_cache, d.k[:, :, new], d.v[:, :, new], offset, d.first, past, 4)
            caches = list(zip(k_cache.split(caps, 1), v_cache.split(caps, 1)))
            past += n
    torch.testing.assert_close(torch.cat(outputs, 2), d.want, rtol=1e-10, atol=1e-10)


def test_slots_of_a_ring_by_hand():
    rank = torch.arange(-1, 8)
    assert slots(rank, 5, 2).tolist() == [-1, 0, 1, 2, 3, 4, 2, 3, 4]
    assert slots(rank, 2, 2).tolist() == [-1, 0, 1, -1, -1, -1, -1, -1, -1]
    assert slots(rank, 3, 0).tolist() == [-1, 0, 1, 2, 0, 1, 2, 0, 1]
    assert slots(rank, 1, 2).tolist() == [-1, 0, -1, -1, -1, -1, -1, -1, -1]


@PATHS
def test_padding_and_unwritten_slots_are_never_written(use_native):
    k_cache, v_cache = torch.full((2, 6, 8), 7.0), torch.full((2, 6, 8), 7.0)
    k = torch.arange(5.0)[None, None, :, None].expand(2, 1, 5, 8)
    with path(use_native):
        append_(k_cache, v_cache, k, -k, ints(1, 5), ints(0, 3), 0, 1)
    assert k_cache[0, :, 0].tolist() == [7, 0, 4, 2, 3, 7] and k_cache[1, :, 0].tolist() == [7, 3, 4, 7, 7, 7]
    assert v_cache[0, :, 0].tolist() == [7, 0, -4, -2, -3, 7] and v_cache[1, :, 0].tolist() == [7, -3, -4, 7, 7, 7]


@PATHS
def test_gradients_flow_through_the_cache(use_native):
    """Backpropagation through a stream equals that of the reference on the complete sequence."""
    stream = Stream(
        batch=2, kv_heads=2, group=2, head_dim=8, windows=(None, 3, 9, 5), sink_tokens=2, spare=(0, 0),
        chunks=(10, 1, 1, 7, 1), first=(0, 4), limit=7, softcap=None, sink_logits=True, seed=2,
    )  # fmt: skip
    d = data(stream)
    inputs = [x.nan_to_num(0.0).contiguous().requires_grad_() for x in (d.q, d.k, d.v, d.sink_logits)]
    d.q, d.k, d.v, d.sink_logits = inputs
    weight = torch.randn(d.want.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with path(use_native):
        got = torch.autograd.grad((run(stream, d) * weight).sum(), inputs)
    want, _ = reference.attention(
        *inputs[:3], [20, 3, 9, 5], 2, limit=7, sink_logits=inputs[3],
        valid=torch.arange(20)[None] >= d.first[:, None],
    )  # fmt: skip
    for a, b in zip(got, torch.autograd.grad((want * weight).sum(), inputs)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# --- the native operator ----------------------------------------------------------------------------------------


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_one_thread_and_two_give_equal_bits(dtype, two_threads):
    stream = Stream(
        batch=1, kv_heads=2, group=3, head_dim=64, windows=(None, 5, 900, 600, 600, 1), sink_tokens=4, spare=(0, 0),
        chunks=(1500, 1, 7), first=(0,), limit=None, softcap=None, sink_logits=True, seed=0,
    )  # fmt: skip
    results = []
    for threads in (1, 2, 2, 2):
        torch.set_num_threads(threads)
        results.append(run(stream, data(stream, dtype, want=False)))
    assert all(torch.equal(results[0], other) for other in results[1:])


def small(dtype=torch.float32, new=3, past=20, **changes):
    """Arguments of `cached_attention` by name: two KV heads of 12 and 30 slots, filled."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    arguments = dict(
        q=normal(2, 4, new, 16), k_new=normal(2, 2, new, 16), v_new=normal(2, 2, new, 16), k_cache=normal(2, 42, 16),
        v_cache=normal(2, 42, 16), offset=ints(0, 12, 42), windows=[3, 9, 20, 27], sink_tokens=4, past=past,
        first=ints(0, 2),
    )  # fmt: skip
    return arguments | changes


def raw(a: dict, logits=None) -> tuple:
    """The same as arguments of `aah::decode`."""
    q, k, v = (a[name].transpose(1, 2) for name in ("q", "k_new", "v_new"))
    return (
        q, k, v, a["k_cache"], a["v_cache"], a["offset"], ints(*a["windows"]), a["first"], logits, a["past"],
        a["sink_tokens"], native.UNLIMITED, 0.25, 0.0,
    )  # fmt: skip


@needs_native
def test_log_sum_exp_equals_the_reference():
    a = small(torch.float64, past=11)
    a["k_cache"][:, :, :] = torch.nan
    history = [torch.randn(2, 2, 11, 16, dtype=torch.float64) for _ in range(2)]
    append_(a["k_cache"], a["v_cache"], *history, a["offset"], a["first"], 0, 4)
    logits = torch.linspace(-1, 1, 4, dtype=torch.float64)
    out, lse = torch.ops.aah.decode(*raw(a, logits))
    want, want_lse = reference.attention(
        a["q"], torch.cat([history[0], a["k_new"]], 2), torch.cat([history[1], a["v_new"]], 2), a["windows"], 4,
        q_start=11, scale=0.25, sink_logits=logits, valid=torch.arange(14)[None] >= a["first"][:, None],
    )  # fmt: skip
    torch.testing.assert_close(out.transpose(1, 2), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    a = small(dtype)
    torch.library.opcheck(torch.ops.aah.decode.default, raw(a))
    torch.library.opcheck(torch.ops.aah.decode.default, raw(a, torch.zeros(4)))
    _, k, v, k_cache, v_cache, offset, _, first, *_ = raw(a)
    torch.library.opcheck(torch.ops.aah.cache_append_.default, (k_cache, v_cache, k, v, offset, first, 20, 4))


@needs_native
def test_compile_captures_a_step_once_for_all_positions():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, k_cache, v_cache, offset, first, past):
        out = cached_attention(q, k, v, k_cache, v_cache, offset, [3, 9, 20, 27], 4, past, first)
        append_(k_cache, v_cache, k, v, offset, first, past, 4)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    one, two = small(new=1), small(new=1)
    names = ("q", "k_new", "v_new", "k_cache", "v_cache", "offset", "first")
    with torch.no_grad():
        for past in range(30, 60):
            got, want = (f(*(a[n] for n in names), past) for f, a in ((compiled, one), (step, two)))
            assert torch.equal(got, want) and torch.equal(one["k_cache"], two["k_cache"])
    assert counter.frame_count == 1


@needs_native
def test_any_strides_give_the_same_numbers():
    a = small()
    want = cached_attention(**a)
    for name in ("q", "k_new", "v_new"):
        changed = a | {name: a[name].transpose(2, 3).contiguous().transpose(2, 3)}  # the last axis is strided
        assert torch.equal(cached_attention(**changed), want)
        changed = a | {name: a[name].transpose(1, 2).contiguous().transpose(1, 2)}
        assert torch.equal(cached_attention(**changed), want)
    wide = {n: torch.nn.functional.pad(a[n], (0, 8, 0, 5))[:, :42, :16] for n in ("k_cache", "v_cache")}
    assert torch.equal(cached_attention(**a | wide), want)


@needs_native
def test_a_step_copies_nothing():
    a = small(new=1)
    cached_attention(**a)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        out = cached_attention(**a)
        append_(a["k_cache"], a["v_cache"], a["k_new"], a["v_new"], a["offset"], a["first"], 20, 4)
    allocated = sum(e.self_cpu_memory_usage for e in profile.key_averages() if e.self_cpu_memory_usage > 0)
    assert allocated <= out.numel() * 4 + 1024


@needs_native
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set_gives_the_same_answer(isa):
    """Asked for by AAH_CPU_ISA, which is read once: hence a process of its own."""
    here = native.status().isa
    if isa == "avx2" and here != "avx512":
        pytest.skip("this processor has no AVX2, or uses it in all other tests")
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "import torch, test_decode as t\n"
        "from aah_hf.ops import native\n"
        "torch.set_num_threads(1)\n"
        "for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5), (torch.float16, 4e-3)):\n"
        "    for group, dim, chunks in ((1, 64, (70, 1, 5)), (3, 40, (300, 1, 1)), (5, 128, (70, 4, 1))):\n"
        "        n = sum(chunks)\n"
        "        s = t.Stream(2, 2, group, dim, (None, 9, 33, 64, 20)[:group] * 2, 4, (0, 1), chunks, (0, 5), None,\n"
        "                     None, False, 0)\n"
        "        d = t.data(s, dtype)\n"
        "        torch.testing.assert_close(t.run(s, d).double(), d.want, rtol=0, atol=tolerance)\n"
        "print(native.status().isa)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"AAH_CPU_ISA": isa},
        capture_output=True,
        text=True,
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["neon" if here == "neon" else isa]


# --- bad input --------------------------------------------------------------------------------------------------


@PATHS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": ints(0, 12, 43)}, "offset"),
        ({"offset": ints(-1, 12, 42)}, "offset"),
        ({"offset": ints(0, 50, 42)}, "offset"),
        ({"offset": ints(20, 12, 42)}, "offset"),
        ({"offset": ints(0, 42)}, "offset"),
        ({"offset": torch.tensor([0, 12, 42])}, "offset"),
        ({"first": ints(0, -1)}, "first"),
        ({"first": ints(0)}, "first"),
        ({"windows": [3, 9, 20, 32]}, "slots"),  # 30 slots hold 26 keys besides the sinks
        ({"windows": [3, 9, 20, None]}, "slots"),
        ({"offset": ints(0, 3, 42)}, "slots"),  # fewer slots than sinks
        ({"windows": [3, 0, 20, 27]}, "window"),
        ({"windows": [3, 9, 20]}, "3 windows"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"past": -1}, "past"),
        ({"past": 2**31 - 1}, "past|slots"),
        ({"limit": 0}, "limit"),
        ({"softcap": -1.0}, "softcap"),
        ({"sink_logits": torch.zeros(3)}, "sink_logits"),
        ({"q": torch.zeros(2, 3, 3, 16)}, "q is"),
        ({"q": torch.zeros(2, 4, 3, 16, dtype=torch.float64)}, "type"),
        ({"v_new": torch.zeros(2, 2, 2, 16)}, "v_new"),
        ({"k_cache": torch.zeros(2, 42, 24)}, "k_cache"),
        ({"v_cache": torch.zeros(2, 41, 16)}, "v_cache"),
        ({"k_cache": torch.zeros(2, 42, 16, dtype=torch.bfloat16)}, "dtype"),
    ],
)
def test_nonsense_is_refused_with_a_reason(use_native, change, message):
    with path(use_native), pytest.raises(OperatorError, match=message):
        cached_attention(**small(past=40) | change)


@PATHS
@pytest.mark.parametrize(
    "change", [{"offset": ints(0, 12, 43)}, {"offset": ints(0, 3, 42)}, {"first": ints(0, -1)}, {"past": -1}]
)
def test_a_refused_append_writes_nothing(use_native, change):
    a = small(past=40) | change
    before = a["k_cache"].clone(), a["v_cache"].clone()
    with path(use_native), pytest.raises(OperatorError):
        append_(a["k_cache"], a["v_cache"], a["k_new"], a["v_new"], a["offset"], a["first"], a["past"], 4)
    assert torch.equal(a["k_cache"], before[0]) and torch.equal(a["v_cache"], before[1])


@needs_native
@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (3, torch.zeros(2, 42, 16)[:, :, ::2], "k_cache"),
        (4, torch.zeros(2, 42, 32)[:, :, ::2], "contiguous"),
        (4, torch.zeros(2, 41, 16), "slots"),
        (0, torch.zeros(2, 3, 3, 16), "expected 3"),
        (6, ints(1, 2, 3, 0), "at least 1"),
        (8, torch.zeros(3), "sink_logits"),
        (9, -1, "past"),
        (9, 2**31 - 3, "past"),
        (9, 2**63 - 1, "past"),
        (10, -1, "sinks"),
        (11, 0, "limit"),
    ],
)
def test_the_operator_itself_refuses_nonsense(index, value, message):
    arguments = list(raw(small()))
    arguments[index] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.aah.decode(*arguments)


@needs_native
def test_a_cache_whose_rows_overlap_is_not_written():
    a = small()
    shared = torch.zeros(1, 42, 16).expand(2, 42, 16)
    with pytest.raises(OperatorError, match="overlap"):
        append_(shared, a["v_cache"], a["k_new"], a["v_new"], a["offset"], a["first"], 20, 4)


@PATHS
def test_nothing_to_do(use_native):
    with path(use_native):
        assert cached_attention(**small(new=0)).shape == (2, 4, 0, 16)
        a = small(new=3, past=0, first=ints(3, 9))  # all padding
        a["q"][:], a["k_cache"][:] = torch.nan, torch.nan
        assert (cached_attention(**a) == 0).all()
        append_(a["k_cache"], a["v_cache"], a["k_new"], a["v_new"], a["offset"], a["first"], 0, 4)
        assert a["k_cache"].isnan().all()
