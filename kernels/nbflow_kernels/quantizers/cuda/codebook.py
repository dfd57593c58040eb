"""The published encoders of formats with a table of levels, on CUDA devices: a block a thread.

These are iq4, the 4-bit floats and the formats of two to four levels.  The arithmetic is the CPU's
(`levels_plain`).  Its scales of 4-bit floats are made with float64 logarithms and a table; here a
thread looks up which byte the largest magnitude leads to, in a table read off the CPU's function.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels import cuda
from nbflow_kernels.formats.bit_fields import bit_sources
from nbflow_kernels.formats.block_format import E4M3, E8M0, BlockFormat, value_table
from nbflow_kernels.formats.cuda_dequantize import key_of
from nbflow_kernels.quantizers.cuda.simt_adapter import twin
from nbflow_kernels.quantizers.reference import codebook as levels_plain

if TYPE_CHECKING:
    from nbflow_kernels.formats.registry import Bytes, Floats

_THREADS = 64
_LARGEST = np.float32(np.finfo(np.float32).max).view(np.int32)


def encode(x: Any, format: BlockFormat, data: Any) -> None:
    """Write the bytes (rows, row bytes) of weights (rows, columns)."""
    device = cuda.device_of(x)
    tables = _tables_there(format, device)
    n_blocks = data.shape[1] // format.block_bytes
    grid = (cuda.ceil_div(n_blocks, _THREADS), min(len(x), 65535))
    _encoder(format)(grid, _THREADS, (x, *tables, data, len(x), x.shape[1], data.shape[1]))


def thresholds(scale_bytes: Callable[[Floats], Bytes]) -> NDArray[np.int32]:
    """Return from which float32 on, by its bits, a largest magnitude leads to at least each byte.

    `scale_bytes` gives the bytes of blocks (n, 1); they must not decrease with the magnitude.  A
    byte that no number leads to has a value above all numbers.
    """
    low, high = np.zeros(256, np.int64), np.full(256, np.int64(_LARGEST) + 1)
    wanted = np.arange(256)
    while (low < high).any():  # the first number whose byte is not below the wanted one
        middle = np.minimum((low + high) // 2, _LARGEST)
        found = scale_bytes(middle.astype(np.int32).view(np.float32)[:, None])
        reached = (found >= wanted) & (low < high)
        high = np.where(reached, middle, high)
        low = np.where(~reached & (low < high), middle + 1, low)
    return high.astype(np.int32)


def _tables_there(format: BlockFormat, device: cuda.KernelDevice) -> tuple[Any, ...]:
    """Return on the device: values of the codes, steps and thresholds of scale bytes, the bits."""
    key = ("quants encode", format.name)
    if key not in device.constants:
        steps, bounds = np.zeros(1, np.float32), np.zeros(1, np.int32)
        if format.name == "mxfp4":
            steps, bounds = E8M0, thresholds(levels_plain.e8m0)
        elif format.name == "nvfp4":
            steps = E4M3
            bounds = thresholds(lambda x: levels_plain.e4m3(x, 2 * E4M3))
        tables = (value_table(format.form), steps, bounds, bit_sources(format.fields))
        device.constants[key] = tuple(device.asarray(np.ascontiguousarray(t)) for t in tables)
    found: tuple[Any, ...] = device.constants[key]
    return found


@functools.cache
def _encoder(format: BlockFormat) -> cuda.Kernel:
    """Return the kernel that encodes a block in each thread."""
    nc: Any = importlib.import_module("numba.cuda")
    block, block_bytes = format.block_size, format.block_bytes
    n_fields = sum(field.n for field in format.fields.fields)
    n_values = 1 << format.form.code_bits
    fit = _fit(format)

    @cuda.numba_kernel(
        "f32* x, f32* values, f32* steps, i32* bounds, i32* sources, u8* data, i32 T, "
        "i32 columns, i64 row_bytes",
        key=key_of(format), fuse=False, name=f"encode_{format.name}",
    )  # fmt: skip
    def encode(x, values, steps, bounds, sources, data, T, columns, row_bytes):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * block >= columns:
            return
        weights, fields = nc.local.array(block, np.float32), nc.local.array(n_fields, np.int32)
        levels = nc.local.array(n_values, np.float32)
        for k in range(n_values):
            levels[k] = values[k]
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            for i in range(block):  # padding is the row's last weight again
                weights[i] = x[np.int64(t) * columns + min(b * block + i, columns - 1)]
            fit(weights, levels, steps, bounds, fields)
            to = np.int64(t) * row_bytes + b * block_bytes
            for j in range(block_bytes):
                byte = np.int32(0)
                for k in range(8):
                    source = sources[8 * j + k]
                    byte |= ((fields[source >> 4] >> (source & 15)) & 1) << k
                data[to + j] = byte

    return encode


def _fit(format: BlockFormat) -> Any:
    """Return ``(weights, levels, steps, bounds, fields)``, which chooses the numbers of a block."""
    if format.name.startswith("iq4"):
        return _fit_iq4(format)
    if format.name in ("mxfp4", "nvfp4"):
        return _fit_fp4(format)
    return _fit_few(format)


def _fit_iq4(format: BlockFormat) -> Any:
    from nbflow_kernels.cuda.numba_conversions import device

    nc: Any = importlib.import_module("numba.cuda")
    block, n_subs = format.block_size, format.block_size // 32
    scale_of, codes_of = twin(levels_plain.iq4_scale), twin(levels_plain.iq4_codes)

    @device
    def fit(weights, levels, steps, bounds, fields):
        counts, chosen = nc.local.array(32, np.float32), nc.local.array(32, np.int32)
        found, scales = nc.local.array(n_subs, np.float32), nc.local.array(n_subs, np.int16)
        for s in range(n_subs):
            for j in range(32):
                counts[j] = weights[32 * s + j] * weights[32 * s + j]
            found[s] = scale_of(weights[32 * s : 32 * s + 32], counts, levels, chosen)
        bits = codes_of(weights, 0, levels, found, fields, scales, chosen)
        if n_subs > 1:
            for s in range(n_subs):
                fields[block + s] = scales[s] + 32
            fields[block + n_subs] = bits
        else:
            fields[block] = bits

    return fit


def _fit_fp4(format: BlockFormat) -> Any:
    from nbflow_kernels.cuda import numba_conversions as numbers

    block, size = format.block_size, format.form.block
    code_of = twin(levels_plain.fp4_code)

    @numbers.device
    def fit(weights, levels, steps, bounds, fields):
        for s in range(block // size):
            largest = np.float32(0)
            for i in range(s * size, (s + 1) * size):
                largest = max(largest, abs(weights[i]))
            bits = numbers.bits_of_f32(largest)
            low, high = 0, 256  # the last byte whose threshold is reached
            while high - low > 1:
                middle = (low + high) >> 1
                if bits >= bounds[middle]:
                    low = middle
                else:
                    high = middle
            fields[block + s] = low
            for i in range(s * size, (s + 1) * size):
                fields[i] = code_of(weights[i], levels, steps[low])

    return fit


def _fit_few(format: BlockFormat) -> Any:
    from nbflow_kernels.cuda.numba_conversions import device

    nc: Any = importlib.import_module("numba.cuda")
    block, in_threes = format.block_size, format.name == "tq1_0"
    published = levels_plain.signs_block if format.name == "q1_0" else levels_plain.rounded_block
    codes_of = twin(published)

    @device
    def fit(weights, levels, steps, bounds, fields):
        fields[block] = codes_of(weights, fields[:block])

    @device
    def fit_in_threes(weights, levels, steps, bounds, fields):
        codes = nc.local.array(block, np.int32)
        fields[52] = codes_of(weights, codes)
        for r in range(52):
            # byte r of 32 holds weights r + 32 n, of the next 16 and 4 those 16 and 4 apart
            first, apart, n = r, 32, 5
            if r >= 48:
                first, apart, n = 240 + r - 48, 4, 4
            elif r >= 32:
                first, apart = 160 + r - 32, 16
            number, power = 0, 81
            for k in range(n):
                number += codes[first + apart * k] * power
                power //= 3
            fields[r] = (number * 256 + 242) // 243

    return fit_in_threes if in_threes else fit
