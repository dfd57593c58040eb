"""Matrices whose columns are stored in another order, or have factors.

GPTQ with act-order (``desc_act``) gives each column a group, in any order.  Columns sorted by group
(stable) are blocks with one scale each, so `QuantTensor` stores them so, and the order with them.
A product gathers the activations once, ``x[:, order]``, and multiplies as usual.  Groups that are
not whole blocks are filled up with columns of order -1, whose activations are 0.

ModelOpt's AWQ and SmoothQuant divide each column by a factor before they quantize it, and multiply
the activations by it (``pre_quant_scale``).  The gather does that, too: factors come with an order,
if only 0, 1, 2 ...
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.errors import UsageError


def check_column_order(order: Any, n_columns: int) -> None:
    """Raise unless `order` names each of `n_columns` columns once; on a device, its type alone."""
    known = isinstance(order, np.ndarray) or is_cuda(order)
    if not known or order.dtype != np.int32 or order.ndim != 1:
        found = f"{order.dtype} {order.shape}" if known else type(order).__name__
        raise TypeError(f"column_order must be an array of int32 of one dimension, got {found}")
    if is_cuda(order):
        return
    kept = order[order >= 0]
    if len(order) and (order.min() < -1 or order.max() >= n_columns):
        raise UsageError(
            f"column_order must lie in -1..{n_columns - 1}, got {order.min()}..{order.max()}"
        )
    if len(kept) != n_columns or (np.bincount(kept, minlength=n_columns) != 1).any():
        raise UsageError(f"column_order must name each of the {n_columns} columns once")


def check_column_scales(scales: Any, n_columns: int) -> None:
    """Raise unless `scales` are float32 (n_columns,)."""
    known = isinstance(scales, np.ndarray) or is_cuda(scales)
    if not known or scales.dtype != np.float32:
        found = scales.dtype if known else type(scales).__name__
        raise TypeError(f"column_scales must be an array of float32, got {found}")
    if scales.shape != (n_columns,):
        raise UsageError(f"column_scales must have shape ({n_columns},), got {scales.shape}")


def order_like(scales: Any) -> Any:
    """Return the order of columns that are stored in order, in the memory of `scales`."""
    order = np.arange(len(scales), dtype=np.int32)
    if not is_cuda(scales):
        return order
    from nbflow_kernels.cuda import to_device

    return to_device(order, scales)


def same_columns(a: NDArray[Any] | None, b: NDArray[Any] | None) -> bool:
    """Return whether two orders or factors of columns, or their absence, are equal."""
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def order_by_group(
    groups: NDArray[np.integer], n_groups: int, block_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the order of columns that makes blocks of one group each, and the group of each block.

    Parameters
    ----------
    groups : array of int, shape (K,)
        Group of each column, in 0..n_groups - 1.
    n_groups : int
        Number of groups.
    block_size : int
        Columns of a block; a group that is not a multiple is filled up with -1.

    Returns
    -------
    order : array of int32, shape (S,)
        See `QuantTensor`.
    block_groups : array of int32, shape (S / block_size,)
        Group of each block.

    Examples
    --------
    >>> order, block_groups = order_by_group(np.array([1, 0, 1, 1, 0]), 2, 2)
    >>> order.tolist(), block_groups.tolist()
    ([1, 4, 0, 2, 3, -1], [0, 1, 1])
    """
    counts = np.bincount(groups, minlength=n_groups)
    n_blocks = -(-counts // block_size)
    order = np.full(int(n_blocks.sum()) * block_size, -1, np.int32)
    starts = (np.cumsum(n_blocks) - n_blocks) * block_size
    within = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
    order[np.repeat(starts, counts) + within] = np.argsort(groups, kind="stable")
    return order, np.repeat(np.arange(n_groups, dtype=np.int32), n_blocks)


def inverse(order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the stored column that holds each column of the weights, int32 (K,).

    Examples
    --------
    >>> inverse(np.array([1, 4, 0, 2, 3, -1], np.int32)).tolist()
    [2, 0, 3, 4, 1]
    """
    stored = np.flatnonzero(order >= 0).astype(np.int32)
    found = np.empty(len(stored), np.int32)
    found[order[stored]] = stored
    return found


def gather_columns(
    x: NDArray[np.float32],
    order: NDArray[np.int32],
    out: NDArray[np.float32],
    scales: NDArray[np.float32] | None = None,
) -> None:
    """Write ``(x * scales)[:, order]`` to `out`, zeros where the order is -1; on the CPU.

    Parameters
    ----------
    x : array of float32, shape (T, K)
        Rows, which may be strided.
    order : array of int32, shape (S,)
        Columns of `x`, in -1..K - 1, not checked.
    out : array of float32, shape (T, S)
        Where to write the result.
    scales : array of float32, shape (K,), optional
        Factors of the columns of `x`.
    """
    if scales is None:
        parallel_for(_gather_columns, len(x), 4.0 * out.size, x, order, out)
    else:
        parallel_for(_gather_scaled, len(x), 4.0 * out.size, x, order, scales, out)


@jit.kernel
def _gather_columns(x, order, out, start, stop):
    for t in range(start, stop):
        for j in range(len(order)):
            k = order[j]
            out[t, j] = x[t, k] if k >= 0 else np.float32(0.0)


@jit.kernel
def _gather_scaled(x, order, scales, out, start, stop):
    for t in range(start, stop):
        for j in range(len(order)):
            k = order[j]
            out[t, j] = x[t, k] * scales[k] if k >= 0 else np.float32(0.0)
