"""Weight formats: quantize, dequantize, and the bytes in between.

>>> import numpy as np
>>> import nbflow_kernels as nk
>>> x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
>>> qt = nk.quantize(x, "q3h")
>>> qt.nbytes, nk.FORMATS["q3h"].bits_per_weight
(64, 4.0)
>>> bool(np.abs(nk.dequantize(qt) - x).max() < 0.06)
True

A format is a file of this folder with the table of its bytes; `FORMATS` lists them all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nbflow_kernels._dispatch import check_array, empty, is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.cpu_dequantize import gather
from nbflow_kernels.formats.floats import BF16, F16, F32, FloatFormat
from nbflow_kernels.formats.ggml.iq1 import IQ1_M, IQ1_S
from nbflow_kernels.formats.ggml.iq2 import IQ2_S, IQ2_XS, IQ2_XXS
from nbflow_kernels.formats.ggml.iq3 import IQ3_S, IQ3_XXS
from nbflow_kernels.formats.ggml.iq4 import IQ4_NL, IQ4_XS
from nbflow_kernels.formats.ggml.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from nbflow_kernels.formats.ggml.mxfp4_nvfp4 import MXFP4, NVFP4
from nbflow_kernels.formats.ggml.q2_k import Q2_K
from nbflow_kernels.formats.ggml.q3_k import Q3_K
from nbflow_kernels.formats.ggml.q4_k import Q4_K
from nbflow_kernels.formats.ggml.q5_k import Q5_K
from nbflow_kernels.formats.ggml.q6_k import Q6_K
from nbflow_kernels.formats.ggml.ternary import Q1_0, Q2_0, TQ1_0, TQ2_0
from nbflow_kernels.formats.inferflow.q2 import Q2_B32T1A, Q2_B32T1B
from nbflow_kernels.formats.inferflow.q3 import Q3_B32T1A, Q3_B32T1B
from nbflow_kernels.formats.inferflow.q3h import Q3H_B64T1
from nbflow_kernels.formats.inferflow.q4 import Q4_B16, Q4_B32T1A, Q4_B32T1B, Q4_B64T1
from nbflow_kernels.formats.inferflow.q5 import Q5_B32T1, Q5_B64T1
from nbflow_kernels.formats.inferflow.q6 import Q6_B64T1
from nbflow_kernels.formats.inferflow.q8 import Q8_B32T1, Q8_B32T2
from nbflow_kernels.formats.layout_cpu import CpuPacked
from nbflow_kernels.formats.registry import Formats, QuantFormat
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.quantizers.outliers import (
    add_outliers,
    check_ratio,
    quantize_with_outliers,
    sample_rows,
    soft_range,
)

__all__ = [
    "ENCODERS",
    "FORMATS",
    "Formats",
    "CpuPacked",
    "QuantFormat",
    "QuantTensor",
    "dequantize",
    "dequantize_rows",
    "quantize",
]

ENCODERS = ("best", "plain")

FORMATS = Formats(
    (
        F32,
        F16,
        BF16,
        Q8_B32T1,
        Q8_B32T2,
        Q6_B64T1,
        Q5_B32T1,
        Q5_B64T1,
        Q4_B16,
        Q4_B32T1A,
        Q4_B32T1B,
        Q4_B64T1,
        Q3H_B64T1,
        Q3_B32T1A,
        Q3_B32T1B,
        Q2_B32T1A,
        Q2_B32T1B,
        Q8_0,
        Q5_1,
        Q5_0,
        Q4_1,
        Q4_0,
        Q2_K,
        Q3_K,
        Q4_K,
        Q5_K,
        Q6_K,
        IQ4_NL,
        IQ4_XS,
        MXFP4,
        NVFP4,
        IQ3_S,
        IQ3_XXS,
        IQ2_S,
        IQ2_XS,
        IQ2_XXS,
        Q2_0,
        TQ2_0,
        IQ1_M,
        TQ1_0,
        IQ1_S,
        Q1_0,
    ),
    short_names={
        "fp32": "f32",
        "fp16": "f16",
        "q8": "q8_b32t2",
        "q6": "q6_b64t1",
        "q5": "q5_b64t1",
        "q4": "q4_b32t1a",
        "q4_b32t1": "q4_b32t1a",
        "q3h": "q3h_b64t1",
        "q3": "q3_b32t1b",
        "q3_b32t1": "q3_b32t1b",
        "q2": "q2_b32t1b",
        "q2_b32t1": "q2_b32t1b",
    },
)
"""All weight formats, by name: the explicit list, and the short names."""


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
    if encoder not in ENCODERS:
        raise unknown_name("encoder", encoder, ENCODERS)
    if is_cuda(x):
        return _quantize_there(x, chosen, encoder, importance, outliers)
    array = np.asarray(x)
    if array.dtype.type not in (np.float32, np.float16, np.float64):
        raise TypeError(f"x must have dtype float32, float16 or float64, got {array.dtype.name}")
    if array.ndim < 1 or array.shape[-1] < 1:
        raise UsageError(f"x must have a last axis of at least one weight, got shape {array.shape}")
    values = _finite_float32(array)
    n_columns = array.shape[-1]
    rows = values.reshape(-1, n_columns)
    pad = chosen.row_blocks(n_columns) * chosen.block_size - n_columns
    if pad:
        rows = np.pad(rows, ((0, 0), (0, pad)), mode="edge")
    weight = None if importance is None else _importance(importance, array.shape)
    if weight is not None and pad:
        weight = np.pad(weight, ((0, 0), (0, pad)))
    rows = np.ascontiguousarray(rows)
    ratio = check_ratio(outliers)
    if ratio == 0.0:
        return QuantTensor(
            chosen, array.shape, chosen.quantize_rows(rows, n_columns, encoder, weight)
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


def _finite_float32(array: NDArray[Any]) -> NDArray[np.float32]:
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


def _importance(importance: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the importances as float32 (1 or rows, K), or raise."""
    array = np.asarray(importance)
    if array.dtype.type not in (np.float32, np.float16, np.float64):
        raise TypeError(
            f"importance must have dtype float32, float16 or float64, got {array.dtype.name}"
        )
    if array.shape not in (shape[-1:], shape):
        raise UsageError(
            f"importance must have shape {shape[-1:]} (columns) or {shape} (weights), "
            f"got {array.shape}"
        )
    with np.errstate(over="ignore"):
        weight = np.asarray(array, dtype=np.float32)
    wrong = ~(np.isfinite(weight) & (weight >= 0))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise UsageError(
            f"importance must be finite and >= 0 in float32, got {array[where]} at {list(where)}"
        )
    return np.ascontiguousarray(weight.reshape(-1, shape[-1]))


def dequantize(qt: QuantTensor, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Return the weights of a tensor as float32.

    Parameters
    ----------
    qt : QuantTensor
        The weights, shape (..., K).
    out : array of float32, shape (..., K), optional
        Where to write the result.  On a CUDA device it may be float16.

    Returns
    -------
    array of float32, shape (..., K)
        `out`, or a new array where `qt` lies; on a CUDA device it has the CPU's bits.

    Raises
    ------
    TypeError
        If `qt` is not a `QuantTensor` or `out` has another dtype.
    UsageError
        If `out` has another shape or is not C-contiguous.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels as nk
    >>> nk.dequantize(nk.quantize(np.float32([1, 2, 3, 4]), "q2"))
    array([1., 2., 3., 4.], dtype=float32)
    """
    _check_tensor("qt", qt)
    if out is None:
        out = empty(qt.data, qt.shape) if qt.on_device else np.empty(qt.shape, np.float32)
    else:
        check_array("out", out, qt.shape, (np.float32, np.float16) if is_cuda(out) else np.float32)
    if is_cuda(out):
        from nbflow_kernels.formats import cuda_dequantize as cuda

        cuda.decode(qt, None, 1.0, out.reshape(-1, qt.shape[-1]))
        return out
    rows = out.reshape(-1, qt.shape[-1])
    if qt.has_storage:
        qt.format.dequantize_rows(qt.data, rows)
        if qt.outliers is not None:
            add_outliers(qt.outliers, rows)
    else:
        gather(qt, np.arange(qt.n_rows), rows)
    return out


def dequantize_rows(
    qt: QuantTensor, ids: NDArray[np.integer], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Return some rows of a matrix as float32: the embedding of token ids.

    Parameters
    ----------
    qt : QuantTensor
        The matrix, shape (V, E).
    ids : array of int, shape (T,)
        Rows, each in 0..V - 1.  On a CUDA device int32, and another index gives a row of NaN.
    out : array of float32, shape (T, E), optional
        Where to write the result.

    Returns
    -------
    array of float32, shape (T, E)
        `out`, or a new array.

    Raises
    ------
    TypeError
        If `qt` is not a `QuantTensor` or `ids` not an array of integers.
    UsageError
        If an id is out of range, or a shape does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> import nbflow_kernels.formats as quants
    >>> qt = quants.quantize(127 * np.eye(4, 32, dtype=np.float32), "q8")
    >>> quants.dequantize_rows(qt, np.array([3, 0]))[:, :4]
    array([[  0.,   0.,   0., 127.],
           [127.,   0.,   0.,   0.]], dtype=float32)
    """
    _check_tensor("qt", qt)
    if len(qt.shape) != 2:
        raise UsageError(f"qt must have shape (V, E), got {qt.shape}")
    if is_cuda(ids):
        there: NDArray[np.float32] = _dequantize_rows_there(qt, ids, out)
        return there
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError("ids must be a one-dimensional NumPy array of integers")
    if ids.size and (ids.min() < 0 or ids.max() >= qt.shape[0]):
        raise UsageError(
            f"ids must lie in 0..{qt.shape[0] - 1}, got {int(ids.min())}..{int(ids.max())}"
        )
    if out is None:
        out = np.empty((len(ids), qt.shape[1]), np.float32)
    else:
        check_array("out", out, (len(ids), qt.shape[1]))
    gather(qt, ids, out)
    return out


def _dequantize_rows_there(qt: QuantTensor, ids: Any, out: Any) -> Any:
    """Do `dequantize_rows` on a CUDA device, where indices are not checked."""
    from nbflow_kernels.formats import cuda_dequantize as cuda

    check_array("ids", ids, (None,), np.int32)
    if out is None:
        out = empty(ids, (len(ids), qt.shape[1]))
    else:
        check_array("out", out, (len(ids), qt.shape[1]), (np.float32, np.float16))
    cuda.decode(qt, ids, 1.0, out)
    return out


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, QuantTensor):
        raise TypeError(f"{name} must be a QuantTensor, got {type(value).__name__}")
