"""Quantizers choose the bytes of a format: published code, searches, GPTQ and HQQ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nbflow_kernels.arrays import check_array, is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.csr import CsrMatrix
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.registry import FORMATS, Bytes, Floats, QuantFormat
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.quantizers.affine_grid import check_affine
from nbflow_kernels.quantizers.block_range import finite_float32
from nbflow_kernels.quantizers.gptq import Hessian, gptq_rows, output_errors
from nbflow_kernels.quantizers.hqq import hqq_rows
from nbflow_kernels.quantizers.importance import (
    DAMPING,
    checked_importance,
    checked_statistics,
    column_importance,
    mean_squares,
)
from nbflow_kernels.quantizers.outliers import (
    check_ratio,
    delta_rows,
    quantize_with_outliers,
    sample_rows,
    soft_range,
)
from nbflow_kernels.quantizers.registry import default_quantizer, quantize_rows

__all__ = [
    "AUTO",
    "DAMPING",
    "FORMAT_QUANTIZER_NAMES",
    "QUANTIZER_NAMES",
    "default_quantizer",
    "quantize",
    "quantize_calibrated",
]

AUTO = "auto"
"""The quantizer `default_quantizer` of a format."""
FORMAT_QUANTIZER_NAMES = (AUTO, "search", "unbiased", "reference")
QUANTIZER_NAMES = (*FORMAT_QUANTIZER_NAMES, "gptq", "hqq", "outliers")
CHUNK = 1 << 22  # weights per pass: bounds the float64 arrays to about 150 MB


def quantize(
    x: ArrayLike,
    format: str | QuantFormat,
    *,
    quantizer: str = "search",
    importance: ArrayLike | None = None,
    outliers: float = 0.0,
    outlier_range: tuple[float, float] | None = None,
) -> QuantTensor:
    """Quantize weights.

    Parameters
    ----------
    x : array of float32, float16 or float64, shape (..., K)
        The weights; blocks lie along the last axis.  float64 is rounded to float32 first.  On a
        CUDA device they must be float32 and finite, which is not checked, and only "reference" of
        some formats exists (`docs/ops.md`).
    format : str or QuantFormat
        A format, or its name in `FORMATS`.
    quantizer : {"search", "unbiased", "reference", "auto"}
        "reference" is the published quantizer, bit for bit.  "search" searches for the parameters
        of each block with the least error, at most that of "reference"; the decoder is the same.
        "unbiased" multiplies the scales of "search" so that <Q(x), x> = <x, x> in each block
        (`nbflow_kernels.quantizers.gain`): less divergence of a model at 3 bits and below; formats
        without float16 scales keep "search".  "auto" is "unbiased" at 3 bits and below, otherwise
        "search": the default of models.  Float formats round to nearest with all.
    importance : array of float32, float16 or float64, shape (K,) or that of `x`, optional
        Weights of the squared errors per column or per weight, finite, >= 0: usually the mean
        squares of the activations multiplied with each column (an "importance matrix").  "search"
        minimizes the weighted error, "unbiased" weighs both products.  "reference" is GGML's
        quantizer with importance, which also favours larger weights; for ``q8_0`` it ignores
        importance.  Float formats ignore it.
    outliers : float
        Share of the weights, 0..0.05, stored exactly because they widen the range of their block:
        Inferflow's ``delta_tensor_ratio`` (`nbflow_kernels.quantizers.outliers` has the rule).
        Half of them come from each end of the tensor's values; the rule for single blocks adds
        some (0.8 % of Gaussian weights in blocks of 32), and outliers without gain are dropped.
        Each costs 8 bytes.  No block's error increases.
    outlier_range : tuple of float, optional
        The range beyond which weights are outliers; by default computed from at most 2**20 weights
        of `x` in evenly spaced rows.  Only with `outliers`.

    Returns
    -------
    QuantTensor
        The weights in the format.  The result does not depend on the number of threads.

    Raises
    ------
    TypeError
        If `x` is not an array of one of the three types.
    UsageError
        If a value is NaN or infinite or does not fit a float format, the format or quantizer is
        unknown, `importance` has another shape or values that are negative or not finite or is
        given for "reference" of an Inferflow format, or `outliers` is not in 0..0.05 (floats: 0).

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    >>> best = nk.dequantize(nk.quantize(x, "q4"))
    >>> plain = nk.dequantize(nk.quantize(x, "q4", quantizer="reference"))
    >>> bool(np.square(best - x).mean() < np.square(plain - x).mean())
    True
    >>> weight = np.where(np.arange(256) < 16, 100, 1)  # the first columns are important
    >>> weighted = nk.dequantize(nk.quantize(x, "q4", importance=weight.astype(np.float32)))
    >>> bool(np.square(weighted - x)[:, :16].mean() < np.square(best - x)[:, :16].mean())
    True
    """
    chosen = format if isinstance(format, QuantFormat) else FORMATS[format]
    if quantizer not in FORMAT_QUANTIZER_NAMES:
        raise unknown_name("quantizer", quantizer, FORMAT_QUANTIZER_NAMES)
    if quantizer == AUTO:
        quantizer = default_quantizer(chosen)
    if is_cuda(x):
        return _quantize_cuda(x, chosen, quantizer, importance, outliers)
    array = _checked_array(x)
    n_columns = array.shape[-1]
    rows = _padded_rows(array, chosen)
    weight = None
    if importance is not None:
        weight = checked_importance(importance, array.shape)
        weight = np.pad(weight, ((0, 0), (0, rows.shape[1] - n_columns)))
    ratio = check_ratio(outliers)
    if ratio == 0.0:
        return QuantTensor(
            chosen, array.shape, quantize_rows(chosen, rows, n_columns, quantizer, weight)
        )
    if isinstance(chosen, FloatFormat):
        raise UsageError(f"outliers are for block formats; {chosen.name} stores each weight alone")
    if outlier_range is None:
        some = rows[sample_rows(len(rows), n_columns), :n_columns]
        outlier_range = soft_range(some, ratio)
    data, sparse = quantize_with_outliers(chosen, rows, n_columns, quantizer, weight, outlier_range)
    return QuantTensor(chosen, array.shape, data, sparse if sparse.nnz else None)


def _checked_array(x: ArrayLike) -> NDArray[Any]:
    """Return weights as an array, or raise unless they are floats of at least one column."""
    array = np.asarray(x)
    if array.dtype.type not in (np.float32, np.float16, np.float64):
        raise TypeError(f"x must have dtype float32, float16 or float64, got {array.dtype.name}")
    if array.ndim < 1 or array.shape[-1] < 1:
        raise UsageError(f"x must have a last axis of at least one weight, got shape {array.shape}")
    return array


def _padded_rows(array: NDArray[Any], format: QuantFormat) -> Floats:
    """Return weights as float32 rows; copies of its last weight pad a row to whole blocks."""
    n_columns = array.shape[-1]
    rows = finite_float32(array).reshape(-1, n_columns)
    pad = format.row_blocks(n_columns) * format.block_size - n_columns
    if pad:
        rows = np.pad(rows, ((0, 0), (0, pad)), mode="edge")
    return np.ascontiguousarray(rows)


def _quantize_cuda(
    x: Any, format: QuantFormat, quantizer: str, importance: Any, outliers: float
) -> QuantTensor:
    """Quantize on a CUDA device."""
    from nbflow_kernels.cuda import numba_cuda

    numba_cuda.module()  # a clear error if it lacks libraries
    from nbflow_kernels.quantizers import cuda

    if importance is not None or outliers:
        raise UsageError(
            "importance and outliers need weights in host memory; quantize there and take "
            "to_device()"
        )
    check_array("x", x, (None,) * max(1, x.ndim))
    if x.shape[-1] < 1:
        raise UsageError(f"x must have a last axis of at least one weight, got shape {x.shape}")
    data = cuda.quantize(x.reshape(-1, x.shape[-1]), format, quantizer)
    return QuantTensor(format, tuple(x.shape), data)


def quantize_calibrated(
    x: ArrayLike,
    format: str | QuantFormat,
    quantizer: str,
    statistics: ArrayLike | Hessian | None = None,
    *,
    act_order: bool = False,
    damping: float = DAMPING,
    outliers: float = 0.0,
) -> QuantTensor:
    """Quantize a matrix with any quantizer.

    Parameters
    ----------
    x : array of float, shape (..., K)
        The weights.
    format : str or QuantFormat
        The format, or its name.  GPTQ and HQQ take formats with equidistant codes: those of
        Inferflow, q4_0, q4_1, q5_0, q5_1, q8_0 and the K-quants.
    quantizer : {"auto", "search", "unbiased", "reference", "gptq", "hqq", "outliers"}
        See `nbflow_kernels.quantize` for the first four, and `nbflow_kernels.quantizers.gptq`,
        `quantizers.hqq` and `quantizers.outliers` for the others.
    statistics : array, shape (K,) or (K, K), or Hessian, optional
        Mean squares of the inputs, or second moments, which GPTQ requires.  "search",
        "reference" and "outliers" take the mean squares as importance.  With statistics, HQQ keeps
        a row of "reference" where its output error is smaller.
    act_order : bool
        Let GPTQ process the columns with the largest inputs first.
    damping : float
        Added to the diagonal of second moments by GPTQ, relative to the mean of the diagonal, 0..1.
        A `Hessian` has its own damping.
    outliers : float
        Largest share of each row's weights, 0..0.05, that "outliers" stores exactly; > 0 for
        "outliers", 0 for the others (`nbflow_kernels.quantize` has another rule).

    Returns
    -------
    QuantTensor
        The matrix in the format.  With `statistics`, no row's output error is larger than that of
        "reference" (GPTQ: nor of "search" with importance), up to float32 rounding.

    Raises
    ------
    TypeError
        If `x` is not an array of floats.
    UsageError
        If the quantizer is unknown or does not support the format, GPTQ lacks second moments,
        statistics have another shape or values that are negative or not finite, or the quantizer
        does not take `outliers`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> w = rng.normal(size=(32, 64))
    >>> x = rng.normal(size=(500, 8)) @ rng.normal(size=(8, 64)) + rng.normal(size=(500, 64))
    >>> from nbflow_kernels import dequantize
    >>> def loss(quantizer):
    ...     qt = quantize_calibrated(w, "q3", quantizer, x.T @ x)
    ...     return np.square(x @ (dequantize(qt) - w).T).sum()
    >>> bool(loss("gptq") < 0.8 * loss("search"))
    True
    """
    chosen = format if isinstance(format, QuantFormat) else FORMATS[format]
    if quantizer not in QUANTIZER_NAMES:
        raise unknown_name("quantizer", quantizer, QUANTIZER_NAMES)
    array = _checked_array(x)
    K = array.shape[-1]
    found = checked_statistics(statistics, K, damping)
    _check_outliers(chosen, quantizer, outliers)
    if quantizer in FORMAT_QUANTIZER_NAMES:
        squares = mean_squares(found)
        importance = None if squares is None else squares.astype(np.float32)
        return quantize(array, chosen, quantizer=quantizer, importance=importance)
    if quantizer != "outliers":
        check_affine(chosen, quantizer)
    if quantizer == "gptq" and not isinstance(found, Hessian):
        raise UsageError(
            f"quantizer 'gptq' needs second moments of the inputs, shape ({K}, {K}); "
            "nbflow imatrix --full collects them"
        )
    rows = _padded_rows(array, chosen)
    n_bytes = chosen.row_blocks(K) * chosen.block_bytes
    data = np.empty((len(rows), n_bytes), np.uint8)
    step = max(1, CHUNK // rows.shape[1])
    sparse: list[CsrMatrix] = []
    for row in range(0, len(rows), step):
        part = rows[row : row + step]
        if quantizer == "outliers":
            importance = column_importance(found, rows.shape[1], K)
            data[row : row + step], some = delta_rows(
                chosen, part, K, importance, int(outliers * K)
            )
            sparse.append(some)
        else:
            data[row : row + step] = _quantize_chunk(chosen, part, quantizer, found, K, act_order)
    kept = CsrMatrix.concatenate(sparse) if sparse else None
    return QuantTensor(chosen, array.shape, data, kept if kept is not None and kept.nnz else None)


def _check_outliers(format: QuantFormat, quantizer: str, ratio: float) -> None:
    """Raise unless the quantizer and the format take this share of outliers."""
    check_ratio(ratio)
    if quantizer != "outliers" and ratio:
        raise UsageError(
            f"outliers={ratio:g} goes with quantizer 'outliers', or with nbflow_kernels.quantize, "
            f"got quantizer {quantizer!r}"
        )
    if quantizer == "outliers" and (not ratio or isinstance(format, FloatFormat)):
        raise UsageError(
            "quantizer 'outliers' needs a block format and outliers, a share of the weights in "
            f"0..0.05, got {format.name} and {ratio:g}"
        )


def _quantize_chunk(
    format: QuantFormat, rows: Floats, quantizer: str, statistics: Any, K: int, act_order: bool
) -> Bytes:
    """Quantize with GPTQ or HQQ; rows keep a simpler quantizer where its error is smaller."""
    plain = quantize_rows(format, rows, K, "reference")
    squares = mean_squares(statistics)
    if quantizer == "hqq":
        data = hqq_rows(format, rows, K)
        return data if squares is None else _best_rows(format, rows, K, [data, plain], statistics)
    data = gptq_rows(format, rows, K, statistics, act_order)
    importance = column_importance(statistics, rows.shape[1], K)
    best = quantize_rows(format, rows, K, "search", importance)
    return _best_rows(format, rows, K, [data, best, plain], statistics)


def _best_rows(
    format: QuantFormat, rows: Floats, K: int, candidates: list[Bytes], statistics: Any
) -> Bytes:
    """Return the candidate with the least output error of each row."""
    array = statistics.matrix if isinstance(statistics, Hessian) else statistics
    losses = []
    for data in candidates:
        decoded = np.empty((len(rows), K), np.float32)
        format.dequantize_rows(data, decoded)
        losses.append(output_errors(decoded.astype(np.float64) - rows[:, :K], array))
    chosen = np.argmin(losses, axis=0)
    result: Bytes = np.stack(candidates)[chosen, np.arange(len(rows))]
    return result
