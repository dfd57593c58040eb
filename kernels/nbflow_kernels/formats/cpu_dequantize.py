"""Row gather with dequantization on the CPU, from the storage bytes or from the packed layout."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import at_once, not_capturable, parallel_for
from nbflow_kernels.cpu.simd_memory import allocate, read_f32, release
from nbflow_kernels.formats.column_order import inverse
from nbflow_kernels.formats.decode_cpu import decode_blocks
from nbflow_kernels.formats.floats import PackedFloats
from nbflow_kernels.formats.layout_cpu import ROWS, CpuLayout
from nbflow_kernels.formats.outliers import add_outliers_of
from nbflow_kernels.formats.tensor import QuantTensor

_WEIGHTS_AT_ONCE = 1 << 20


def gather(qt: QuantTensor, ids: NDArray[np.integer], out: NDArray[np.float32]) -> None:
    """Dequantize rows `ids`, in 0..n_rows - 1, to `out` (T, columns)."""
    if qt.column_order is not None:
        _reordered(qt, ids, out)
        return
    _in_stored_order(qt, ids, out)
    if qt.outliers is not None:
        add_outliers_of(qt.outliers, ids, out)


def _reordered(qt: QuantTensor, ids: NDArray[np.integer], out: NDArray[np.float32]) -> None:
    """Gather rows whose columns are stored in another order, some at a time."""
    not_capturable()
    assert qt.column_order is not None
    columns = inverse(qt.column_order)
    step = max(1, _WEIGHTS_AT_ONCE // qt.n_stored_columns)
    with at_once():
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            rows = np.empty((len(some), qt.n_stored_columns), np.float32)
            _in_stored_order(qt, some, rows)
            out[start : start + step] = rows[:, columns]
            if qt.column_scales is not None:
                out[start : start + step] *= qt.column_scales


def _in_stored_order(qt: QuantTensor, ids: NDArray[np.integer], out: NDArray[np.float32]) -> None:
    """Dequantize rows without the outliers to `out` (T, stored columns)."""
    if qt.has_storage:
        not_capturable()
        qt.format.dequantize_rows(qt.data[ids], out)
    else:
        _from_packed(qt, ids, out)


def _from_packed(qt: QuantTensor, ids: NDArray[np.integer], out: NDArray[np.float32]) -> None:
    """Gather rows from the packed layout of a tensor without storage bytes."""
    packed = qt.packed()
    if isinstance(packed, PackedFloats):
        not_capturable()
        out[...] = packed.rows(ids)
        return
    parallel_for(
        _gather(packed.form), len(ids), float(ROWS * out.size),
        packed.data, packed.n_blocks, ids, out,
    )  # fmt: skip


@functools.cache
def _gather(form: CpuLayout) -> Any:
    """Make the gather kernel, which decodes all 16 rows of a group to extract one."""
    block, block_bytes = form.block, form.block_bytes

    @jit.kernel(unroll=False)
    def kernel(packed, n_blocks, ids, out, start, stop):
        room = allocate(4 * ROWS * block)  # float32 (block, ROWS)
        for t in range(start, stop):
            row = np.int64(ids[t])
            group, lane = row // ROWS, row % ROWS
            for b in range(n_blocks):
                at = simd.address(packed) + (group * n_blocks + b) * block_bytes
                decode_blocks(form, at, 1, room)
                first = b * block
                for column in range(min(block, out.shape[1] - first)):
                    out[t, first + column] = read_f32(room + 4 * (ROWS * column + lane))
        release(room)

    return kernel
