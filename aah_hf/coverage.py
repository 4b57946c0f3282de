"""How much of full causal attention a set of windows uses: pure functions of numbers.

Three figures that answer three questions and are always reported together (method.md §2):
ACR is the paper's routing diagnostic, causal coverage is what a kernel computes, KV coverage is
what a cache keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

Windows = Sequence[Sequence[int | None]]
"""windows[layer][query_head]: keys per query, or None for full causal attention."""


@dataclass(frozen=True)
class Coverage:
    """Coverage of a plan at one sequence length.

    Attributes:
        seq_len: the length in tokens that the figures are for.
        acr: the paper's attention coverage ratio, `Σ min(w, T) / (H · T)`. Describes routing; it is
            not a measured saving of time.
        causal: selected (query, key) pairs over all causal pairs: what a kernel computes.
        kv: cached keys over all keys, per KV head: what a shrinking cache keeps.
        kv_bytes: bytes of keys and values that such a cache holds for one sequence, or None where the
            shapes are not known.
    """

    seq_len: int
    acr: float
    causal: float
    kv: float
    kv_bytes: int | None = None

    def to_dict(self) -> dict:
        return asdict(self)


def pairs(seq_len: int, window: int | None, sink_tokens: int = 0) -> int:
    """Number of (query, key) pairs that one head computes over a sequence of `seq_len` tokens.

    A query at position i sees `min(i + 1, window + sink_tokens)` keys: until window and sink tokens
    touch, it simply sees everything.
    """
    seen = seq_len if window is None else min(seq_len, window + sink_tokens)
    return seen * (seen + 1) // 2 + (seq_len - seen) * seen


def kept_keys(seq_len: int, window: int | None, sink_tokens: int = 0) -> int:
    """Keys that a cache keeps between steps for a KV head whose largest window is `window`.

    The newest key arrives together with its query, hence `window - 1` (method.md §2).
    """
    return seq_len if window is None else min(seq_len, sink_tokens + window - 1)


def widest(windows: Sequence[int | None]) -> int | None:
    """The largest of some windows, None (full) being larger than any number."""
    return None if any(w is None for w in windows) else max(w for w in windows if w is not None)


def kv_windows(windows: Sequence[int | None], kv_heads: int) -> tuple[int | None, ...]:
    """The window that each KV head of a layer must keep: the largest over the query heads that share it."""
    group = len(windows) // kv_heads
    return tuple(widest(windows[i * group : (i + 1) * group]) for i in range(kv_heads))


def measure(
    windows: Windows,
    seq_len: int,
    *,
    kv_heads: int | Sequence[int],
    sink_tokens: int = 0,
    head_dim: int | None = None,
    element_bytes: int = 2,
) -> Coverage:
    """Coverage of `windows` at `seq_len` tokens.

    Args:
        windows: per layer and query head.
        seq_len: tokens, >= 1.
        kv_heads: KV heads of every layer, or one number per layer.
        sink_tokens: first tokens that stay visible.
        head_dim: size of a head; with it `kv_bytes` is filled in.
        element_bytes: bytes of one cached number.
    """
    per_layer = [kv_heads] * len(windows) if isinstance(kv_heads, int) else list(kv_heads)
    heads = sum(len(layer) for layer in windows)
    selected = sum(pairs(seq_len, w, sink_tokens) for layer in windows for w in layer)
    attended = sum(seq_len if w is None else min(w, seq_len) for layer in windows for w in layer)
    kept = sum(kept_keys(seq_len, w, sink_tokens) for layer, n in zip(windows, per_layer) for w in kv_windows(layer, n))
    return Coverage(
        seq_len=seq_len,
        acr=attended / (heads * seq_len),
        causal=selected / (heads * pairs(seq_len, None)),
        kv=kept / (sum(per_layer) * seq_len),
        kv_bytes=None if head_dim is None else kept * 2 * head_dim * element_bytes,
    )
