"""GGML's iq2 and iq3 quantizers on CUDA devices: a sub-block per warp, a trial scale per lane.

The arithmetic is that of `quantizers.reference.ggml_iq2_iq3`.  A thread block has 256 weights.
Each lane searches the grid's neighbours for one trial scale; then all lanes compare the gains in
the CPU's order, so that the same scale wins.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda as nc
from numba.cuda.libdevice import fsqrt_rn as sqrt

from nbflow_kernels import cuda
from nbflow_kernels.cuda.numba_conversions import device
from nbflow_kernels.formats.bit_fields import bit_sources
from nbflow_kernels.quantizers.cuda.simt_adapter import key_of, twin
from nbflow_kernels.quantizers.grid_formats import QUANTIZERS
from nbflow_kernels.quantizers.grid_neighbours import neighbours
from nbflow_kernels.quantizers.reference import ggml_iq2_iq3 as iq2_iq3
from nbflow_kernels.quantizers.reference.ggml_iq2_iq3 import (
    AGAIN_ALWAYS,
    AGAIN_OFF_GRID,
    LOSSES,
    RECIPES,
)

if TYPE_CHECKING:
    from nbflow_kernels.formats.block_format import BlockFormat

BLOCKS_PER_SM = 8  # thread blocks
N_WARPS = 8  # warps of a thread block: each takes one or two of its sub-blocks
THREADS = 32 * N_WARPS
DECLARED = (
    "f32* x, i32* first, u16* lists, u16* grid, i32* sources, u8* data, i32 T, "
    "i32 columns, i64 row_bytes"
)
"""Parameters of the kernels for grid formats."""


def quantize(x: Any, format: BlockFormat, data: Any) -> None:
    """Write the bytes (rows, row bytes) of weights (rows, columns)."""
    device = cuda.device_of(x)
    tables = device_tables(format, format.name, device)
    n_blocks = data.shape[1] // format.block_bytes * len(x)
    grid = min(n_blocks, BLOCKS_PER_SM * device.n_sms)
    _kernel(format)(grid, THREADS, (x, *tables, data, len(x), x.shape[1], data.shape[1]))


def device_tables(format: BlockFormat, name: str, device: cuda.KernelDevice) -> tuple[Any, ...]:
    """Return device arrays: the neighbours of the grid called `name`, and the bit map."""
    key = ("quantizer", format.name)
    if key not in device.constants:
        near = neighbours(name)
        tables = (near.first, near.points, near.grid, bit_sources(format.fields, {"sign": 32}))
        device.constants[key] = tuple(device.asarray(np.ascontiguousarray(t)) for t in tables)
    found: tuple[Any, ...] = device.constants[key]
    return found


@functools.cache
def packer(format: BlockFormat) -> Any:
    """Return the function with which `n_threads` threads write a block from its fields."""
    block_bytes = format.block_bytes

    @device
    def pack(fields, sources, data, to, thread, n_threads):
        for j in range(thread, block_bytes, n_threads):
            byte = np.int32(0)
            for k in range(8):
                source = sources[8 * j + k]
                byte |= ((fields[source >> 4] >> (source & 15)) & 1) << k
            data[to + j] = byte

    return pack


@functools.cache
def _kernel(format: BlockFormat) -> cuda.Kernel:
    """Return the kernel that quantizes one block of 256 weights per thread block."""
    recipe, block_bytes = RECIPES[format.name], format.block_bytes
    sub, weighted = recipe.sub_block, QUANTIZERS[format.name].needs_importance
    n_subs, n_threads = 256 // sub, THREADS
    n_points = format.fields["point"].n
    signs_at, scales_at, d_at = n_points, n_points + 32, n_points + 32 + n_subs
    n_fields = d_at + 1
    mean_square, split_signs = twin(iq2_iq3.mean_square), twin(iq2_iq3.split_signs)
    scales_of, pack, fit = twin(iq2_iq3.scales_of), packer(format), _sub_block(format)
    twice_mean, unweighted, factor = recipe.twice_mean, recipe.unweighted, recipe.factor
    seven_signs, groups = recipe.seven_signs, n_points // n_subs

    @cuda.numba_kernel(
        DECLARED, key=key_of(format), fuse=False, name=f"quantize_{format.name}"
    )  # fmt: skip
    def quantize(x, first, lists, grid, sources, data, T, columns, row_bytes):
        weights, counts = nc.shared.array(256, np.float32), nc.shared.array(256, np.float32)
        roots, values = nc.shared.array(256, np.float32), nc.shared.array(256, np.float32)
        gain_x = nc.shared.array(n_threads, np.float32)
        gain_q = nc.shared.array(n_threads, np.float32)
        off, fields = nc.shared.array(n_threads, np.int32), nc.shared.array(n_fields, np.int32)
        found, of_block = nc.shared.array(n_subs, np.float32), nc.shared.array(1, np.float32)
        thread = nc.threadIdx.x
        lane, warp = thread % 32, thread // 32
        own = 32 * warp
        blocks = row_bytes // block_bytes
        for b in range(nc.blockIdx.x, T * blocks, nc.gridDim.x):
            row, column = b // blocks, b % blocks * 256
            for i in range(thread, 256, n_threads):  # padding repeats the row's last weight
                weights[i] = x[row * columns + min(column + i, columns - 1)]
            nc.syncthreads()
            if thread == 0:
                of_block[0] = twice_mean * mean_square(weights)
            nc.syncthreads()
            mean = of_block[0]
            for s in range(warp, n_subs, N_WARPS):
                at = s * sub
                for j in range(at + lane, at + sub, 32):
                    square = weights[j] * weights[j]
                    if weighted:  # importance is 1, and 0 for padding
                        counts[j] = sqrt(mean + square) if column + j < columns else np.float32(0)
                    else:
                        counts[j] = unweighted * mean + square
                    roots[j] = sqrt(counts[j])
                nc.syncwarp()
                signs = fields[signs_at + at // 8 : signs_at + (at + sub) // 8]
                if lane == 0:
                    split_signs(
                        weights[at : at + sub], counts[at : at + sub], seven_signs,
                        values[at : at + sub], signs,
                    )  # fmt: skip
                nc.syncwarp()
                scale = fit(
                    values[at : at + sub], counts[at : at + sub], roots[at : at + sub], first,
                    lists, grid, gain_x[own : own + 32], gain_q[own : own + 32],
                    off[own : own + 32], fields[groups * s : groups * s + groups], signs, lane,
                )  # fmt: skip
                if lane == 0:
                    found[s] = abs(scale)
            nc.syncthreads()
            if thread == 0:
                for k in range(n_subs):
                    fields[scales_at + k] = 0
                fields[d_at] = scales_of(found, factor, fields[scales_at:d_at])
            nc.syncthreads()
            to = row * row_bytes + column // 256 * block_bytes
            pack(fields, sources, data, to, thread, n_threads)
            nc.syncthreads()

    return quantize


def _sub_block(format: BlockFormat) -> Any:
    """Return the warp's form of `reference.ggml_iq2_iq3._sub_block`."""
    recipe = RECIPES[format.name]
    sub, dimensions = recipe.sub_block, neighbours(format.name).dimensions
    groups, n_levels, again = sub // dimensions, recipe.n_levels, recipe.again
    tries, distance, nothing = recipe.tries, recipe.distance, recipe.nothing
    highest = np.float32(2 * n_levels - 1)
    n_tries, always = 2 * tries + 1, AGAIN_ALWAYS
    all_off = (1 << groups) - 1 if again != AGAIN_OFF_GRID else 0
    first_scale, point_of = twin(iq2_iq3.first_scale), twin(iq2_iq3.point_of)
    sums = twin(iq2_iq3.sums)

    @device
    def fit(values, counts, roots, first, lists, grid, gain_x, gain_q, off, points, signs, lane):
        losses, codes = nc.local.array(LOSSES, np.float32), nc.local.array(sub, np.uint8)
        tried = nc.local.array(groups, np.int32)
        scale, middle = first_scale(values, counts, nothing, again, n_levels, codes)
        if lane < groups:
            points[lane] = 0
        nc.syncwarp()
        if scale <= 0:
            if lane < sub // 8:
                signs[lane] = 0
            return np.float32(0)
        if lane < n_tries:
            inverse = (highest + np.float32(lane - tries) * distance) / middle
            step, mask = np.float32(1) / inverse, 0
            for k in range(groups):
                tried[k], is_off = point_of(
                    values, roots, k, inverse, step, first, lists, grid, dimensions, losses
                )
                if is_off:
                    mask |= 1 << k
            gain_x[lane], gain_q[lane] = sums(values, counts, grid, dimensions, tried)
            off[lane] = mask
        nc.syncwarp()
        best, chosen = np.float32(0), -1
        for i in range(n_tries):
            qx, qq = gain_x[i], gain_q[i]
            if qq > 0 and qx * qx > best * qq:
                scale = qx / qq
                best = scale * qx
                chosen = i
        mask = all_off
        if chosen >= 0:
            mask = off[chosen]
            if lane == chosen:
                for k in range(groups):
                    points[k] = tried[k]
        nc.syncwarp()
        if scale > 0 and (mask != 0 or again == always):
            if lane < groups and (again != AGAIN_OFF_GRID or (mask >> lane) & 1):
                inverse = np.float32(1) / scale
                points[lane], is_off = point_of(
                    values, roots, lane, inverse, scale, first, lists, grid, dimensions, losses
                )
            nc.syncwarp()
            qx, qq = sums(values, counts, grid, dimensions, points)
            if qq > 0:
                scale = qx / qq
        if scale < 0 and lane < sub // 8:
            signs[lane] ^= 255
        nc.syncwarp()
        return scale

    return fit
