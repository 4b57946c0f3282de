"""The multiple-choice knapsack: one option per group, smallest total error, total cost within a limit.

Exact and fast by three classic steps. A Lagrange multiplier prices the cost and gives a lower bound
(Dyer 1984, Zemel 1984); options whose priced excess is larger than the gap between that bound and a
greedy solution cannot be in an optimum and are dropped; what is left goes through dynamic programming
over Pareto fronts of (cost, error) with the same bound (Nemhauser and Ullmann 1969). A table over all
integer budgets would need billions of cells (causal costs are counts of pairs).
"""

from __future__ import annotations

import numpy as np

MAX_STATES = 20_000
"""States of one Pareto front. Beyond it (only seen with thousands of near-identical groups) the states of best
bound are kept: the budget still holds, and the error is within the gap of the Lagrange bound, below one option's."""


def choose(errors: np.ndarray, costs: np.ndarray, limit: int) -> np.ndarray | None:
    """The option of every group that minimises the summed error with a summed cost of at most `limit`.

    Args:
        errors: [groups, options] float64, finite.
        costs: [groups, options] int64, >= 0.
        limit: largest allowed sum of costs.

    Returns:
        [groups] indices of options, or None when even the cheapest options exceed the limit. Among
        options of equal error the cheaper one is taken.
    """
    if int(costs.min(axis=1).sum()) > limit:
        return None
    groups = np.arange(len(errors))
    price, choice = _price(errors, costs, limit)
    choice = _fill(errors, costs, limit, choice)
    if price == 0.0:
        return choice

    priced = errors + price * costs
    anchor = _argmin(priced, costs)
    excess = priced - priced[groups, anchor][:, None]
    extra = costs - costs[groups, anchor][:, None]
    room = limit - int(costs[groups, anchor].sum())

    # Any solution lies `sum of excess + price · unused room` above the Lagrange bound.
    def above(picked: np.ndarray) -> float:
        return float(excess[groups, picked].sum() + price * (room - int(extra[groups, picked].sum())))

    gap = above(choice)
    slack = 1e-9 * max(gap, 1e-12 * float(np.abs(priced).max()))  # rounding must not drop the optimum
    open_groups = [g for g in groups if (excess[g] <= gap + slack).sum() > 1]
    open_groups.sort(key=lambda g: -np.partition(excess[g], 1)[1])  # those with clear choices first: small fronts
    options = [np.flatnonzero(excess[g] <= gap + slack) for g in open_groups]
    lowest = np.cumsum([0, *(int(extra[g, o].min()) for g, o in zip(open_groups, options))][::-1])[::-1]
    highest = np.cumsum([0, *(int(extra[g, o].max()) for g, o in zip(open_groups, options))][::-1])[::-1]

    spent, missed = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    best: tuple[int, int] | None = None  # (stage, state) of the best solution found so far
    for stage, (group, allowed) in enumerate(zip(open_groups, options), 1):
        parent = np.repeat(np.arange(len(spent)), len(allowed))
        option = np.tile(allowed, len(spent))
        cost, over = spent[parent] + extra[group, option], missed[parent] + excess[group, option]
        unused = np.maximum(room - cost - highest[stage], 0)
        keep = (cost + lowest[stage] <= room) & (over + price * unused <= gap + slack)
        parent, option, cost, over = parent[keep], option[keep], cost[keep], over[keep]
        error = over - price * cost  # up to a constant
        order = np.lexsort((error, cost))
        front = order[_falls(error[order])]
        if len(front) > MAX_STATES:
            front = np.sort(front[np.argsort(over[front], kind="stable")[:MAX_STATES]])
        parent, option, spent, missed = parent[front], option[front], cost[front], over[front]
        trail.append((parent, option))
        if not len(spent):
            break
        # the rest of the groups at their anchors completes every state that still fits
        total = np.where(spent <= room, missed + price * (room - spent), np.inf)
        state = int(total.argmin())
        if total[state] < gap:
            gap, best = float(total[state]), (stage, state)
    if best is None:
        return choice
    result, (stage, state) = anchor.copy(), best
    for group, (parent, option) in zip(open_groups[:stage][::-1], trail[:stage][::-1]):
        result[group] = option[state]
        state = parent[state]
    return result


def _argmin(priced: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Column of the smallest entry of every row; among equal ones that of the smallest cost."""
    tied = priced <= priced.min(axis=1, keepdims=True)
    return np.where(tied, costs, np.iinfo(np.int64).max).argmin(axis=1)


def _price(errors: np.ndarray, costs: np.ndarray, limit: int) -> tuple[float, np.ndarray]:
    """The smallest price per unit of cost (to rounding) at which the best options fit, and those options."""
    groups = np.arange(len(errors))

    def at(price: float) -> tuple[np.ndarray, bool]:
        picked = _argmin(errors + price * costs, costs)
        return picked, int(costs[groups, picked].sum()) <= limit

    picked, fits = at(0.0)
    if fits:
        return 0.0, picked
    low, high = 0.0, 2.0 * float(errors.max() - errors.min())  # costs differ by >= 1: now the cheapest wins
    picked, _ = at(high)
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        trial, fits = at(middle)
        if fits:
            high, picked = middle, trial
        else:
            low = middle
    return high, picked


def _fill(errors: np.ndarray, costs: np.ndarray, limit: int, choice: np.ndarray) -> np.ndarray:
    """Spend what is left of the budget greedily on the best error saved per cost."""
    groups, choice = np.arange(len(errors)), choice.copy()
    for _ in range(min(4 * len(errors), 1000)):
        gain = errors[groups, choice][:, None] - errors
        extra = costs - costs[groups, choice][:, None]
        room = limit - int(costs[groups, choice].sum())
        useful = (gain > 0) & (extra <= room)
        if not useful.any():
            break
        rate = np.where(useful, gain / np.maximum(extra, 1e-9), -1.0)
        group, option = np.unravel_index(int(rate.argmax()), rate.shape)
        choice[group] = option
    return choice


def _falls(error: np.ndarray) -> np.ndarray:
    """Mask of the entries that are smaller than all before them: the Pareto front in order of cost."""
    before = np.concatenate([[np.inf], np.minimum.accumulate(error)[:-1]])
    return error < before
