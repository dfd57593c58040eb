r"""GPTQ: quantize column by column; the columns that follow compensate the error of each.

The squared error of a layer's outputs on calibration inputs X (T, K) is
:math:`\sum_n e_n H e_n^T` with :math:`H = X^T X` and the errors e_n of the rows of the weights.
After column j is rounded, the following columns move to the minimum given its error:

.. math:: w_{j+1:} \mathrel{-}= \frac{w_j - q_j}{U_{jj}} U_{j, j+1:}, \qquad H^{-1} = U^T U

"search" finds the scales of a block for its weights after they have moved; with ``act_order``,
which takes columns in the order of :math:`H_{jj}` across blocks, for the original weights.

Source: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, arXiv:2210.17323, algorithm 1.  Deviations: U comes from a Cholesky
factor of H with rows and columns reversed, without inverting H; and a row keeps the codes of
"search" or "reference" where their error is smaller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.quantizers.affine_grid import (
    AffineGrid,
    Doubles,
    affine_grid,
    check_affine,
    with_codes,
)
from nbflow_kernels.quantizers.registry import quantize_rows

PANEL = 128  # columns updated one by one; those behind them follow in one matrix product


class Hessian:
    """Hessian of a layer's squared output error, with the Cholesky factors GPTQ needs (cached).

    Parameters
    ----------
    moments : array, shape (K, K)
        Second moments :math:`X^T X` of the inputs, or a multiple.
    damping : float
        Added to the diagonal, in units of its mean.

    Raises
    ------
    UsageError
        If `moments` is not square, finite and symmetric with a diagonal >= 0.
    """

    def __init__(self, moments: NDArray[Any], damping: float = 0.01) -> None:
        wide = np.asarray(moments, np.float64)
        if wide.ndim != 2 or wide.shape[0] != wide.shape[1]:
            raise UsageError(
                f"second moments must have shape (K, K), got {wide.shape}; nbflow imatrix --full "
                "collects them"
            )
        if not np.isfinite(wide).all() or wide.diagonal().min(initial=0.0) < 0:
            raise UsageError("second moments must be finite with a diagonal >= 0")
        largest = np.abs(wide).max(initial=0.0)
        if np.abs(wide - wide.T).max(initial=0.0) > 1e-5 * largest:  # the error of float32 sums
            raise UsageError("second moments must be symmetric")
        if not 0 <= damping <= 1:
            raise UsageError(f"damping must lie in 0..1, got {damping}")
        self.matrix: Doubles = (wide + wide.T) / 2
        self._damping = damping
        self._factors: dict[tuple[int, bool], tuple[NDArray[np.intp], Doubles]] = {}

    def __len__(self) -> int:
        return len(self.matrix)

    def factor(self, width: int, act_order: bool) -> tuple[NDArray[np.intp], Doubles]:
        """Return the order of the columns and U (width, width), for columns padded to `width`."""
        key = (width, act_order)
        if key not in self._factors:
            self._factors[key] = self._factor(width, act_order)
        return self._factors[key]

    def _factor(self, width: int, act_order: bool) -> tuple[NDArray[np.intp], Doubles]:
        K = len(self)
        mean = float(self.matrix.diagonal().mean()) or 1.0
        damped = np.eye(width) * mean  # the padding columns keep this diagonal
        damped[:K, :K] = self.matrix + np.diag(np.full(K, self._damping * mean))
        dead = np.flatnonzero(self.matrix.diagonal() == 0)
        damped[dead, dead] = mean  # inputs that were always 0: round to nearest
        order = np.arange(width)
        if act_order:
            order = np.argsort(-damped.diagonal(), kind="stable")
        damped = damped[np.ix_(order, order)]
        try:
            lower = np.linalg.cholesky(damped[::-1, ::-1])
        except np.linalg.LinAlgError:
            raise UsageError(
                f"second moments with damping {self._damping:g} are not positive definite; raise "
                "the damping or collect on more text"
            ) from None
        # H = R R^T with an upper R, so that its inverse is U^T U with U = R^-1
        return order, np.triu(np.linalg.inv(lower[::-1, ::-1]))


def output_errors(error: Doubles, statistics: NDArray[Any] | None) -> Doubles:
    """Return the squared output error of each row of weight errors (N, K).

    `statistics` are second moments (K, K), mean squares (K,), or None for equal ones.
    """
    if statistics is None:
        weighed = error
    else:
        weighed = error * statistics if statistics.ndim == 1 else error @ statistics
    losses: Doubles = np.einsum("nk,nk->n", weighed, error)
    return losses


def gptq_rows(
    format: QuantFormat, x: Floats, n_columns: int, hessian: Hessian, act_order: bool
) -> Bytes:
    """Return the bytes of rows by GPTQ alone; parameters as for `registry.quantize_rows`."""
    check_affine(format, "gptq")
    width = x.shape[1]
    order, factor = hessian.factor(width, act_order)
    importance = np.zeros((1, width), np.float32)
    importance[0, :n_columns] = _relative(hessian.matrix.diagonal())
    block = format.block_size
    moving = np.ascontiguousarray(x.T, np.float64)[order]  # (K, N): a column is contiguous
    if act_order:
        data = quantize_rows(format, x, n_columns, "search", importance)
        grid = affine_grid(format, data)
        step, base = (np.ascontiguousarray(part.T[order]) for part in (grid.step, grid.base))
    else:
        step, base = np.empty_like(moving), np.empty_like(moving)
    codes, errors = np.empty(moving.shape, np.uint8), np.empty_like(moving)
    panel = max(PANEL // block * block, block)
    parts: list[Bytes] = []
    for first in range(0, width, panel):
        end = min(first + panel, width)
        for j in range(first, end):
            if not act_order and j % block == 0:
                own = slice(j, j + block)
                now = np.ascontiguousarray(moving[own].T, np.float32)
                counted = min(block, n_columns - j)
                parts.append(quantize_rows(format, now, counted, "search", importance[:, own]))
                grid = affine_grid(format, parts[-1])
                step[own], base[own] = grid.step.T, grid.base.T
            column = AffineGrid(step[j], base[j], grid.zero, grid.n_codes)
            codes[j] = column.nearest(moving[j])
            errors[j] = (moving[j] - column.values(codes[j])) / factor[j, j]
            moving[j + 1 : end] -= factor[j, j + 1 : end, None] * errors[j]
        moving[end:] -= factor[first:end, end:].T @ errors[first:end]
    if not act_order:
        data = np.concatenate(parts, axis=1)
    chosen = np.empty_like(codes)
    chosen[order] = codes
    return with_codes(format, data, np.ascontiguousarray(chosen.T))


def _relative(squares: Doubles) -> Doubles:
    """Return mean squares relative to the largest; 1 where all are 0."""
    largest = squares.max(initial=0.0)
    return squares / largest if largest > 0 else np.ones_like(squares)
