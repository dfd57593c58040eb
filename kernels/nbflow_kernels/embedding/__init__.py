"""Embedding lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_ids, is_cuda, output
from nbflow_kernels.embedding import cpu, cuda

if TYPE_CHECKING:
    from nbflow_kernels.formats import QuantTensor

__all__ = ["embedding"]


def embedding(
    ids: NDArray[np.int32],
    table: NDArray[Any] | QuantTensor,
    *,
    scale: float = 1.0,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Gather rows of the embedding table as float32.

    .. math:: y_{te} = s \, \mathrm{table}[i_t, e]

    Parameters
    ----------
    ids : array of int32, shape (T,)
        Token ids, 0 <= id < V.
    table : array of float32, float16 or uint16, shape (V, E), or QuantTensor
        The embedding table; uint16 holds the bits of bfloat16.
    scale : float
        s: the square root of E in Gemma and M2M-100 (``math.sqrt(E)``; rounded to bfloat16 in
        checkpoints trained in bfloat16), 12 in MiniCPM.
    out : array of float32, shape (T, E), optional
        Output array.

    Returns
    -------
    array of float32, shape (T, E)
        `out` if given, else a new array on the device of `ids`.  Widening is exact, the product
        with a `scale` other than 1 is rounded once.

    Raises
    ------
    UsageError
        If an id is outside the vocabulary, or a shape is wrong.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.quantize : Makes a QuantTensor.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import embedding
    >>> table = np.arange(8, dtype=np.float16).reshape(4, 2)
    >>> embedding(np.array([3, 0], np.int32), table)
    array([[6., 7.],
           [0., 1.]], dtype=float32)
    """
    check_array("ids", ids, (None,), np.int32)
    if not _is_quantized(table):
        check_array("table", table, (None, None), (np.float32, np.float16, np.uint16))
    V, E = table.shape
    check_ids("ids", ids, V, f"the vocabulary has {V} tokens")
    out = output(ids, (ids.shape[0], E), out)
    (cuda if is_cuda(ids) else cpu).embedding(ids, table, float(scale), out)
    return out


def _is_quantized(table: object) -> TypeGuard[QuantTensor]:
    """Return whether `table` is a QuantTensor, without importing the formats for an array."""
    if isinstance(table, np.ndarray) or is_cuda(table):
        return False
    from nbflow_kernels.formats import QuantTensor

    return isinstance(table, QuantTensor)
