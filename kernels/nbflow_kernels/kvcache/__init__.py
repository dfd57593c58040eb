"""The paged key/value cache: where tokens lie, and writing them there.

The page table of a batch is a CSR triple: request b's pages are
``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``, in order, and its last page holds
``kv_last_page_len[b]`` tokens.  The caller owns the table and the pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.kvcache import cpu, cuda
from nbflow_kernels.kvcache.pages import (
    check_cache,
    check_page_numbers,
    check_page_table,
    count_tokens,
)

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

LAYOUTS = ("NHD", "HND")


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values into their pages, in place.

    Parameters
    ----------
    append_key, append_value : array of float32, shape (nnz, G, D)
        One row per new token; rows may be far apart (columns of a wider matrix).
    batch_indices : array of int32, shape (nnz,)
        The request each row belongs to; see `get_batch_indices_positions`.
    positions : array of int32, shape (nnz,)
        The row's position in its sequence.  No position may occur twice in a request.
    paged_kv_cache : pair of arrays, or one array, float32 or float16
        Keys and values, (pages, page_size, G, D) each for ``"NHD"`` or (pages, G, page_size, D) for
        ``"HND"``; or both in one 5-D array (pages, 2, ...).  Float16 is rounded to nearest; what
        exceeds 65504 becomes infinite.
    kv_indices : array of int32, shape (n_pages,)
        Page numbers of all requests.
    kv_indptr : array of int32, shape (B + 1,)
        Where each request's pages start in `kv_indices`.
    kv_last_page_len : array of int32, shape (B,)
        Tokens on each request's last page, the new ones included.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Raises
    ------
    UsageError
        If shapes do not fit, or a row's request or position is not in the table.
    TypeError
        If an argument is not an array or has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kvcache import append_paged_kv_cache
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> cache = np.zeros((2, 2, 2, 1, 1), np.float32)  # 2 pages of keys and values, 2 tokens each
    >>> row = np.full((1, 1, 1), 5, np.float32)
    >>> append_paged_kv_cache(row, -row, ints(0), ints(2), cache, ints(1, 0), ints(0, 2), ints(1))
    >>> cache[0].ravel()  # position 2 is the first slot of the request's second page, page 0
    array([ 5.,  0., -5.,  0.], dtype=float32)
    """
    if kv_layout not in LAYOUTS:
        raise unknown_name("kv_layout", kv_layout, LAYOUTS)
    check_array("append_key", append_key, (None, None, None), rows=True)
    T, G, D = append_key.shape
    check_array("append_value", append_value, (T, G, D), rows=True)
    check_array("batch_indices", batch_indices, (T,), np.int32)
    check_array("positions", positions, (T,), np.int32)
    k, v = check_cache(paged_kv_cache, None, G, D, kv_layout)
    page_size = k.shape[1 if kv_layout == "NHD" else 2]
    check_page_table(kv_indptr, kv_indices, kv_last_page_len, page_size)
    check_page_numbers(kv_indices[: kv_indptr[-1]], k.shape[0])
    _check_places(batch_indices, positions, count_tokens(kv_indptr, kv_last_page_len, page_size))
    variant = cuda if is_cuda(append_key) else cpu
    variant.append_paged_kv_cache(
        append_key, append_value, batch_indices, positions, k, v, kv_indices, kv_indptr, kv_layout
    )


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Return the number of tokens of each request.

    Parameters
    ----------
    kv_indptr : array of int32, shape (B + 1,)
        Where each request's pages start.
    kv_last_page_len : array of int32, shape (B,)
        Tokens on each request's last page; 0 for a request without pages.
    page_size : int
        Tokens per page.

    Returns
    -------
    array of int32, shape (B,)
        ``(pages - 1) * page_size + last_page_len``.

    Raises
    ------
    UsageError, TypeError
        If the arrays do not describe pages of this size.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kvcache import get_seq_lens
    >>> get_seq_lens(np.array([0, 2, 3], np.int32), np.array([1, 4], np.int32), 4)
    array([5, 4], dtype=int32)
    """
    check_page_table(kv_indptr, None, kv_last_page_len, page_size)
    return count_tokens(kv_indptr, kv_last_page_len, page_size)


def get_batch_indices_positions(append_indptr: Any, seq_lens: Any, nnz: int) -> tuple[Any, Any]:
    """Return the request and the position of every appended row.

    Parameters
    ----------
    append_indptr : array of int32, shape (B + 1,)
        New rows of request b are ``append_indptr[b]:append_indptr[b + 1]``.
    seq_lens : array of int32, shape (B,)
        Length of each sequence with the new rows; see `get_seq_lens`.
    nnz : int
        Number of new rows, ``append_indptr[-1]``.

    Returns
    -------
    batch_indices, positions : arrays of int32, shape (nnz,)
        The rows of a request have its last positions.

    Raises
    ------
    UsageError
        If `nnz` is another number, or a sequence is shorter than what is appended to it.
    TypeError
        If an argument is not an int32 array.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.kvcache import get_batch_indices_positions
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> get_batch_indices_positions(ints(0, 1, 3), ints(10, 2), 3)
    (array([0, 1, 1], dtype=int32), array([9, 0, 1], dtype=int32))
    """
    check_array("append_indptr", append_indptr, (None,), np.int32)
    if not len(append_indptr):
        raise UsageError("append_indptr must have one entry more than there are requests, got none")
    check_array("seq_lens", seq_lens, (len(append_indptr) - 1,), np.int32)
    counts = append_indptr[1:] - append_indptr[:-1]
    if append_indptr[0] != 0 or (counts < 0).any() or nnz != append_indptr[-1]:
        raise UsageError(
            f"append_indptr must start at 0, never fall and end at nnz = {nnz}, "
            f"got {append_indptr.tolist()}"
        )
    if (counts > seq_lens).any():
        request = int(np.flatnonzero(counts > seq_lens)[0])
        raise UsageError(
            f"seq_lens of request {request} must count its {counts[request]} new rows too, "
            f"got {seq_lens[request]}"
        )
    batch_indices = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    start = (seq_lens - append_indptr[1:])[batch_indices]  # position minus row number
    return batch_indices, start + np.arange(nnz, dtype=np.int32)


def _check_places(batch_indices: Any, positions: Any, lens: Any) -> None:
    """Raise unless every row's request and position exist."""
    if not len(batch_indices):
        return
    B = len(lens)
    if batch_indices.min() < 0 or batch_indices.max() >= B:
        bad = batch_indices[(batch_indices < 0) | (batch_indices >= B)][0]
        raise UsageError(f"batch_indices must name requests 0..{B - 1}, got {bad}")
    wrong = (positions < 0) | (positions >= lens[batch_indices])
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"positions[{row}] must be below the length of its sequence, "
            f"{lens[batch_indices[row]]} by the page table, got {positions[row]}"
        )
