"""Quantizers: choose the bytes of a format, from the published code to GPTQ and HQQ."""

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
from nbflow_kernels.quantizers.gptq import SecondMoments, gptq_rows, output_errors
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
from nbflow_kernels.quantizers.registry import quantize_rows

__all__ = [
    "DAMPING",
    "ENCODERS",
    "FORMAT_ENCODERS",
    "quantize",
    "quantize_calibrated",
]

FORMAT_ENCODERS = ("best", "plain")
ENCODERS = ("best", "plain", "gptq", "hqq", "outliers")
CHUNK = 1 << 22  # weights encoded at once: bounds the float64 arrays to some 150 MB


def quantize(
    x: ArrayLike,
    format: str | QuantFormat,
    *,
    encoder: str = "best",
    importance: ArrayLike | None = None,
    outliers: float = 0.0,
    outlier_range: tuple[float, float] | None = None,
) -> QuantTensor:
    """Store weights in a format.

    Parameters
    ----------
    x : array of float32, float16 or float64, shape (..., K)
        The weights; the last axis is cut into blocks.  float64 is rounded to float32 first.
        On a CUDA device they are float32 and finite, which is not checked there, and only the
        encoder "plain" of some formats exists (`docs/ops.md`).
    format : str or QuantFormat
        A format, or its name in `FORMATS`.
    encoder : {"best", "plain"}
        "plain" is the published encoder, bit for bit.  "best" searches for the base and scale of
        each block that lose least; the same decoder reads both, and no block's error is larger.
        For the float formats there is no difference: they round to the nearest.
    importance : array of float32, float16 or float64, shape (K,) or that of `x`, optional
        How much the squared error of each column, or of each weight, counts: finite, >= 0.  The
        usual choice is the mean square of the activations that a column is multiplied with (an
        "importance matrix").  "best" minimizes the weighted error.  "plain" is GGML's encoder for
        importances, which weighs larger weights up as well; for ``q8_0`` that is the encoder
        without.  Rounding to a float format is the best for any importance.
    outliers : float
        Share of the weights, 0..0.05, that are kept aside exactly because they stretch the range
        of their block: Inferflow's ``delta_tensor_ratio`` (`nbflow_kernels.quantizers.outliers` has
        the rule).  Half of them is taken at each end of the tensor's values; the rule for single
        blocks adds some (of Gaussian weights in blocks of 32, 0.8 % of all), and those stay that
        would gain nothing.  Each costs 8 bytes.  No block's error becomes larger.
    outlier_range : tuple of float, optional
        The values beyond which weights are outliers; by default found in `x`, of which at most
        2**20 weights in rows evenly spaced are looked at.  With `outliers` only.

    Returns
    -------
    QuantTensor
        The weights in the format.  The result does not depend on the number of threads.

    Raises
    ------
    TypeError
        If `x` is not an array of one of the three types.
    UsageError
        If a value is NaN or infinite, the format or encoder is unknown, a value does not fit a
        float format, `importance` has another shape or a value that is negative or not finite, or
        "plain" is asked to use importances for a format of Inferflow, whose encoders know none.
        If `outliers` is not in 0..0.05, or is not 0 for a float format.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    >>> best, plain = (nk.dequantize(nk.quantize(x, "q4", encoder=e)) for e in ("best", "plain"))
    >>> bool(np.square(best - x).mean() < np.square(plain - x).mean())
    True
    >>> weight = np.where(np.arange(256) < 16, 100, 1)  # the first columns matter most
    >>> weighted = nk.dequantize(nk.quantize(x, "q4", importance=weight.astype(np.float32)))
    >>> bool(np.square(weighted - x)[:, :16].mean() < np.square(best - x)[:, :16].mean())
    True
    """
    chosen = format if isinstance(format, QuantFormat) else FORMATS[format]
    if encoder not in FORMAT_ENCODERS:
        raise unknown_name("encoder", encoder, FORMAT_ENCODERS)
    if is_cuda(x):
        return _quantize_there(x, chosen, encoder, importance, outliers)
    array = np.asarray(x)
    if array.dtype.type not in (np.float32, np.float16, np.float64):
        raise TypeError(f"x must have dtype float32, float16 or float64, got {array.dtype.name}")
    if array.ndim < 1 or array.shape[-1] < 1:
        raise UsageError(f"x must have a last axis of at least one weight, got shape {array.shape}")
    values = finite_float32(array)
    n_columns = array.shape[-1]
    rows = values.reshape(-1, n_columns)
    pad = chosen.row_blocks(n_columns) * chosen.block_size - n_columns
    if pad:
        rows = np.pad(rows, ((0, 0), (0, pad)), mode="edge")
    weight = None if importance is None else checked_importance(importance, array.shape)
    if weight is not None and pad:
        weight = np.pad(weight, ((0, 0), (0, pad)))
    rows = np.ascontiguousarray(rows)
    ratio = check_ratio(outliers)
    if ratio == 0.0:
        return QuantTensor(
            chosen, array.shape, quantize_rows(chosen, rows, n_columns, encoder, weight)
        )
    if isinstance(chosen, FloatFormat):
        raise UsageError(f"outliers are for block formats; {chosen.name} stores each weight alone")
    if outlier_range is None:
        some = rows[sample_rows(len(rows), n_columns), :n_columns]
        outlier_range = soft_range(some, ratio)
    data, sparse = quantize_with_outliers(chosen, rows, n_columns, encoder, weight, outlier_range)
    return QuantTensor(chosen, array.shape, data, sparse if sparse.nnz else None)


def _quantize_there(
    x: Any, format: QuantFormat, encoder: str, importance: Any, outliers: float
) -> QuantTensor:
    """Do `quantize` on a CUDA device."""
    from nbflow_kernels.quantizers.cuda import encode

    if importance is not None or outliers:
        raise UsageError(
            "importance and outliers are searched for in host memory; quantize there and take "
            "to_device()"
        )
    check_array("x", x, (None,) * max(1, x.ndim))
    if x.shape[-1] < 1:
        raise UsageError(f"x must have a last axis of at least one weight, got shape {x.shape}")
    data = encode(x.reshape(-1, x.shape[-1]), format, encoder)
    return QuantTensor(format, tuple(x.shape), data)


def finite_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return the array as float32, or raise naming the first value that is not finite."""
    with np.errstate(over="ignore"):
        values = np.asarray(array, dtype=np.float32)
    finite = np.isfinite(values)
    if finite.all():
        return values
    where = tuple(int(i) for i in np.argwhere(~finite)[0])
    raise UsageError(
        f"x must be finite in float32, got {array[where]} at {list(where)} "
        f"({finite.size - int(finite.sum())} such values); repair the checkpoint"
    )


def quantize_calibrated(
    x: ArrayLike,
    format: str | QuantFormat,
    encoder: str,
    statistics: ArrayLike | SecondMoments | None = None,
    *,
    act_order: bool = False,
    damping: float = DAMPING,
    outliers: float = 0.0,
) -> QuantTensor:
    """Put a matrix into a format with any encoder.

    Parameters
    ----------
    x : array of float, shape (..., K)
        The weights.
    format : str or QuantFormat
        The format, or its name.  GPTQ and HQQ know those with codes at equal distances: the
        formats of Inferflow, q4_0, q4_1, q5_0, q5_1 where they are linear, and the K-quants.
    encoder : {"best", "plain", "gptq", "hqq", "outliers"}
        For the first two see `nbflow_kernels.quantize`; `nbflow_kernels.quantizers.gptq`,
        `quantizers.hqq` and `quantizers.outliers` describe the others.
    statistics : array, shape (K,) or (K, K), or SecondMoments, optional
        Mean squares of the inputs, or second moments; GPTQ needs the latter.  "best", "plain" and
        "outliers" take the mean squares as importances.  With them HQQ keeps a row of "plain" whose
        output error is less than its own.
    act_order : bool
        Whether GPTQ takes the columns with the largest inputs first.
    damping : float
        What GPTQ adds to the diagonal of second moments, in units of its mean, 0..1; those that
        are given as `SecondMoments` have a damping of their own.
    outliers : float
        Share of each row's weights, 0..0.05, that "outliers" keeps exactly, at most; it must not be
        0 there, and must be elsewhere (`nbflow_kernels.quantize` has another rule for them).

    Returns
    -------
    QuantTensor
        What the format's decoder reads.  With `statistics`, no row's output error on them is
        larger than that of "plain" (GPTQ: nor of "best" with importances), float32 rounding aside.

    Raises
    ------
    TypeError
        If `x` is not an array of floats.
    UsageError
        If the encoder is unknown or does not know the format, GPTQ has no second moments,
        statistics have another shape, are not finite or negative, or `outliers` do not go with the
        encoder.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> w = rng.normal(size=(32, 64))
    >>> x = rng.normal(size=(500, 8)) @ rng.normal(size=(8, 64)) + rng.normal(size=(500, 64))
    >>> from nbflow_kernels import dequantize
    >>> def loss(encoder):
    ...     qt = quantize_calibrated(w, "q3", encoder, x.T @ x)
    ...     return np.square(x @ (dequantize(qt) - w).T).sum()
    >>> bool(loss("gptq") < 0.8 * loss("best"))
    True
    """
    chosen = format if isinstance(format, QuantFormat) else FORMATS[format]
    if encoder not in ENCODERS:
        raise unknown_name("encoder", encoder, ENCODERS)
    array = np.asarray(x)
    if array.dtype.type not in (np.float32, np.float16, np.float64):
        raise TypeError(f"x must have dtype float32, float16 or float64, got {array.dtype.name}")
    if array.ndim < 1 or array.shape[-1] < 1:
        raise UsageError(f"x must have a last axis of at least one weight, got shape {array.shape}")
    K = array.shape[-1]
    found = checked_statistics(statistics, K, damping)
    _check_outliers(chosen, encoder, outliers)
    if encoder in ("best", "plain"):
        squares = mean_squares(found)
        importance = None if squares is None else squares.astype(np.float32)
        return quantize(array, chosen, encoder=encoder, importance=importance)
    if encoder != "outliers":
        check_affine(chosen, encoder)
    if encoder == "gptq" and not isinstance(found, SecondMoments):
        raise UsageError(
            f"encoder 'gptq' needs second moments of the inputs, shape ({K}, {K}); "
            "nbflow imatrix --full collects them"
        )
    rows = finite_float32(array).reshape(-1, K)
    pad = chosen.row_blocks(K) * chosen.block_size - K
    rows = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, pad)), mode="edge"))
    n_bytes = chosen.row_blocks(K) * chosen.block_bytes
    data = np.empty((len(rows), n_bytes), np.uint8)
    step = max(1, CHUNK // rows.shape[1])
    sparse: list[CsrMatrix] = []
    for row in range(0, len(rows), step):
        part = rows[row : row + step]
        if encoder == "outliers":
            importance = column_importance(found, rows.shape[1], K)
            data[row : row + step], some = delta_rows(
                chosen, part, K, importance, int(outliers * K)
            )
            sparse.append(some)
        else:
            data[row : row + step] = _encoded(chosen, part, encoder, found, K, act_order)
    kept = CsrMatrix.concatenate(sparse) if sparse else None
    return QuantTensor(chosen, array.shape, data, kept if kept is not None and kept.nnz else None)


def _check_outliers(format: QuantFormat, encoder: str, ratio: float) -> None:
    """Raise unless a share of outliers goes with the encoder and the format."""
    check_ratio(ratio)
    if encoder != "outliers" and ratio:
        raise UsageError(
            f"outliers={ratio:g} goes with encoder 'outliers', or with nbflow_kernels.quantize, "
            f"got encoder {encoder!r}"
        )
    if encoder == "outliers" and (not ratio or isinstance(format, FloatFormat)):
        raise UsageError(
            "encoder 'outliers' needs a block format and outliers, a share of the weights in "
            f"0..0.05, got {format.name} and {ratio:g}"
        )


def _encoded(
    format: QuantFormat, rows: Floats, encoder: str, statistics: Any, K: int, act_order: bool
) -> Bytes:
    """Return the bytes of rows: the encoder's, or of rows that lose more, a simpler one's."""
    plain = quantize_rows(format, rows, K, "plain")
    squares = mean_squares(statistics)
    if encoder == "hqq":
        data = hqq_rows(format, rows, K)
        return data if squares is None else _better(format, rows, K, [data, plain], statistics)
    data = gptq_rows(format, rows, K, statistics, act_order)
    importance = column_importance(statistics, rows.shape[1], K)
    best = quantize_rows(format, rows, K, "best", importance)
    return _better(format, rows, K, [data, best, plain], statistics)


def _better(
    format: QuantFormat, rows: Floats, K: int, candidates: list[Bytes], statistics: Any
) -> Bytes:
    """Return of each row the bytes whose output error is least."""
    array = statistics.matrix if isinstance(statistics, SecondMoments) else statistics
    losses = []
    for data in candidates:
        decoded = np.empty((len(rows), K), np.float32)
        format.dequantize_rows(data, decoded)
        losses.append(output_errors(decoded.astype(np.float64) - rows[:, :K], array))
    chosen = np.argmin(losses, axis=0)
    result: Bytes = np.stack(candidates)[chosen, np.arange(len(rows))]
    return result
