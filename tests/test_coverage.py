"""Coverage figures equal counting, for every window and sink."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aah_hf.coverage import kept_keys, measure, pairs
from aah_hf.ops import reference


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 45)), st.integers(0, 6))
def test_pairs_equal_the_number_of_visible_pairs(seq_len, window, sinks):
    seen = reference.visibility([window or seq_len], seq_len, seq_len, sinks)
    assert pairs(seq_len, window, sinks) == int(seen.sum())


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 45)), st.integers(0, 6))
def test_kept_keys_are_the_earlier_keys_the_next_query_sees(seq_len, window, sinks):
    seen = reference.visibility([window or seq_len + 1], 1, seq_len + 1, sinks, q_start=seq_len)
    assert kept_keys(seq_len, window, sinks) == int(seen.sum()) - 1


def test_the_three_figures_and_bytes_of_a_small_plan():
    # layer 0: heads of KV head 0 want 2 and 4 keys, KV head 1 wants all 8
    c = measure(((2, 4, None, 8), (1, 1, 1, 1)), 8, kv_heads=2, sink_tokens=1, head_dim=16, element_bytes=2)
    assert c.acr == (2 + 4 + 8 + 8 + 4 * 1) / (8 * 8)
    assert c.kv == (4 + 8 + 1 + 1) / (4 * 8)
    assert c.kv_bytes == (4 + 8 + 1 + 1) * 2 * 16 * 2
    assert measure(((None,) * 4,), 8, kv_heads=2).to_dict() == {
        "seq_len": 8,
        "acr": 1.0,
        "causal": 1.0,
        "kv": 1.0,
        "kv_bytes": None,
    }
