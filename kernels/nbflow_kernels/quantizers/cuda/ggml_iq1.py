"""GGML's iq1 quantizers on CUDA devices: a sub-block per warp, a three-way split per lane.

The arithmetic is that of `quantizers.reference.ggml_iq1`.  A warp evaluates 32 splits of the sorted
weights at a time and takes those that gain more than the best so far, in the CPU's order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda as nc
from numba.cuda.libdevice import fsqrt_rn as sqrt

from nbflow_kernels import cuda
from nbflow_kernels.cuda.numba_conversions import device
from nbflow_kernels.quantizers.cuda.ggml_iq2_iq3 import (
    BLOCKS_PER_SM,
    DECLARED,
    N_WARPS,
    THREADS,
    device_tables,
    packer,
)
from nbflow_kernels.quantizers.cuda.simt_adapter import key_of, twin
from nbflow_kernels.quantizers.grid_formats import QUANTIZERS
from nbflow_kernels.quantizers.reference import ggml_iq1 as iq1
from nbflow_kernels.quantizers.reference import ggml_iq2_iq3 as iq2_iq3

if TYPE_CHECKING:
    from nbflow_kernels.formats.block_format import BlockFormat

_ALL = 0xFFFFFFFF


def quantize(x: Any, format: BlockFormat, data: Any) -> None:
    """Write the bytes (rows, row bytes) of weights (rows, columns)."""
    device = cuda.device_of(x)
    tables = device_tables(format, "iq1", device)
    n_blocks = data.shape[1] // format.block_bytes * len(x)
    grid = min(n_blocks, BLOCKS_PER_SM * device.n_sms)
    _kernel(format)(grid, THREADS, (x, *tables, data, len(x), x.shape[1], data.shape[1]))


@functools.cache
def _kernel(format: BlockFormat) -> cuda.Kernel:
    """Return the kernel that quantizes one block of 256 weights per thread block."""
    sub, block_bytes = format.form.sub_block, format.block_bytes
    n_subs, n_threads, groups = 256 // sub, THREADS, sub // 8
    weighted, d_at = QUANTIZERS[format.name].needs_importance, 64 + 256 // sub
    n_fields = d_at + 1
    nothing, factor = iq1.NOTHING[sub], iq1.FACTOR[sub]
    mean_square, largest_of = twin(iq2_iq3.mean_square), twin(iq2_iq3.largest_of)
    scales_of, fit, pack = twin(iq1.scales_of), _sub_block(sub), packer(format)
    fill_levels = _levels()

    @cuda.numba_kernel(
        DECLARED, key=key_of(format), fuse=False, name=f"quantize_{format.name}"
    )  # fmt: skip
    def quantize(x, first, lists, grid, sources, data, T, columns, row_bytes):
        weights, counts = nc.shared.array(256, np.float32), nc.shared.array(256, np.float32)
        order, codes = nc.shared.array(256, np.int32), nc.shared.array(256, np.int32)
        fields, found = nc.shared.array(n_fields, np.int32), nc.shared.array(n_subs, np.float32)
        of_block = nc.shared.array(1, np.float32)
        sum_x = nc.shared.array((n_subs, 2, 33), np.float32)
        sum_w = nc.shared.array((n_subs, 2, 33), np.float32)
        levels = nc.local.array((2, 3), np.float32)
        fill_levels(levels)
        thread = nc.threadIdx.x
        lane, warp = thread % 32, thread // 32
        blocks = row_bytes // block_bytes
        for b in range(nc.blockIdx.x, T * blocks, nc.gridDim.x):
            row, column = b // blocks, b % blocks * 256
            for i in range(thread, 256, n_threads):  # padding repeats the row's last weight
                weights[i] = x[row * columns + min(column + i, columns - 1)]
            for i in range(thread, n_fields, n_threads):
                fields[i] = 0
            nc.syncthreads()
            if thread == 0:
                of_block[0] = np.float32(2) * mean_square(weights)
            nc.syncthreads()
            mean = of_block[0]
            for s in range(warp, n_subs, N_WARPS):
                at, end = s * sub, s * sub + sub
                for j in range(at + lane, end, 32):
                    square = weights[j] * weights[j]
                    counts[j] = square
                    if weighted:  # importance is 1, and 0 for padding
                        counts[j] = sqrt(mean + square) if column + j < columns else np.float32(0)
                nc.syncwarp()
                scale = np.float32(0)
                if largest_of(weights[at:end]) >= nothing:
                    scale = fit(
                        weights[at:end], counts[at:end], order[at:end], codes[at:end], sum_x[s],
                        sum_w[s], levels, first, lists, grid,
                        fields[groups * s : groups * s + groups],
                        fields[32 + groups * s : 32 + groups * s + groups], lane,
                    )  # fmt: skip
                if lane == 0:
                    found[s] = scale
            nc.syncthreads()
            if thread == 0:
                fields[d_at] = scales_of(
                    weights, counts, found, factor, levels, grid, fields[:32], fields[32:64],
                    fields[64:d_at],
                )  # fmt: skip
            nc.syncthreads()
            to = row * row_bytes + column // 256 * block_bytes
            pack(fields, sources, data, to, thread, n_threads)
            nc.syncthreads()

    return quantize


def _levels() -> Any:
    """Return the function that writes the levels by shift to an array (2, 3)."""
    (a, b, c), (d, e, f) = (tuple(row) for row in iq1.SHIFTED)

    @device
    def fill(levels):
        levels[0, 0], levels[0, 1], levels[0, 2] = a, b, c
        levels[1, 0], levels[1, 1], levels[1, 2] = d, e, f

    return fill


def _sub_block(sub: int) -> Any:
    """Return the warp's form of `reference.ggml_iq1._sub_block`."""
    groups, split = sub // 8, _split(sub)
    sums = twin(iq1.sums)

    @device
    def fit(
        x, counts, order, codes, sum_x, sum_w, levels, first, lists, grid, points, shifts, lane
    ):
        rank = 0
        if lane < sub:  # equal weights stay in order
            for j in range(sub):
                rank += x[j] < x[lane] or (x[j] == x[lane] and j < lane)
            order[rank] = lane
        nc.syncwarp()
        low, high, shift, scale = split(x, counts, order, sum_x, sum_w, levels, lane)
        if low < 0:
            return np.float32(0)
        if lane < sub:
            code = np.int32(rank >= low) + np.int32(rank >= high)
            codes[lane] = code if scale >= 0 else 2 - code
        if scale < 0:
            scale, shift = -scale, 3 - shift
        nc.syncwarp()
        on_grid = True
        if lane < groups:
            bit = (shift >> (1 - lane)) & 1 if sub == 16 else shift & 1
            shifts[lane] = bit
            points[lane], on_grid = _point_of(
                x, counts, codes, lane, scale, levels[bit], first, lists, grid
            )
        nc.syncwarp()
        if not nc.all_sync(_ALL, on_grid):
            qx, qq = sums(x, counts, levels, grid, points, shifts)
            if qx > 0 and qq > 0:
                scale = qx / qq
        return scale

    return fit


def _split(sub: int) -> Any:
    """Return the search for the best split: (low, high, shift, scale); low is -1 if none fits."""
    n_shifts, factor = (2, 3) if sub == 32 else (4, 1)
    gain = _gain(sub)
    add_up = twin(iq1.add_up_32 if sub == 32 else iq1.add_up_16)

    @device
    def split(x, counts, order, sum_x, sum_w, levels, lane):
        if lane == 0:
            if sub == 32:
                add_up(x, counts, order, sum_x[0], sum_w[0])
            else:
                add_up(x, counts, order, sum_x, sum_w)
        nc.syncwarp()
        best, scale = np.float32(-3.4028235e38), np.float32(0)
        best_low, best_high, best_shift = -1, -1, 0
        for low in range(sub + 1):
            n = (sub + 1 - low) * n_shifts
            for start in range(0, n, 32):
                k = start + lane
                high, shift = low + k // n_shifts, k % n_shifts
                qx, qq = np.float32(0), np.float32(0)
                if k < n:
                    qx, qq = gain(sum_x, sum_w, low, high, shift, levels)
                better = nc.ballot_sync(_ALL, qq > 0 and qx * qx > best * qq)
                while better != 0:  # the first lane, then lanes behind it that gain more
                    leader = nc.ffs(better) - 1
                    top_x = nc.shfl_sync(_ALL, qx, leader)
                    top_q = nc.shfl_sync(_ALL, qq, leader)
                    scale = top_x / top_q
                    best = scale * top_x
                    k = start + leader
                    best_low, best_high, best_shift = low, low + k // n_shifts, k % n_shifts
                    more = lane > leader and qq > 0 and qx * qx > best * qq
                    better = nc.ballot_sync(_ALL, more)
        return best_low, best_high, factor * best_shift, scale

    return split


def _gain(sub: int) -> Any:
    """Return ``(sum_x, sum_w, low, high, shift, levels)``, the sums of one split."""
    gain_32 = twin(iq1.gain_32)

    @device
    def of_32(sum_x, sum_w, low, high, shift, levels):
        return gain_32(sum_x[0, :33], sum_w[0, :33], low, high, levels[shift])

    @device
    def of_16(sum_x, sum_w, low, high, shift, levels):
        x0, q0 = _half_gain(sum_x[0], sum_w[0], low, high, levels[shift >> 1])
        x1, q1 = _half_gain(sum_x[1], sum_w[1], low, high, levels[shift & 1])
        return x0 + x1, q0 + q1

    return of_32 if sub == 32 else of_16


@device
def _half_gain(sum_x, sum_w, low, high, values):
    """Return the sums of level * x and level**2 of a split, of one group of 8."""
    v0, v1, top = values[0], values[1], values[2]
    qx = sum_x[16] * top - (sum_x[low] + sum_x[high])
    qq = sum_w[16] * top * top
    qq += sum_w[low] * (v0 * v0 - v1 * v1)  # the differences of squares are exact
    qq += sum_w[high] * (v1 * v1 - top * top)
    return qx, qq


@device
def _point_of(x, weight, codes, k, scale, values, first, near, grid):
    """Return the grid point of group `k`, and True if its codes are on the grid."""
    bits = 0
    for i in range(8):
        bits |= codes[8 * k + i] << (2 * i)
    best, least = near[first[bits]], np.float32(3.4028235e38)
    if grid[best] == bits:
        return best, True
    for n in range(first[bits], first[bits + 1]):
        error = np.float32(0)
        for i in range(8):
            level = values[(np.int64(grid[near[n]]) >> (2 * i)) & 3]
            difference = scale * level - x[8 * k + i]
            error += weight[8 * k + i] * difference * difference
        if error < least:
            best, least = near[n], error
    return best, False
