"""Multiple-choice knapsack by dynamic programming: one option per item within a budget."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

MAX_UNITS = 1 << 16
"""Resolution of the budget; sizes are rounded up to whole units."""


def solve(
    costs: NDArray[np.floating[Any]], sizes: NDArray[np.integer[Any]], budget: int
) -> NDArray[np.intp]:
    """Choose an option for each item with the least total cost within a budget.

    Parameters
    ----------
    costs : array of float, shape (items, options)
        Cost of each choice; infinite to exclude it.
    sizes : array of int, shape (items, options)
        Size of each choice, at least 1.
    budget : int
        Largest total size.

    Returns
    -------
    array of int, shape (items,)
        The options.  Optimal if the greatest common divisor of the sizes divides the budget into
        at most `MAX_UNITS`; else optimal for sizes rounded up to whole units, after which the
        remaining budget goes to the changes with the largest gain per size.

    Raises
    ------
    UsageError
        If the smallest sizes exceed the budget.

    Examples
    --------
    >>> import numpy as np
    >>> costs = np.array([[9.0, 1.0], [3.0, 2.0]])
    >>> solve(costs, np.array([[1, 3], [1, 3]]), 4)
    array([1, 0])
    """
    allowed = np.where(np.isfinite(costs), sizes, np.iinfo(np.int64).max)
    least = int(allowed.min(axis=1).sum())
    if least > budget:
        raise UsageError(f"the smallest formats take {least:,} bytes, and the budget is {budget:,}")
    unit = math.gcd(*map(int, sizes.ravel()))
    coarse = max(unit, -(-budget // MAX_UNITS) // unit * unit)
    chosen = _exact(costs, -(-sizes // coarse), budget // coarse)
    if chosen is None:  # rounded up, not even the smallest fit
        chosen = allowed.argmin(axis=1)
    return _spend_rest(costs, sizes, budget, chosen)


def _exact(
    costs: NDArray[Any], sizes: NDArray[np.integer[Any]], budget: int
) -> NDArray[np.intp] | None:
    """Return the best choice for sizes in whole units, or None if none fits."""
    n_items, n_options = costs.shape
    total = np.full(budget + 1, np.inf)
    total[0] = 0.0
    decisions = np.zeros((n_items, budget + 1), np.uint8)
    for i in range(n_items):
        after = np.full(budget + 1, np.inf)
        for j in range(n_options):
            size = int(sizes[i, j])
            if size > budget or not np.isfinite(costs[i, j]):
                continue
            candidate = total[: budget + 1 - size] + costs[i, j]
            better = candidate < after[size:]
            after[size:][better] = candidate[better]
            decisions[i, size:][better] = j
        total = after
    left = int(np.argmin(total))
    if not np.isfinite(total[left]):
        return None
    chosen = np.empty(n_items, np.intp)
    for i in reversed(range(n_items)):
        chosen[i] = decisions[i, left]
        left -= int(sizes[i, chosen[i]])
    return chosen


def _spend_rest(
    costs: NDArray[Any], sizes: NDArray[Any], budget: int, chosen: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Change choices one by one while the remaining budget allows a smaller cost."""
    chosen, items = chosen.copy(), np.arange(len(costs))
    while True:
        more = sizes - sizes[items, chosen][:, None]
        gain = costs[items, chosen][:, None] - costs
        left = budget - int(sizes[items, chosen].sum())
        possible = (more <= left) & (gain > 0)
        if not possible.any():
            return chosen
        rate = np.where(possible, gain / np.maximum(more, 1), -np.inf)
        item, option = np.unravel_index(int(np.argmax(rate)), rate.shape)
        chosen[item] = option
