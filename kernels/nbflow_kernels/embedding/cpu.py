"""Embedding lookup on the CPU.

NumPy gathers rows of arrays: the op only moves bytes, and a kernel would have to be compiled before
the first token.  Rows of a quantized table are decoded by its format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from nbflow_kernels.formats import QuantTensor


def embedding(
    ids: NDArray[np.int32],
    table: NDArray[Any] | QuantTensor,
    scale: float,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.embedding`."""
    if not isinstance(table, np.ndarray):
        from nbflow_kernels.formats.cpu_dequantize import gather

        gather(table, ids, out)
    elif table.dtype == np.float32:
        # mode="clip" (ids are checked) lets NumPy write into `out` without a buffer
        np.take(table, ids, axis=0, out=out, mode="clip")
    elif table.dtype == np.uint16:
        np.left_shift(table[ids], 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = table[ids]
    if scale != 1.0:
        np.multiply(out, np.float32(scale), out=out)
