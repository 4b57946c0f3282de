"""windowed_attention against the float64 reference, over the shared grid."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from grid import Case, cases, expected, tensors
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings

from aah_hf import OperatorError, Sequences, windowed_attention
from aah_hf.coverage import pairs
from aah_hf.ops import eager, reference


def run(case: Case, t, **overrides):
    return windowed_attention(
        t.q,
        t.k,
        t.v,
        case.windows,
        case.sink_tokens,
        softcap=case.softcap,
        sink_logits=t.sink_logits,
        q_start=case.q_start,
        sequences=t.sequences,
        limit=case.limit,
        mask=t.mask,
        **overrides,
    )


@hypothesis_settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_forward_and_backward_equal_the_reference(backend, case):
    t = tensors(case)
    out, truth = run(case, t), expected(case, t)
    torch.testing.assert_close(out, truth, rtol=1e-10, atol=1e-10)
    for got, want in zip(torch.autograd.grad(out, t.inputs, t.dout), torch.autograd.grad(truth, t.inputs, t.dout)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(plain=True, layouts=("none", "left")))
def test_low_precision_is_as_close_to_the_truth_as_sdpa(backend, dtype, case):
    t = tensors(case, dtype)
    truth = expected(case, t)
    seen = reference.visibility(
        case.windows, case.q_len, case.kv_len, case.sink_tokens, q_start=case.q_start, valid=t.valid
    )
    k, v = (x.repeat_interleave(case.group, 1) for x in (t.k, t.v))
    sdpa = F.scaled_dot_product_attention(t.q, k, v, attn_mask=seen | ~seen.any(-1, keepdim=True))
    sdpa = torch.where(seen.any(-1, keepdim=True), sdpa, 0.0)
    error = (run(case, t) - truth).abs().max()
    assert error <= 2 * (sdpa - truth).abs().max() + torch.finfo(dtype).eps


@pytest.mark.parametrize("window", [1, 7, 64, 200, 1000, None])
@pytest.mark.parametrize("sink_tokens", [0, 4])
def test_blocks_cover_exactly_the_pairs_of_causal_coverage(window, sink_tokens):
    """Work follows coverage: what the blocks let through is what coverage.py counts, without a T×T mask."""
    length = 700
    q = torch.zeros(1, 1, length, 8)
    blocks = list(eager._blocks(q, q, [window or length], eager.Options(sink_tokens=sink_tokens), 0, 0, None, None))
    seen = 0
    for block in blocks:
        keys = sum(piece.stop - piece.start for piece in block.keys)
        rows = block.queries.stop - block.queries.start
        if block.causal:
            assert rows == keys
            seen += rows * (rows + 1) // 2
        else:
            assert block.mask is None or block.mask.shape == (rows, keys)
            assert keys <= sink_tokens + (window or length) + 256
            seen += rows * keys if block.mask is None else int(block.mask.sum())
    assert seen == pairs(length, window, sink_tokens)


def test_left_padded_rows_equal_each_row_alone(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 90, 16), torch.randn(2, 2, 90, 16), torch.randn(2, 2, 90, 16)
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[0, :37] = False
    out = windowed_attention(q, k, v, [5, 16, 64, 90], 3, sequences=Sequences(valid))
    alone = windowed_attention(q[:1, :, 37:], k[:1, :, 37:], v[:1, :, 37:], [5, 16, 64, 90], 3)
    if backend == "eager":  # it cuts the padding off first; the native one sums tiles in another order
        assert torch.equal(out[:1, :, 37:], alone)
    torch.testing.assert_close(out[:1, :, 37:], alone)
    assert not out[:1, :, :37].any()


def test_packed_documents_equal_each_document_alone(backend):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 60, 8), torch.randn(1, 1, 60, 8), torch.randn(1, 1, 60, 8)
    out = windowed_attention(q, k, v, [4, None], 2, sequences=Sequences.from_cu_seqlens(torch.tensor([0, 25, 60])))
    for a, b in ((0, 25), (25, 60)):
        torch.testing.assert_close(
            out[:, :, a:b], windowed_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], [4, None], 2)
        )


def test_rows_that_see_nothing_give_zeros_and_finite_gradients(backend):
    q, k, v = (torch.randn(1, 1, 6, 8, requires_grad=True) for _ in range(3))
    out = windowed_attention(q, k, v, [3], sequences=Sequences(torch.zeros(1, 6, dtype=torch.bool)))
    assert not out.any()
    out = windowed_attention(q, k, v, [3], mask=torch.zeros(1, 1, 6, 6, dtype=torch.bool))
    out.sum().backward()
    assert not out.any()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


def test_dropout_replays_the_same_mask_in_backward():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.double) for _ in range(3))
    v.requires_grad_()
    torch.manual_seed(7)
    out = windowed_attention(q, k, v, [5, 20], 2, dropout=0.4)
    (grad,) = torch.autograd.grad(out.sum(), v)
    # the output is linear in v for a fixed mask, so <dout/dv, v> gives it back
    torch.testing.assert_close((grad * v).sum(), out.sum())
    torch.manual_seed(7)
    assert torch.equal(out, windowed_attention(q, k, v, [5, 20], 2, dropout=0.4))
    assert not torch.allclose(out, windowed_attention(q, k, v, [5, 20], 2))


def test_second_derivative_raises(backend):
    q, k, v = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(windowed_attention(q, k, v, [3]).square().sum(), q, create_graph=True)
    with pytest.raises((RuntimeError, OperatorError), match=r"once_differentiable|second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": [0, 1, 2, 3]}, "windows\\[0\\] is 0"),
        ({"windows": [-5, 1, 2, 3]}, "windows\\[0\\] is -5"),
        ({"windows": [2.5, 1, 2, 3]}, "windows\\[0\\] is 2.5"),
        ({"windows": [True, 1, 2, 3]}, "windows\\[0\\] is True"),
        ({"windows": [1, 2]}, "2 windows were given for 4 query heads"),
        ({"sink_tokens": -1}, "sink_tokens is -1"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"limit": 0}, "limit is 0"),
        ({"q_start": 7}, "positions 7"),
        ({"k": torch.zeros(2, 3, 10, 8), "v": torch.zeros(2, 3, 10, 8)}, "4 query heads cannot share 3 KV heads"),
        ({"k": torch.zeros(2, 2, 10, 16)}, "q must be"),
        ({"k": torch.zeros(2, 2, 10, 8, dtype=torch.double)}, "share one floating dtype"),
        ({"sink_logits": torch.zeros(3)}, "sink_logits has shape"),
        ({"mask": torch.zeros(2, 1, 10, 4)}, "mask has shape"),
        ({"mask": torch.zeros(2, 1, 10, 10, requires_grad=True)}, "mask requires a gradient"),
        ({"sequences": Sequences(torch.ones(2, 4))}, "sequences cover"),
    ],
)
def test_bad_arguments_say_what_is_wrong(change, message):
    arguments = {
        "q": torch.zeros(2, 4, 10, 8),
        "k": torch.zeros(2, 2, 10, 8),
        "v": torch.zeros(2, 2, 10, 8),
        "windows": [1, 2, 3, None],
    }
    with pytest.raises(OperatorError, match=message):
        windowed_attention(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"limit": 2.5}, "limit is 2.5"),
        ({"windows": 3}, "windows is 3"),
        ({"q_start": torch.tensor([0, 0])}, "q_start has shape"),
        ({"mask": torch.ones(1, 1, 10, 10, dtype=torch.long)}, "mask is of type torch.int64"),
    ],
)
def test_arguments_that_would_be_misread_are_refused(change, message):
    q, k, v = torch.zeros(2, 4, 10, 8), torch.zeros(2, 2, 10, 8), torch.zeros(2, 2, 10, 8)
    with pytest.raises(OperatorError, match=message):
        windowed_attention(**({"q": q, "k": k, "v": v, "windows": [1, 2, 3, None]} | change))


def test_sequences_refuse_what_they_would_misread():
    with pytest.raises(OperatorError, match="integers"):
        Sequences(documents=torch.zeros(1, 4))
    with pytest.raises(OperatorError, match="from 0"):
        Sequences.from_cu_seqlens(torch.tensor([2, 5, 10]))


def test_a_scale_of_zero_and_values_of_another_size_and_numpy_windows(backend):
    np = pytest.importorskip("numpy")
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 12)
    out = windowed_attention(q, k, v, np.array([3, 5]), 1, scale=0.0, sink_logits=torch.zeros(2))
    truth, _ = reference.attention(q, k, v, [3, 5], 1, scale=0.0, sink_logits=torch.zeros(2))
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"kv_start": -1}, "kv_start is -1"),
        ({"kv_start": 1.5}, "kv_start is 1.5"),
        ({"kv_start": True}, "kv_start is True"),
        ({"q_start": 0.0}, "q_start is 0.0"),
        ({"q_start": "a"}, "q_start is 'a'"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": "x"}, "scale is 'x'"),
        ({"limit": True}, "limit is True"),
        ({"sink_tokens": 2**64}, "sink_tokens is"),
        ({"windows": None}, "windows is None"),
        ({"windows": {1: 1, 2: 2}}, "windows is"),
        ({"windows": [1, 2, 3]}, "second dimension"),
        ({"sequences": torch.ones(1, 6)}, "sequences is a Tensor"),
    ],
    ids=str,
)
def test_odd_positions_and_factors_are_refused(bad, message):
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(OperatorError, match=re.escape(message)):
        windowed_attention(q, q, q, **({"windows": [2, None]} | bad))


def test_a_mask_to_be_added_is_not_taken_for_one_of_padding():
    added = torch.zeros(1, 6).masked_fill(torch.arange(6) < 2, -1e9)
    with pytest.raises(OperatorError, match="other than 0 and 1"):
        Sequences(valid=added)
    assert torch.equal(Sequences(valid=(added == 0).float()).valid, added == 0)
