"""Block Hadamard transforms: rotations that spread outlier channels over their block.

The engine rotates queries, keys and values by them before a cache in a block format
(`nbflow.kv_cache.rotation`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, check_together, is_cuda, output_array
from nbflow_kernels.errors import UsageError
from nbflow_kernels.hadamard import cpu, cuda

__all__ = ["hadamard_transform"]

MAX_BLOCK = 1024
"""Largest block: two copies of it fit into the shared memory of a CUDA block."""


def hadamard_transform(
    x: NDArray[np.float32], block: int, out: NDArray[np.float32] | None = None
) -> Any:
    r"""Rotate each block of columns by the Hadamard matrix.

    .. math:: y_{t,bn+i} = \frac{1}{\sqrt{n}} \sum_{j=0}^{n-1} (-1)^{|i \wedge j|} x_{t,bn+j}

    with n the size of a block and :math:`|i \wedge j|` the number of bits that both indices have:
    Sylvester's order.  The matrix is orthogonal and symmetric, so the transform is its own inverse
    and keeps dot products.

    Parameters
    ----------
    x : array of float32, shape (T, K)
        Rows may be strided.  A NumPy array runs on the CPU; an array on a CUDA device runs there.
    block : int
        Columns of a block, a power of two up to 1024 that divides K.
    out : array of float32, shape (T, K), optional
        Output array; rows may be strided.  It may be `x` itself.

    Returns
    -------
    array of float32, shape (T, K)
        `out` if given, else a new array on the device of `x`.

    Raises
    ------
    UsageError
        If `block` is no power of two, larger than 1024, or does not divide K.
    TypeError
        If an array is not of float32.

    References
    ----------
    .. [1] M. C. Pease, "An Adaptation of the Fast Fourier Transform for Parallel Processing",
       J. ACM 15, 1968: all log2(n) passes have the same geometry.
    .. [2] S. Ashkboos et al., "QuaRot", arXiv:2404.00456, section 4: rotated queries and keys.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import hadamard_transform
    >>> x = np.array([[8.0, 0.0, 0.0, 0.0]], np.float32)
    >>> hadamard_transform(x, 4)
    array([[4., 4., 4., 4.]], dtype=float32)
    >>> hadamard_transform(hadamard_transform(x, 4), 4)
    array([[8., 0., 0., 0.]], dtype=float32)
    """
    check_together(x=x, out=out)
    check_array("x", x, (None, None), rows=True)
    check_block(block, x.shape[1])
    if out is not x:
        out = output_array(x, x.shape, out, rows=True)
    variant: Any = cuda if is_cuda(x) else cpu
    variant.hadamard_transform(x, block, out)
    return out


def check_block(block: int, n_columns: int) -> None:
    """Raise UsageError unless blocks of this size fill the columns."""
    if not 1 <= block <= MAX_BLOCK or block & (block - 1):
        raise UsageError(f"block must be a power of two up to {MAX_BLOCK}, got {block}")
    if n_columns % block:
        raise UsageError(f"x must have a multiple of block = {block} columns, got {n_columns}")
