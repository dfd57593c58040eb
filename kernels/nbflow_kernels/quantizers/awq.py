r"""AWQ: scale up the columns whose inputs are large, before they are rounded.

A product stays the same if columns of its weights are multiplied by s and its inputs divided by s:
:math:`W x = (W \, \mathrm{diag}(s)) (\mathrm{diag}(s)^{-1} x)`.  The rounding error of a scaled
column reaches the output divided by s, as long as the column does not stretch its block's range.

.. math:: s_k = \left(\sqrt{E[x_k^2]}\right)^\alpha, \qquad
          \alpha^* = \arg\min_\alpha \sum_n e_n M e_n^T, \quad
          e = Q(W \mathrm{diag}(s)) \mathrm{diag}(s)^{-1} - W

with the second moments M of the inputs, or their mean squares as its diagonal.  s is normalized so
that its least and largest are each other's inverses.

Source: J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration", MLSys 2024, arXiv:2306.00978, equations 4 and 5.  Deviations: root mean squares
instead of mean magnitudes of the inputs (what importance files hold); the loss is taken on second
moments instead of on a batch of inputs, over rows evenly spaced where there are many; no clipping
(the encoder "best" chooses the range of each block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.registry import QuantFormat
from nbflow_kernels.quantizers.gptq import output_errors

N_STEPS = 20
"""The exponents that are tried: 0, 1 / 20, ..., 19 / 20, as published."""
SAMPLE = 1 << 19  # weights of each matrix that the loss is taken over, at most
LEAST = (
    1e-4  # of the largest root mean square: a column that is never used is not scaled without end
)


@dataclass(frozen=True)
class Scales:
    """What a search found."""

    scales: NDArray[np.float64]
    """Factors of the columns (K,)."""
    exponent: float
    """The exponent that they were made with; 0 leaves everything as it is."""
    losses: tuple[float, ...]
    """Loss with each exponent that was tried."""


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
) -> Scales:
    """Find the scales of the columns of matrices that are multiplied with the same inputs.

    Parameters
    ----------
    matrices : sequence of (array, format)
        Weights (N, K) each, and the format each will be put into.
    statistics : array, shape (K,) or (K, K)
        Mean squares, or second moments, of the inputs.
    shared : array of int, shape (K,), optional
        Columns with the same number get the same scale, made of their mean; as columns of heads
        that read the same values must.

    Returns
    -------
    Scales

    Raises
    ------
    UsageError
        If the statistics are of another shape, not finite or negative.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> w = rng.normal(size=(64, 128))
    >>> squares = np.exp(2 * rng.normal(size=128))  # inputs of all sizes in each block
    >>> found = search_scales([(w, nk.FORMATS["q3"])], squares)
    >>> bool(found.exponent > 0 and min(found.losses) < 0.95 * found.losses[0])
    True
    """
    K = matrices[0][0].shape[1]
    known = np.asarray(statistics, np.float64)
    if known.shape not in ((K,), (K, K)):
        raise UsageError(f"statistics must have shape ({K},) or ({K}, {K}), got {known.shape}")
    squares = known if known.ndim == 1 else known.diagonal()
    if not np.isfinite(known).all() or squares.min(initial=0.0) < 0:
        raise UsageError("mean squares of inputs must be finite and not negative")
    if shared is not None:
        groups = np.bincount(shared, squares) / np.bincount(shared)
        squares = groups[shared]
    samples = [(_sample(w), format) for w, format in matrices]
    losses = []
    for step in range(N_STEPS):
        scales = column_scales(squares, step / N_STEPS)
        losses.append(sum(_loss(w, format, scales, known) for w, format in samples))
    best = int(np.argmin(losses))
    return Scales(column_scales(squares, best / N_STEPS), best / N_STEPS, tuple(losses))


def _sample(w: NDArray[Any]) -> NDArray[np.float64]:
    """Return rows evenly spaced: `SAMPLE` weights at most, but one row."""
    return w[:: max(1, -(-w.size // SAMPLE))].astype(np.float64)


def _loss(
    w: NDArray[np.float64],
    format: QuantFormat,
    scales: NDArray[np.float64],
    statistics: NDArray[np.float64],
) -> float:
    """Return the squared output error of weights (N, K) that are rounded with scaled columns."""
    diagonal = statistics if statistics.ndim == 1 else statistics.diagonal()
    importance = (diagonal / scales**2).astype(np.float32)
    largest = importance.max(initial=0.0)
    importance = importance / largest if largest > 0 else np.ones_like(importance)
    rounded = nk.dequantize(nk.quantize(w * scales, format, importance=importance))
    return float(output_errors(rounded / scales - w, statistics).sum())
