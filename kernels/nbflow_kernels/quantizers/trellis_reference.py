"""Viterbi's algorithm in float64, the reference of `quantizers.search.trellis`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.formats.trellis_code import STATE_BITS, ZERO, codes_of_states


def best_path(x: Floats, weight: Floats, scale: float, bits: int) -> NDArray[np.int64]:
    """Return the states (K,) of the path of least weighted squared error of weights x (K,).

    Of equal errors, the path with the lower dropped bits wins.
    """
    values = scale * (codes_of_states(bits).astype(np.float64) - ZERO)
    n_nodes = 1 << STATE_BITS - bits
    state = np.arange(1 << STATE_BITS)  # node << bits | dropped: ends in `node`
    errors = np.full(n_nodes, np.inf)
    errors[0] = 0
    dropped = []
    for number, w in zip(x.astype(np.float64), weight.astype(np.float64), strict=True):
        candidates = errors[state & n_nodes - 1] + w * (values - number) ** 2
        by_node = candidates.reshape(n_nodes, 1 << bits)
        dropped.append(by_node.argmin(axis=1))
        errors = by_node.min(axis=1)
    node, path = int(errors.argmin()), []
    for choice in reversed(dropped):
        path.append(node << bits | int(choice[node]))
        node = path[-1] & n_nodes - 1
    return np.array(path[::-1])
