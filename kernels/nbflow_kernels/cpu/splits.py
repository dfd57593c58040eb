"""Division of a call's rows among threads: how many parts, and which rows each gets.

A part that is too small costs more to start than it saves, and threads whose rows do not shorten
the longest part only wait.  A kernel that computes some rows together (a *tile*, two row groups of
the int8 GEMM) gets whole tiles.  Parts of equal numbers belong to the same rows of every call with
as many rows, so the thread that writes rows of a weight at load (`parallel_for.parallel_chunks`)
multiplies them: their memory lies on its node.
"""

from __future__ import annotations


def count_parts(
    n_rows: int, work: float, n_threads: int, least_work: float, tile: int = 1
) -> int:  # fmt: skip
    """Return the number of threads that share a call.

    Parameters
    ----------
    n_rows : int
        Rows of the call.
    work : float
        Multiply-adds (or operations of like cost) of the whole call.
    n_threads : int
        Threads of the pool.
    least_work : float
        Multiply-adds from which on a thread takes part.
    tile : int
        Rows that the kernel computes together.

    Returns
    -------
    int
        The least number, at least 1, with which the largest part is as small as `n_threads` and
        `least_work` allow.

    Examples
    --------
    >>> count_parts(128, 1e9, 64, 1e4), count_parts(128, 1e9, 96, 1e4)
    (64, 64)
    >>> count_parts(128, 1e6, 64, 1e5), count_parts(128, 1e9, 48, 1e4, tile=2)
    (10, 32)
    """
    n_tiles = -(-n_rows // tile)
    most = max(1, min(n_threads, n_tiles, int(work // least_work)))
    largest = max(1, -(-n_tiles // most))
    return max(1, -(-n_tiles // largest))


def part(n_rows: int, i: int, parts: int, tile: int = 1) -> tuple[int, int]:
    """Return the first row of part `i` and the row after its last.

    Examples
    --------
    >>> [part(7, i, 2, tile=2) for i in range(2)]
    [(0, 4), (4, 7)]
    """
    n_tiles = -(-n_rows // tile)
    start, stop = (tile * (n_tiles * edge // parts) for edge in (i, i + 1))
    return min(start, n_rows), min(stop, n_rows)
