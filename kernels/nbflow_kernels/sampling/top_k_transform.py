"""Top-k of windows of scores for sparse attention, as positions in a page table or a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import (
    check_array,
    check_together,
    empty,
    is_cuda,
    output,
    overlap,
)
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import cuda
from nbflow_kernels.sampling.argument_checks import check_tie_break

_NONE = np.zeros(0, np.int32)
_NO_TABLE = np.zeros((0, 0), np.int32)
_MAX_PAGE_SIZE = 1 << 30


def top_k_page_table_transform(
    input: NDArray[np.float32],
    src_page_table: NDArray[np.int32],
    lengths: NDArray[np.int32],
    k: int,
    row_to_batch: NDArray[np.int32] | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: NDArray[np.int32] | None = None,
    page_table_row_starts: NDArray[np.int32] | None = None,
    *,
    page_size: int = 1,
    out: NDArray[np.int32] | None = None,
    out_raw_indices: NDArray[np.int32] | None = None,
) -> Any:
    r"""Select the largest scores of each row and look their positions up in a page table.

    .. math:: y_{ij} = P \, \mathrm{table}[b_i, f_i + \lfloor s_{ij} / P \rfloor] + s_{ij} \bmod P

    with the position s of a selected score in the row's window, and page size P.

    Parameters
    ----------
    input : array of float32, shape (N, L)
        Scores without NaN, with any row stride.
    src_page_table : array of int32, shape (B, M)
        Pages of each sequence.
    lengths : array of int32, shape (N,)
        Scores of each row's window.
    k : int
        Positions per row.  A window of at most k scores is taken as a whole.
    row_to_batch : array of int32, shape (N,), optional
        Sequence b of each row; row i is of sequence i by default.
    deterministic : bool
        Results are deterministic, with False as well.
    tie_break : {0, 1, 2}
        Of equal scores the lowest positions (0, 1) or the highest (2) are selected.
    dsa_graph_safe : bool
        Launches can be captured in CUDA graphs, with False as well.
    row_starts : array of int32, shape (N,), optional
        First score of each row's window; 0 by default.
    page_table_row_starts : array of int32, shape (N,), optional
        Entry f of the page table for the window's first score; `row_starts` by default, which
        needs a page size of 1.
    page_size : int
        Positions per entry of the page table, a power of two.
    out, out_raw_indices : array of int32, shape (N, k), optional
        Destination of the result, and of the positions s, -1 behind the last.

    Returns
    -------
    array of int32, shape (N, k)
        `out`, or a new array; ascending s, and -1 behind the last.

    Raises
    ------
    UsageError
        If a shape, `k`, `tie_break` or `page_size` does not fit, or on the CPU a window or a page
        lies outside its row.
    TypeError
        If an array has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import top_k_page_table_transform
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> scores, pages = np.float32([[1, 5, 2, 3]]), np.array([[7, 4]], np.int32)
    >>> top_k_page_table_transform(scores, pages, ints(4), 2, page_size=2)
    array([[15,  9]], dtype=int32)
    """
    rows = _Rows(input, lengths, k, tie_break, row_starts, deterministic, dsa_graph_safe)
    check_array("src_page_table", src_page_table, (None, None), np.int32)
    power_of_two = page_size >= 1 and not page_size & page_size - 1
    if not power_of_two or page_size > _MAX_PAGE_SIZE:
        raise UsageError(f"page_size must be a power of two up to 2**30, got {page_size}")
    if page_size > 1 and row_starts is not None and page_table_row_starts is None:
        raise UsageError("page_table_row_starts is needed with row_starts and page_size above 1")
    batches, firsts = row_to_batch, page_table_row_starts
    for name, array in (("row_to_batch", batches), ("page_table_row_starts", firsts)):
        if array is not None:
            check_array(name, array, (rows.n,), np.int32)
    check_together(
        input=input, src_page_table=src_page_table, row_to_batch=batches,
        page_table_row_starts=firsts, out=out, out_raw_indices=out_raw_indices,
    )  # fmt: skip
    if batches is None and rows.n > len(src_page_table):
        raise UsageError(
            f"src_page_table must have a row for each of the {rows.n} rows of input, or "
            f"row_to_batch must be given; got {len(src_page_table)} rows"
        )
    if firsts is None:
        firsts = row_starts
    if not is_cuda(input):
        batches = np.arange(rows.n, dtype=np.int32) if batches is None else batches
        firsts = np.zeros(rows.n, np.int32) if firsts is None else firsts
        last = firsts + (np.maximum(lengths, 1) - 1) // page_size
        _check_range("row_to_batch", batches, len(src_page_table))
        _check_range("page_table_row_starts", firsts, src_page_table.shape[1])
        _check_range("the last page of a window", last, src_page_table.shape[1])
    return rows.select(None, (src_page_table, batches, firsts), page_size, out, out_raw_indices)


def top_k_ragged_transform(
    input: NDArray[np.float32],
    offsets: NDArray[np.int32],
    lengths: NDArray[np.int32],
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: NDArray[np.int32] | None = None,
) -> Any:
    """Select the largest scores of each row and add an offset to their positions.

    Parameters
    ----------
    input : array of float32, shape (N, L)
        Scores without NaN, with any row stride.
    offsets : array of int32, shape (N,)
        Added to the positions in the row's window.
    lengths, k, deterministic, tie_break, dsa_graph_safe, row_starts
        As in `top_k_page_table_transform`.

    Returns
    -------
    array of int32, shape (N, k)
        Ascending in each row, and -1 behind the last.

    Raises
    ------
    UsageError, TypeError
        As in `top_k_page_table_transform`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import top_k_ragged_transform
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> top_k_ragged_transform(np.float32([[1, 5, 2], [9, 0, 0]]), ints(10, 20), ints(3, 1), 2)
    array([[11, 12],
           [20, -1]], dtype=int32)
    """
    rows = _Rows(input, lengths, k, tie_break, row_starts, deterministic, dsa_graph_safe)
    check_array("offsets", offsets, (rows.n,), np.int32)
    check_together(input=input, offsets=offsets)
    return rows.select(offsets, None, 1, None, None)


class _Rows:
    """Checked scores, windows and options."""

    def __init__(
        self, x: Any, lengths: Any, k: Any, tie_break: Any, starts: Any, *flags: Any
    ) -> None:
        check_array("input", x, (None, None), rows=True)
        self.x, self.n, self.lengths, self.starts = x, len(x), lengths, starts
        check_array("lengths", lengths, (self.n,), np.int32)
        if starts is not None:
            check_array("row_starts", starts, (self.n,), np.int32)
        check_together(input=x, lengths=lengths, row_starts=starts)
        if not isinstance(k, int | np.integer) or isinstance(k, bool):
            raise TypeError(f"k must be an integer, got {k!r}")
        if k < 1:
            raise UsageError(f"k must be positive, got {k}")
        if not all(isinstance(flag, bool | np.bool_) for flag in flags):
            raise TypeError(f"deterministic and dsa_graph_safe must be bools, got {flags}")
        self.k, self.prefer_last = int(k), check_tie_break(tie_break)
        if is_cuda(x):
            return
        self.starts = np.zeros(self.n, np.int32) if starts is None else starts
        _check_range("lengths", lengths, x.shape[1] + 1)
        _check_range("row_starts", self.starts, x.shape[1] + 1)
        _check_range("row_starts + lengths", self.starts + lengths, x.shape[1] + 1)

    def select(self, offsets: Any, pages: Any, page_size: int, out: Any, raw: Any) -> Any:
        """Select and translate."""
        x, shape = self.x, (self.n, self.k)
        out = output(x, shape, out, np.int32)
        if raw is not None and overlap(out, output(x, shape, raw, np.int32)):
            raise UsageError("out_raw_indices must not overlap out")
        windows = (self.lengths, self.starts)
        if is_cuda(x):
            cuda.top_k_transform(
                x, windows, offsets, pages, int(page_size), self.prefer_last, out, raw
            )
            return out
        from nbflow_kernels.sampling import cpu_top_k_transform as cpu

        cpu.top_k_transform(
            x, windows, _NONE if offsets is None else offsets,
            (_NO_TABLE, _NONE, _NONE) if pages is None else pages, int(page_size),
            self.prefer_last, out, empty(x, shape, np.int32) if raw is None else raw,
        )  # fmt: skip
        return out


def _check_range(name: str, values: Any, stop: int) -> None:
    """Raise unless all numbers lie in 0 .. stop - 1."""
    if values.size and (values.min() < 0 or values.max() >= stop):
        raise UsageError(f"{name} must lie in 0..{stop - 1}, got {values.min()}..{values.max()}")
