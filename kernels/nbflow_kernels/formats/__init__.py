"""Weight formats: block layouts, quantized tensors and dequantization.

>>> import numpy as np
>>> import nbflow_kernels as nk
>>> x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
>>> qt = nk.quantize(x, "q3h")
>>> qt.nbytes, nk.FORMATS["q3h"].bits_per_weight
(64, 4.0)
>>> bool(np.abs(nk.dequantize(qt) - x).max() < 0.06)
True

Each format is a module, most of them in `inferflow` or `ggml`, whose docstring has its formula;
docs/formats.md has the bytes of a block.  `FORMATS` maps names to formats.
`nbflow_kernels.quantizers` chooses the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, empty, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.cpu_dequantize import gather
from nbflow_kernels.formats.e2m1 import by_name as e2m1_by_name
from nbflow_kernels.formats.floats import BF16, F16, F32
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
from nbflow_kernels.formats.grouped import by_name as grouped_by_name
from nbflow_kernels.formats.inferflow.q2 import Q2_B32T1A, Q2_B32T1B
from nbflow_kernels.formats.inferflow.q3 import Q3_B32T1A, Q3_B32T1B
from nbflow_kernels.formats.inferflow.q3h import Q3H_B64T1
from nbflow_kernels.formats.inferflow.q4 import Q4_B16, Q4_B32T1A, Q4_B32T1B, Q4_B64T1
from nbflow_kernels.formats.inferflow.q5 import Q5_B32T1, Q5_B64T1
from nbflow_kernels.formats.inferflow.q6 import Q6_B64T1
from nbflow_kernels.formats.inferflow.q8 import Q8_B32T1, Q8_B32T2
from nbflow_kernels.formats.layout_cpu import CpuPacked
from nbflow_kernels.formats.nf4_fp4 import by_name as nf4_fp4_by_name
from nbflow_kernels.formats.outliers import add_outliers
from nbflow_kernels.formats.q5h import Q5H_B64T1
from nbflow_kernels.formats.registry import FORMATS, Formats, QuantFormat
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.formats.trellis import Q2T_B256, Q3T_B256, Q4T_B256

__all__ = [
    "FORMATS",
    "CpuPacked",
    "Formats",
    "QuantFormat",
    "QuantTensor",
    "dequantize",
    "dequantize_rows",
]

FORMATS.fill(
    (
        F32,
        F16,
        BF16,
        Q8_B32T1,
        Q8_B32T2,
        Q6_B64T1,
        Q5_B32T1,
        Q5_B64T1,
        Q5H_B64T1,
        Q4_B16,
        Q4_B32T1A,
        Q4_B32T1B,
        Q4_B64T1,
        Q3H_B64T1,
        Q3_B32T1A,
        Q3_B32T1B,
        Q2_B32T1A,
        Q2_B32T1B,
        Q4T_B256,
        Q3T_B256,
        Q2T_B256,
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
        "q5h": "q5h_b64t1",
        "q4": "q4_b32t1a",
        "q4_b32t1": "q4_b32t1a",
        "q3h": "q3h_b64t1",
        "q3": "q3_b32t1b",
        "q3_b32t1": "q3_b32t1b",
        "q2": "q2_b32t1b",
        "q2_b32t1": "q2_b32t1b",
        "q4t": "q4t_b256",
        "q3t": "q3t_b256",
        "q2t": "q2t_b256",
    },
)
FORMATS.families += [grouped_by_name, e2m1_by_name, nf4_fp4_by_name]


def dequantize(qt: QuantTensor, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Dequantize a tensor to float32.

    Parameters
    ----------
    qt : QuantTensor
        The weights, shape (..., K).
    out : array of float32, shape (..., K), optional
        Destination.  On a CUDA device it may be float16.

    Returns
    -------
    array of float32, shape (..., K)
        `out`, or a new array on the device of `qt`.  CPU and CUDA results are bit-identical.

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
        there = qt.data if qt.has_storage else qt.units().data if qt.on_device else None
        out = empty(there, qt.shape) if qt.on_device else np.empty(qt.shape, np.float32)
    else:
        check_array("out", out, qt.shape, (np.float32, np.float16) if is_cuda(out) else np.float32)
    if is_cuda(out):
        from nbflow_kernels.formats import cuda_dequantize as cuda

        cuda.decode(qt, None, 1.0, out.reshape(-1, qt.shape[-1]))
        return out
    rows = out.reshape(-1, qt.shape[-1])
    if qt.has_storage and qt.column_order is None:
        qt.format.dequantize_rows(qt.data, rows)
        if qt.outliers is not None:
            add_outliers(qt.outliers, rows)
    else:
        gather(qt, np.arange(qt.n_rows), rows)
    return out


def dequantize_rows(
    qt: QuantTensor, ids: NDArray[np.integer], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Dequantize rows of a matrix to float32, e.g. the embeddings of token ids.

    Parameters
    ----------
    qt : QuantTensor
        The matrix, shape (V, E).
    ids : array of int, shape (T,)
        Row indices in 0..V - 1.  On a CUDA device int32; an index out of range gives a row of NaN.
    out : array of float32, shape (T, E), optional
        Destination.

    Returns
    -------
    array of float32, shape (T, E)
        `out`, or a new array.

    Raises
    ------
    TypeError
        If `qt` is not a `QuantTensor` or `ids` is not an array of integers.
    UsageError
        If an id is out of range, or a shape does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import quantize
    >>> from nbflow_kernels.formats import dequantize_rows
    >>> qt = quantize(127 * np.eye(4, 32, dtype=np.float32), "q8")
    >>> dequantize_rows(qt, np.array([3, 0]))[:, :4]
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
    """CUDA path of `dequantize_rows`; indices are not checked."""
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
