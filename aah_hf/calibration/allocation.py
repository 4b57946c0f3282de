"""Budgets, and the exact choice of one window per head, KV head or layer under a budget (method.md §8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..coverage import kept_keys, pairs
from ..errors import CalibrationError
from .knapsack import choose

BUDGET_KINDS = ("causal", "acr", "kv", "kv_bytes")
MAX_TOKENS = 2**31 - 1
GRANULARITIES = ("head", "kv_head", "layer")


@dataclass(frozen=True)
class Budget:
    """Upper bound on one of the three coverages of method.md §2, or on the bytes of the KV cache.

    Args:
        kind: "causal" (query-key pairs that a kernel computes), "acr" (the paper's ratio), "kv" (keys that a
            cache keeps) or "kv_bytes" (bytes that it keeps). The KV kinds need granularity "kv_head" or "layer".
        value: a coverage, 0 < value <= 1, at the calibration's sequence length; or bytes, an integer >= 1.
        at: tokens of the one sequence that "kv_bytes" is for; default the calibration's sequence length.

    Raises:
        CalibrationError: unknown kind, or a value that is no number in that range.
    """

    kind: str
    value: float
    at: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in BUDGET_KINDS:
            raise CalibrationError(f"budget kind is {self.kind!r}; choose one of {', '.join(BUDGET_KINDS)}.")
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if self.kind == "kv_bytes":
            _check_bytes(self.value, self.at)
            return
        if self.at is not None:
            raise CalibrationError(f"`at` is for budgets in bytes; a {self.kind} budget refers to `seq_len`.")
        if not number or not 0 < self.value <= 1:  # NaN fails the comparison too
            hint = ""
            if isinstance(self.value, str):
                hint = " Write Budget.kv(0.5), Budget.acr(0.3) or a number; 'kv:0.5' is for the command line."
            elif number and 1 < self.value <= 100:
                hint = f" Did you mean {self.value / 100:g}?"
            raise CalibrationError(
                f"budget is {self.value!r}; expected a coverage with 0 < budget <= 1, where 1 is full attention.{hint}"
            )
        object.__setattr__(self, "value", float(self.value))

    @classmethod
    def causal(cls, value: float) -> Budget:
        """At most this share of the causal (query, key) pairs is computed."""
        return cls("causal", value)

    @classmethod
    def acr(cls, value: float) -> Budget:
        """At most this attention coverage ratio, the paper's routing diagnostic."""
        return cls("acr", value)

    @classmethod
    def kv(cls, value: float) -> Budget:
        """At most this share of the keys and values stays in the cache."""
        return cls("kv", value)

    @classmethod
    def kv_bytes(cls, value: int, *, at: int | None = None) -> Budget:
        """At most this many bytes of keys and values stay in the cache of one sequence of `at` tokens.

        In the dtype that the model is calibrated in. Default of `at`: the calibration's sequence length.
        """
        return cls("kv_bytes", value, at)

    @property
    def of_cache(self) -> bool:
        """Whether it bounds what a cache keeps, which is decided per KV head."""
        return self.kind in ("kv", "kv_bytes")

    @classmethod
    def of(cls, value: Budget | float) -> Budget:
        """A budget as it is; a plain number means causal coverage."""
        return value if isinstance(value, Budget) else cls.causal(value)

    def __str__(self) -> str:
        if self.kind != "kv_bytes":
            return f"{self.kind} coverage {self.value:g}"
        return f"{self.value} KV bytes" + (f" at {self.at} tokens" if self.at else "")


def allocate(
    errors: np.ndarray,
    candidates: Sequence[int | None],
    budget: Budget | float,
    *,
    seq_len: int,
    sink_tokens: int,
    kv_heads: int,
    granularity: str = "kv_head",
    key_bytes: int | None = None,
) -> tuple[tuple[int | None, ...], ...]:
    """The windows of smallest summed error within the budget, exactly.

    Args:
        errors: [layers, query_heads, candidates], see `statistics.ErrorCurves`; finite.
        candidates: windows in keys, ascending, None (full attention) last.
        budget: a plain number means causal coverage.
        seq_len: tokens, the length that the budget refers to.
        sink_tokens: first tokens that stay visible under every window.
        kv_heads: KV heads per layer.
        granularity: what shares one window: "head", "kv_head" (all query heads of a KV head; default) or
            "layer". The separate errors of heads that share a window are added.
        key_bytes: bytes of one cached key and its value in one KV head, for a budget in bytes.

    Returns:
        windows[layer][query_head]; None is full attention.

    Raises:
        CalibrationError: the budget is below what the smallest candidate reaches, a KV budget is given
            for single heads, or the arguments do not fit each other.
    """
    budget, errors = Budget.of(budget), np.asarray(errors, dtype=np.float64)
    _check(errors, candidates, budget, kv_heads, granularity)
    layers, heads, _ = errors.shape
    size = {"head": 1, "kv_head": heads // kv_heads, "layer": heads}[granularity]  # query heads that share a window
    shared_kv = max(1, size * kv_heads // heads)

    per_group = errors.reshape(layers * heads // size, size, -1).sum(axis=1)
    if budget.kind == "kv_bytes" and key_bytes is None:
        raise CalibrationError("a budget in bytes needs `key_bytes`, the bytes of one cached key and value.")
    length = budget.at or seq_len

    def cost_of(window: int | None) -> int:
        if budget.kind == "causal":
            return size * pairs(seq_len, window, sink_tokens)
        if budget.kind == "acr":
            return size * (seq_len if window is None else min(window, seq_len))
        if budget.kind == "kv":
            return shared_kv * kept_keys(seq_len, window, sink_tokens)
        assert key_bytes is not None
        return shared_kv * kept_keys(length, window, sink_tokens) * key_bytes

    cost, full = [cost_of(w) for w in candidates], cost_of(None)
    total = full * len(per_group)
    if budget.kind == "kv_bytes":
        limit = int(budget.value)
    else:
        limit = int(budget.value * total) + 1
        while limit / total > budget.value:  # the division that coverage.measure reports, so that it never exceeds
            limit -= 1
    costs = np.broadcast_to(np.array(cost, dtype=np.int64), per_group.shape)
    choice = choose(per_group, costs, limit)
    if choice is None:
        in_bytes = budget.kind == "kv_bytes"

        def of_all(cost: int) -> str:
            return f"{cost * len(per_group)} bytes" if in_bytes else f"{cost / full:.4f}"

        shortest, least = candidates[int(np.argmin(cost))], cost_of(1)
        if least * len(per_group) > limit:
            advice = f"or lower sink_tokens: even windows of a single key leave {of_all(least)}"
        else:
            advice = "or add shorter candidates"
        raise CalibrationError(
            f"a budget of {budget} cannot be met: with the shortest candidate window "
            f"({shortest or 'full attention'}) everywhere and {sink_tokens} sink tokens it is "
            f"{of_all(min(cost))} at {length if in_bytes else seq_len} tokens. Raise the budget, {advice}."
        )
    picked = [candidates[index] for index in choice for _ in range(size)]
    longest = max(seq_len, budget.at or 0)
    whole = [None if w is None or w >= longest else w for w in picked]
    return tuple(tuple(whole[layer * heads : (layer + 1) * heads]) for layer in range(layers))


def _check(
    errors: np.ndarray, candidates: Sequence[int | None], budget: Budget, kv_heads: int, granularity: str
) -> None:
    if errors.ndim != 3 or errors.shape[2] != len(candidates) or not errors.size:
        raise CalibrationError(
            f"errors have shape {errors.shape}; expected [layers, query_heads, {len(candidates)} candidates]."
        )
    if not np.isfinite(errors).all():
        raise CalibrationError("errors hold NaN or infinite values; the model's activations overflowed.")
    if granularity not in GRANULARITIES:
        raise CalibrationError(f"granularity is {granularity!r}; choose one of {', '.join(GRANULARITIES)}.")
    if kv_heads < 1 or errors.shape[1] % kv_heads:
        raise CalibrationError(f"{errors.shape[1]} query heads cannot share {kv_heads} KV heads evenly.")
    check_granularity(budget, granularity)


def check_granularity(budget: Budget, granularity: str) -> None:
    """A cache keeps the largest window of a KV head's query heads, so single heads have no KV cost of their own."""
    if budget.of_cache and granularity == "head":
        raise CalibrationError(
            "a KV budget needs granularity 'kv_head' or 'layer': what the cache keeps is the largest window of "
            "all query heads of a KV head. Use one of these, or budget causal coverage or ACR."
        )


def _check_bytes(value: object, at: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CalibrationError(f"the budget is {value!r} bytes; expected an integer >= 1.")
    if at is not None and (not isinstance(at, int) or isinstance(at, bool) or not 1 <= at <= MAX_TOKENS):
        raise CalibrationError(f"`at` is {at!r}; expected the number of tokens that the bytes are for.")
