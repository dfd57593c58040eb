"""Attention masks as bits, and masks of block-sparse matrices in the order attention reads them.

A mask of a request is the flattened matrix (rows, keys) of booleans; those of a batch follow each
other.  ``custom_mask`` arguments take it as booleans, ``packed_custom_mask`` as bits with the first
element in the lowest bit (``bitorder="little"``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_indptr, is_cuda
from nbflow_kernels.cuda import to_host
from nbflow_kernels.errors import unknown_name
from nbflow_kernels.masks import cpu, cuda

__all__ = ["convert_bsr_mask_layout", "packbits", "segment_packbits"]

BIT_ORDERS = ("big", "little")
BINARY = (np.bool_, np.uint8)


def packbits(x: Any, bitorder: str = "big") -> Any:
    """Pack booleans into the bits of bytes.

    Parameters
    ----------
    x : array of bool or uint8, shape (n,)
        Booleans; bytes other than 0 are true.
    bitorder : {"big", "little"}
        Bit order: the first of 8 elements is the highest or lowest bit.  **The attention functions
        read packed masks as "little"**; "big" is the default because it is FlashInfer's and
        NumPy's.

    Returns
    -------
    array of uint8, shape (ceil(n / 8),)
        The bits; those after the last element are 0.

    Raises
    ------
    UsageError, TypeError
        If `x` is not such an array or the order is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import packbits
    >>> x = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1], bool)
    >>> [f"{byte:08b}" for byte in packbits(x)]
    ['10110011', '10000000']
    >>> [f"{byte:08b}" for byte in packbits(x, bitorder="little")]  # for packed_custom_mask
    ['11001101', '00000001']
    """
    _check_order(bitorder)
    check_array("x", x, (None,), BINARY)
    return (cuda if is_cuda(x) else cpu).packbits(x, bitorder)


def segment_packbits(x: Any, indptr: Any, bitorder: str = "big") -> tuple[Any, Any]:
    """Pack segments of booleans into bits, each segment starting at a new byte.

    Parameters
    ----------
    x : array of bool or uint8, shape (indptr[-1],)
        The booleans of all segments.
    indptr : array of int32, shape (B + 1,)
        Segment b is ``x[indptr[b]:indptr[b + 1]]``.
    bitorder : {"big", "little"}
        As in `packbits`: **attention reads "little"**.

    Returns
    -------
    y : array of uint8, shape (new_indptr[-1],)
        The bits.
    new_indptr : array of int32, shape (B + 1,)
        Segment b is ``y[new_indptr[b]:new_indptr[b + 1]]``, ceil(n / 8) bytes for n elements.

    Raises
    ------
    UsageError, TypeError
        If the arrays do not fit each other or the order has another name.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import segment_packbits
    >>> x = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], bool)
    >>> y, new_indptr = segment_packbits(x, np.array([0, 4, 7, 11], np.int32))
    >>> [f"{byte:08b}" for byte in y], new_indptr
    (['10110000', '00100000', '11010000'], array([0, 1, 2, 3], dtype=int32))
    """
    _check_order(bitorder)
    check_array("x", x, (None,), BINARY)
    if is_cuda(x):
        indptr = to_host(indptr)  # the sizes of the results follow from it
    check_indptr("indptr", indptr, end=("the length of x", len(x)))
    y, new_indptr = (cuda if is_cuda(x) else cpu).segment_packbits(x, indptr, bitorder)
    return y, new_indptr


def convert_bsr_mask_layout(mask: Any, indptr: Any) -> Any:
    """Return the masks of a block-sparse matrix's blocks in the order of its rows.

    Parameters
    ----------
    mask : array of bool, shape (nnz, R, C)
        The mask of each stored block.
    indptr : array of int32, shape (MB + 1,)
        The blocks of block row i are ``indptr[i]:indptr[i + 1]``.

    Returns
    -------
    array of bool, shape (nnz * R * C,)
        Block row after block row; of each the flattened matrix (R, blocks * C).

    Raises
    ------
    UsageError, TypeError
        If the arrays do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import convert_bsr_mask_layout
    >>> mask = np.array([[[1, 1], [0, 1]], [[0, 0], [1, 0]]], bool)  # two blocks of 2 x 2
    >>> convert_bsr_mask_layout(mask, np.array([0, 2], np.int32)).astype(int)
    array([1, 1, 0, 0, 0, 1, 1, 0])
    """
    check_array("mask", mask, (None, None, None), np.bool_)
    if is_cuda(mask):
        indptr = to_host(indptr)
    check_indptr("indptr", indptr, end=("the number of blocks", len(mask)))
    return (cuda if is_cuda(mask) else cpu).convert_bsr_mask_layout(mask, indptr)


def _check_order(bitorder: str) -> None:
    if bitorder not in BIT_ORDERS:
        raise unknown_name("bitorder", bitorder, BIT_ORDERS)
