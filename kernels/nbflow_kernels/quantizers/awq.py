r"""AWQ: scale up columns with large inputs before quantization.

A product does not change if columns of its weights are multiplied by s and its inputs divided by s:
:math:`W x = (W \, \mathrm{diag}(s)) (\mathrm{diag}(s)^{-1} x)`.  The rounding error of a scaled
column reaches the output divided by s, unless the column widens its block's range.

.. math:: s_k = \left(\sqrt{E[x_k^2]}\right)^\alpha, \qquad
          \alpha^* = \arg\min_\alpha \sum_n e_n M e_n^T, \quad
          e = Q(W \mathrm{diag}(s)) \mathrm{diag}(s)^{-1} - W

with the second moments M of the inputs, or their mean squares as its diagonal.  s is normalized so
that its least and largest are each other's inverses.

Source: J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", MLSys 2024, arXiv:2306.00978, equations 4 and 5.  Deviations: root mean squares
instead of mean magnitudes of the inputs (as in importance files); the loss uses second moments
instead of a batch of inputs, over evenly spaced rows of large matrices; no clipping (the quantizer
"search" chooses the range of each block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import dequantize
from nbflow_kernels.formats.registry import QuantFormat
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.quantizers.gptq import output_errors

N_STEPS = 20
"""Number of exponents tried: 0, 1 / 20, ..., 19 / 20, as published."""
SAMPLE = 1 << 19  # most weights of a matrix in the loss
# floor of a column's root mean square, relative to the largest: bounds the scale of unused columns
LEAST = 1e-4


@dataclass(frozen=True)
class ChannelScales:
    """Result of `search_scales`."""

    scales: NDArray[np.float64]
    """Factors of the columns (K,)."""
    exponent: float
    """The exponent chosen; 0 means all scales are 1."""
    losses: tuple[float, ...]
    """Loss of each exponent tried."""


def column_scales(squares: NDArray[Any], exponent: float) -> NDArray[np.float64]:
    """Return the factors of columns whose inputs have mean squares (K,).

    Examples
    --------
    >>> import numpy as np
    >>> column_scales(np.array([1.0, 4.0, 16.0]), 0.5).round(3)
    array([0.707, 1.   , 1.414])
    """
    sizes = np.sqrt(np.asarray(squares, np.float64))
    largest = sizes.max(initial=0.0)
    if largest == 0 or exponent == 0:
        return np.ones(len(sizes))
    sizes = np.maximum(sizes / largest, LEAST) ** exponent
    result: NDArray[np.float64] = sizes / np.sqrt(sizes.max() * sizes.min())
    return result


def search_scales(
    matrices: Sequence[tuple[NDArray[Any], QuantFormat]],
    statistics: NDArray[Any],
    shared: NDArray[np.intp] | None = None,
) -> ChannelScales:
    """Search the column scales of matrices that share their inputs.

    Parameters
    ----------
    matrices : sequence of (array, format)
        Weights (N, K) and target format of each matrix.
    statistics : array, shape (K,) or (K, K)
        Mean squares, or second moments, of the inputs.
    shared : array of int, shape (K,), optional
        Group of each column; a group shares the scale of its mean, as columns of query heads that
        read the same values must.

    Returns
    -------
    ChannelScales

    Raises
    ------
    UsageError
        If `statistics` has another shape or values that are not finite or negative.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import FORMATS
    >>> rng = np.random.default_rng(0)
    >>> w = rng.normal(size=(64, 128))
    >>> squares = np.exp(2 * rng.normal(size=128))  # a wide range of input sizes in each block
    >>> found = search_scales([(w, FORMATS["q3"])], squares)
    >>> bool(found.exponent > 0 and min(found.losses) < 0.95 * found.losses[0])
    True
    """
    K = matrices[0][0].shape[1]
    known = np.asarray(statistics, np.float64)
    if known.shape not in ((K,), (K, K)):
        raise UsageError(f"statistics must have shape ({K},) or ({K}, {K}), got {known.shape}")
    squares = known if known.ndim == 1 else known.diagonal()
    if not np.isfinite(known).all() or squares.min(initial=0.0) < 0:
        raise UsageError("mean squares of inputs must be finite and >= 0")
    if shared is not None:
        groups = np.bincount(shared, squares) / np.bincount(shared)
        squares = groups[shared]
    samples = [(_sample(w), format) for w, format in matrices]
    losses = []
    for step in range(N_STEPS):
        scales = column_scales(squares, step / N_STEPS)
        losses.append(sum(_loss(w, format, scales, known) for w, format in samples))
    best = int(np.argmin(losses))
    return ChannelScales(column_scales(squares, best / N_STEPS), best / N_STEPS, tuple(losses))


def _sample(w: NDArray[Any]) -> NDArray[np.float64]:
    """Return evenly spaced rows: at most `SAMPLE` weights, at least one row."""
    return w[:: max(1, -(-w.size // SAMPLE))].astype(np.float64)


def _loss(
    w: NDArray[np.float64],
    format: QuantFormat,
    scales: NDArray[np.float64],
    statistics: NDArray[np.float64],
) -> float:
    """Return the squared output error of weights (N, K) quantized with scaled columns."""
    diagonal = statistics if statistics.ndim == 1 else statistics.diagonal()
    importance = (diagonal / scales**2).astype(np.float32)
    largest = importance.max(initial=0.0)
    importance = importance / largest if largest > 0 else np.ones_like(importance)
    rounded = dequantize(quantize(w * scales, format, importance=importance))
    return float(output_errors(rounded / scales - w, statistics).sum())
