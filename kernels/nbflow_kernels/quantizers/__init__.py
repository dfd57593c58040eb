"""All encoders of one matrix by name: GPTQ, HQQ and "outliers" beside "best" and "plain"."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.quantizers import _finite_float32, quantize
from nbflow_kernels.quantizers.affine_grid import check_affine
from nbflow_kernels.quantizers.delta import delta_rows
from nbflow_kernels.quantizers.gptq import SecondMoments, gptq_rows, output_errors
from nbflow_kernels.quantizers.hqq import hqq_rows
from nbflow_kernels.quantizers.outliers import check_ratio
from nbflow_kernels.sparse.csr import CsrMatrix

ENCODERS = ("best", "plain", "gptq", "hqq", "outliers")
DAMPING = 0.01
CHUNK = 1 << 22  # weights encoded at once: bounds the float64 arrays to some 150 MB


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
        `nbflow_kernels.quantizers.hqq` and `nbflow_kernels.quantizers.delta` say what the others do.
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
    found = _statistics(statistics, K, damping)
    _check_outliers(chosen, encoder, outliers)
    if encoder in ("best", "plain"):
        squares = _squares(found)
        importance = None if squares is None else squares.astype(np.float32)
        return quantize(array, chosen, encoder=encoder, importance=importance)
    if encoder != "outliers":
        check_affine(chosen, encoder)
    if encoder == "gptq" and not isinstance(found, SecondMoments):
        raise UsageError(
            f"encoder 'gptq' needs second moments of the inputs, shape ({K}, {K}); "
            "nbflow imatrix --full collects them"
        )
    rows = _finite_float32(array).reshape(-1, K)
    pad = chosen.row_blocks(K) * chosen.block_size - K
    rows = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, pad)), mode="edge"))
    n_bytes = chosen.row_blocks(K) * chosen.block_bytes
    data = np.empty((len(rows), n_bytes), np.uint8)
    step = max(1, CHUNK // rows.shape[1])
    sparse: list[CsrMatrix] = []
    for row in range(0, len(rows), step):
        part = rows[row : row + step]
        if encoder == "outliers":
            importance = _importance(found, rows.shape[1], K)
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
    plain = format.quantize_rows(rows, K, "plain")
    squares = _squares(statistics)
    if encoder == "hqq":
        data = hqq_rows(format, rows, K)
        return data if squares is None else _better(format, rows, K, [data, plain], statistics)
    data = gptq_rows(format, rows, K, statistics, act_order)
    importance = _importance(statistics, rows.shape[1], K)
    best = format.quantize_rows(rows, K, "best", importance)
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


def _importance(statistics: Any, width: int, K: int) -> NDArray[np.float32] | None:
    """Return importances (1, width) of at most 1 of the columns, 0 in the padding."""
    squares = _squares(statistics)
    if squares is None:
        return None
    largest = squares.max(initial=0.0)
    importance = np.zeros((1, width), np.float32)
    importance[0, :K] = squares / largest if largest > 0 else 1
    return importance


def _statistics(
    statistics: Any, K: int, damping: float = DAMPING
) -> SecondMoments | NDArray[np.float64] | None:
    """Return the statistics checked: second moments, mean squares (K,), or None."""
    if statistics is None:
        return None
    if not isinstance(statistics, SecondMoments):
        array = np.asarray(statistics, np.float64)
        if array.ndim == 1:
            if array.shape != (K,) or not np.isfinite(array).all() or array.min() < 0:
                raise UsageError(
                    f"mean squares must be finite, >= 0 and have shape ({K},), got {array.shape}"
                )
            return array
        statistics = SecondMoments(array, damping)
    if len(statistics) != K:
        raise UsageError(
            f"second moments must have shape ({K}, {K}), the columns of x, "
            f"got {statistics.matrix.shape}"
        )
    return statistics  # type: ignore[no-any-return]


def _squares(statistics: SecondMoments | NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """Return mean squares of the columns, if there are statistics."""
    if isinstance(statistics, SecondMoments):
        return statistics.matrix.diagonal()
    return statistics
