"""What the typical and the tail-free filter look for in a row, for the draws and for `renorm`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, empty, is_cuda, on_host
from nbflow_kernels.sampling import cpu_typical_tail_free, cuda
from nbflow_kernels.sampling.argument_checks import units_per_row


def typical_ranks(probs: Any) -> Any:
    """Return the array whose largest elements are the most typical ones, float32 (R, V)."""
    check_array("probs", probs, (None, None))
    ranks = empty(probs, probs.shape)
    variant: Any = cuda if is_cuda(probs) else cpu_typical_tail_free
    variant.typical_ranks(probs, ranks)
    return ranks


def tail_free_counts(probs: Any, rows: Any, z: Any, first_counts: bool) -> Any:
    """Return how many of the largest the tail-free filter keeps in each of `rows`, float64."""
    shares = np.array(units_per_row("z", z, len(rows)))
    counts = empty(probs, (len(rows),), np.float64)
    variant: Any = cuda if is_cuda(probs) else cpu_typical_tail_free
    variant.tail_free_counts(probs, rows, shares, 0 if first_counts else 1, counts)
    return on_host(counts)  # the draw's filters are checked and put together there
