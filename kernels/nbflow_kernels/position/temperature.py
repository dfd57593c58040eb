"""Attention temperature by position: queries far from the start attend more sharply."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import cpu, cuda


def apply_attention_temperature_inplace(
    positions: NDArray[np.int32],
    query: NDArray[np.float32],
    *,
    scale: float,
    floor: int,
    offset: int = 0,
) -> None:
    r"""Scale queries by a factor that grows with the logarithm of their position, in place.

    .. math:: q_t \leftarrow q_t \left(1 + s \, \ln\left(1 +
        \left\lfloor \frac{p_t + o}{f} \right\rfloor\right)\right)

    Parameters
    ----------
    positions : array of int32, shape (T,)
        Position of each query; rows with a negative one are padding and may hold anything.
    query : array of float32, shape (T, H, D)
        Queries; their rows may lie apart.
    scale : float
        s, 0.1 in Llama 4 and Ministral 3.
    floor : int
        f, positions per step of the factor: 8192 in Llama 4, 16384 in Ministral 3.
    offset : int
        o, added to the positions: 1 in Llama 4, 0 in Ministral 3.

    Raises
    ------
    UsageError, TypeError
        If a shape or a number does not fit, or if an array has another dtype.

    References
    ----------
    .. [1] K. Nakanishi, "Scalable-Softmax Is Superior for Attention", arXiv:2501.19399.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_attention_temperature_inplace
    >>> query = np.ones((3, 1, 2), np.float32)
    >>> positions = np.array([7, 8, 16], np.int32)
    >>> apply_attention_temperature_inplace(positions, query, scale=0.1, floor=8)
    >>> query[:, 0, 0].round(4)
    array([1.    , 1.0693, 1.1099], dtype=float32)
    """
    check_array("query", query, (None, None, None), rows=True)
    check_array("positions", positions, (len(query),), np.int32)
    if floor < 1 or offset < 0:
        raise UsageError(
            f"floor must be at least 1 and offset must not be negative, got {floor} and {offset}"
        )
    variant = cuda if is_cuda(query) else cpu
    variant.apply_attention_temperature_inplace(
        positions, query, float(scale), int(floor), int(offset)
    )
