r"""Outliers chosen by what they gain: the encoder "outliers".

`nbflow_kernels.quantizers.outliers` takes aside what lies beyond a range.  Here each block is encoded
with and without its largest and its least weight, then once more, and each row takes those steps
that lower its error most, up to its share:

.. math:: g = \sum_{i \in b} m_i (Q(w)_i - w_i)^2 - \sum_{i \in b \setminus o} m_i (Q(w')_i - w_i)^2

with the importances m of the columns, and w' the block with its outliers o replaced by the nearest
of the others.  A second outlier of a block that gains more than the first lends it half of that, as
it cannot be had alone.  A row does not depend on the others, so that it does not matter how a
matrix is cut into rows.

Source of the criterion, weights that are kept where rounding them would cost most by the inputs'
second moments: T. Dettmers et al., "SpQR", ICLR 2024, arXiv:2306.03078, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.sparse.csr import CsrMatrix

Mask = NDArray[np.bool_]
N_STEPS = 2
"""Most outliers of a block."""


@dataclass
class _Encoded:
    """Rows with so many outliers in each block."""

    data: Bytes
    mask: Mask
    """(rows, width): the outliers."""
    decoded: Floats
    errors: NDArray[np.float64]
    """(rows, blocks): weighted squared errors without those of the outliers."""

    def take(self, other: _Encoded, better: Mask, format: QuantFormat) -> _Encoded:
        """Return it with the blocks (rows, blocks) of `other` that are `better`."""
        wide = np.repeat(better, format.block_size, axis=1)
        by_bytes = np.repeat(better, format.block_bytes, axis=1)
        return _Encoded(
            np.where(by_bytes, other.data, self.data),
            np.where(wide, other.mask, self.mask),
            np.where(wide, other.decoded, self.decoded),
            np.where(better, other.errors, self.errors),
        )


def delta_rows(
    format: QuantFormat, x: Floats, n_columns: int, importance: Floats | None, n_each: int
) -> tuple[Bytes, CsrMatrix]:
    """Return the bytes and the outliers of rows, at most `n_each` of a row.

    Other parameters as of `QuantFormat.quantize_rows`.  No block's error, outliers counted as
    exact, is larger than with none.
    """
    weight = np.ones((1, x.shape[1]), np.float32) if importance is None else importance
    steps = [_encode(format, x, n_columns, weight, importance, np.zeros(x.shape, np.bool_))]
    for _ in range(N_STEPS):
        masks = [_with_extreme(format, x, n_columns, steps[-1].mask, sign) for sign in (1, -1)]
        most, least = (_encode(format, x, n_columns, weight, importance, m) for m in masks)
        steps.append(most.take(least, least.errors < most.errors, format))
    n_steps = _chosen_steps(np.stack([step.errors for step in steps]), n_each)
    result = steps[0]
    for i, step in enumerate(steps[1:], start=1):
        result = result.take(step, n_steps == i, format)
    rest = (x - result.decoded)[:, :n_columns]
    mask = result.mask[:, :n_columns]
    sparse = CsrMatrix.from_mask(np.ascontiguousarray(rest), np.ascontiguousarray(mask))
    return result.data, sparse


def _chosen_steps(errors: NDArray[np.float64], n_each: int) -> NDArray[np.intp]:
    """Return how many outliers each block gets (rows, blocks), of errors (steps + 1, ...)."""
    gains = errors[:-1] - errors[1:]
    both = (gains[0] + gains[1]) / 2
    lends = gains[1] > gains[0]
    gains[0], gains[1] = np.where(lends, both, gains[0]), np.where(lends, both, gains[1])
    n_rows, n_blocks = errors.shape[1:]
    flat = gains.transpose(1, 0, 2).reshape(n_rows, -1)  # (rows, steps x blocks)
    # first outliers come before second ones of equal gain
    order = np.argsort(-flat, axis=1, kind="stable")[:, :n_each]
    taken = np.zeros(flat.shape, np.bool_)
    np.put_along_axis(taken, order, True, axis=1)
    taken &= flat > 0
    n_steps = taken.reshape(n_rows, N_STEPS, n_blocks).sum(axis=1)
    worse = np.take_along_axis(errors, n_steps[None], axis=0)[0] > errors[0]
    return np.where(worse, 0, n_steps)


def _with_extreme(format: QuantFormat, x: Floats, n_columns: int, mask: Mask, sign: int) -> Mask:
    """Return a mask with the largest (sign 1) or least weight of each block that is not in it."""
    free = ~mask
    free[:, n_columns:] = False
    blocks = (len(x), -1, format.block_size)
    values = np.where(free, sign * x, -np.inf).reshape(blocks)
    more = np.zeros(values.shape, np.bool_)
    np.put_along_axis(more, values.argmax(axis=2)[:, :, None], True, axis=2)
    result: Mask = mask | (more.reshape(x.shape) & free)
    return result


def _encode(
    format: QuantFormat, x: Floats, n_columns: int, weight: Floats, importance: Any, mask: Mask
) -> _Encoded:
    """Encode rows with the weights in `mask` replaced by the nearest of the rest of their block."""
    blocks = (len(x), -1, format.block_size)
    low = np.where(mask, np.inf, x).reshape(blocks).min(axis=2)
    high = np.where(mask, -np.inf, x).reshape(blocks).max(axis=2)
    lows, highs = (np.repeat(v, format.block_size, axis=1) for v in (low, high))
    inside = np.ascontiguousarray(np.clip(x, lows, highs), np.float32)
    data = format.quantize_rows(inside, n_columns, "best", importance)
    decoded = np.empty_like(x)
    format.dequantize_rows(data, decoded)
    squares = np.square(decoded.astype(np.float64) - x) * weight * ~mask
    squares[:, n_columns:] = 0
    return _Encoded(data, mask, decoded, squares.reshape(blocks).sum(axis=2))
