r"""Error of a weight format on one tensor: sums in float64, rows read in chunks.

W is the tensor (rows, columns), Q its dequantized value, E = Q - W.
docs/analysis.md has the formula of each number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow_experiments.analysis.code_entropy import CodeUse, code_use
from nbflow_experiments.analysis.histograms import (
    RELATIVE_EDGES,
    Counts,
    Float64Array,
    Spread,
    Weights,
    relative_counts,
    row_chunks,
)
from nbflow_experiments.analysis.ratios import ratio, relative_error
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError

FLOAT_BLOCK = 32
"""Block size of element-wise formats."""


@dataclass(frozen=True)
class TensorError:
    """Error statistics of one tensor in one format."""

    n_rows: int
    n_columns: int
    stored_bytes: int
    """Bytes of the format, with scales, padding of incomplete blocks, and outliers."""
    weights: Weights
    mse: float
    """Mean of E ** 2."""
    max_abs_error: float
    mean_error: float
    """Mean of E: the bias."""
    cosine: float
    """Cosine of W and Q as vectors; NaN if one is 0."""
    crest: float
    """Mean over blocks of the largest magnitude over the block's root mean square."""
    codes: CodeUse | None
    """None where the format has no codes."""
    rows: Spread
    columns: Spread
    blocks: Spread
    error_counts: Counts
    """Histogram of \\|E\\| over the weights' root mean square, between `RELATIVE_EDGES`."""

    @property
    def n_weights(self) -> int:
        """Return the number of weights."""
        return self.n_rows * self.n_columns

    @property
    def relative_error(self) -> float:
        """Return the relative Frobenius error, ||E|| / ||W||; 0 / 0 is 0."""
        return relative_error(self.mse, self.weights.rms**2)

    @property
    def sqnr_db(self) -> float:
        """Return the signal to quantization noise ratio, 20 log10(||W|| / ||E||)."""
        error = self.relative_error
        return math.inf if error == 0 else -20 * math.log10(error)

    @property
    def stored_bits(self) -> float:
        """Return the stored bits per weight, all overhead included."""
        return 8 * self.stored_bytes / self.n_weights

    @property
    def entropy_coded_bits(self) -> float:
        """Return the bits per weight with entropy-coded codes and unchanged scales."""
        if self.codes is None:
            return math.nan
        return self.stored_bits - self.codes.stored_bits + self.codes.entropy_bits

    @property
    def gaussian_bits(self) -> float:
        """Return the rate R(D) of a Gaussian source of this variance at this error."""
        return self._rate(math.log2(self.weights.std) if self.weights.std else -math.inf)

    @property
    def shannon_bits(self) -> float:
        """Return Shannon's lower bound of the rate at this error, for i.i.d. weights."""
        return self._rate(self.weights.density_bits - 0.5 * math.log2(2 * math.pi * math.e))

    def _rate(self, spread_bits: float) -> float:
        """Return the rate from an entropy in bits and the error, at least 0."""
        if self.mse == 0:
            return math.inf
        return max(0.0, spread_bits - 0.5 * math.log2(self.mse))


def tensor_error(
    exact: NDArray[np.float32],
    quantized: QuantTensor,
    weights: Weights | None = None,
    decode: Callable[[QuantTensor], NDArray[Any]] = nk.dequantize,
) -> TensorError:
    """Compare a tensor with its quantized form.

    Parameters
    ----------
    exact : array of float32, shape (N, K)
        The weights, finite.
    quantized : QuantTensor, shape (N, K)
        The quantized weights.
    weights : Weights, optional
        ``Weights.of(exact)``, if already computed.
    decode : callable
        Dequantizes rows, e.g. on a device.

    Raises
    ------
    UsageError
        If the shapes differ, or the tensor is empty.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> w = np.random.default_rng(0).normal(0, 0.02, (64, 256)).astype(np.float32)
    >>> found = tensor_error(w, nk.quantize(w, "q4"))
    >>> round(found.sqnr_db, 1), found.stored_bits, round(found.codes.entropy_bits, 2)
    (23.2, 5.0, 3.88)
    """
    if exact.ndim != 2 or exact.shape != tuple(quantized.shape) or not exact.size:
        raise UsageError(
            f"a tensor of shape {exact.shape} cannot be compared with {quantized!r}: both must "
            "have the same shape (N, K), at least one weight"
        )
    weights = weights or Weights.of(exact)
    block = quantized.format.block_size if quantized.format.block_size > 1 else FLOAT_BLOCK
    sums = _Sums(exact.shape[1], block, weights.rms)
    for start, stop in row_chunks(exact):
        decoded = np.asarray(decode(quantized.rows(start, stop)), np.float64)
        sums.add(exact[start:stop].astype(np.float64), decoded)
    norms = weights.rms * math.sqrt(exact.size) * math.sqrt(sums.decoded)
    return TensorError(
        n_rows=exact.shape[0],
        n_columns=exact.shape[1],
        stored_bytes=int(quantized.nbytes),
        weights=weights,
        mse=sums.error / exact.size,
        max_abs_error=sums.largest,
        mean_error=sums.bias / exact.size,
        cosine=ratio(sums.product, norms),
        crest=sums.crest / sums.n_blocks,
        codes=code_use(quantized),
        rows=Spread.of(np.concatenate(sums.rows)),
        columns=Spread.of(_ratios(sums.column_error, sums.column_norm)),
        blocks=Spread.of(np.concatenate(sums.blocks)),
        error_counts=sums.counts,
    )


class _Sums:
    """Sums over chunks of rows."""

    def __init__(self, n_columns: int, block: int, rms: float) -> None:
        self._block, self._rms = block, rms
        self.error = self.bias = self.product = self.decoded = self.largest = self.crest = 0.0
        self.n_blocks = 0
        self.column_error, self.column_norm = np.zeros(n_columns), np.zeros(n_columns)
        self.rows: list[Float64Array] = []
        self.blocks: list[Float64Array] = []
        self.counts = np.zeros(len(RELATIVE_EDGES) - 1, np.int64)

    def add(self, exact: Float64Array, decoded: Float64Array) -> None:
        """Add rows."""
        error = decoded - exact
        squares, norms = np.square(error), np.square(exact)
        self.error += float(squares.sum())
        self.bias += float(error.sum())
        self.product += float(np.sum(exact * decoded))
        self.decoded += float(np.square(decoded).sum())
        self.largest = max(self.largest, float(np.abs(error).max()))
        if self._rms:
            self.counts += relative_counts(np.abs(error) / self._rms)
        self.column_error += squares.sum(axis=0)
        self.column_norm += norms.sum(axis=0)
        self.rows.append(_ratios(squares.sum(axis=1), norms.sum(axis=1)))
        self._add_blocks(exact, squares, norms)

    def _add_blocks(self, exact: Float64Array, squares: Float64Array, norms: Float64Array) -> None:
        """Add block statistics; the last block of a row may be shorter."""
        starts = np.arange(0, exact.shape[1], self._block)
        lost, norm = (np.add.reduceat(a, starts, axis=1) for a in (squares, norms))
        self.blocks.append(_ratios(lost, norm).ravel())
        sizes = np.minimum(self._block, exact.shape[1] - starts)
        peaks, rms = np.maximum.reduceat(np.abs(exact), starts, axis=1), np.sqrt(norm / sizes)
        self.crest += float(np.divide(peaks, rms, out=np.ones_like(peaks), where=rms > 0).sum())
        self.n_blocks += peaks.size


def _ratios(error: Float64Array, norm: Float64Array) -> Float64Array:
    """Return sqrt(error / norm) of each group; 0 / 0 is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Float64Array = np.where(error == 0, 0.0, np.sqrt(error / norm))
    return result
