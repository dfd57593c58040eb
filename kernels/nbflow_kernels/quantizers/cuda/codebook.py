"""Published quantizers of codebook formats on CUDA devices, one block per thread.

These are iq4, the 4-bit floats and the formats of two to four levels.  The arithmetic is that of
`quantizers.reference.codebook`.  The CPU computes scales of 4-bit floats with float64 logarithms;
here a thread looks the byte up by the largest magnitude, in a table made with the CPU's function.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda as nc

from nbflow_kernels import cuda
from nbflow_kernels.cuda import numba_conversions as numbers
from nbflow_kernels.cuda.numba_conversions import device
from nbflow_kernels.formats.bit_fields import bit_sources
from nbflow_kernels.formats.block_format import E4M3, E8M0, BlockFormat, value_table
from nbflow_kernels.quantizers.cuda.ggml_iq2_iq3 import packer
from nbflow_kernels.quantizers.cuda.simt_adapter import key_of, twin
from nbflow_kernels.quantizers.reference import codebook

_THREADS = 64


def quantize(x: Any, format: BlockFormat, data: Any) -> None:
    """Write the bytes (rows, row bytes) of weights (rows, columns)."""
    device = cuda.device_of(x)
    tables = device_tables(format, device)
    n_blocks = data.shape[1] // format.block_bytes
    grid = (cuda.ceil_div(n_blocks, _THREADS), min(len(x), 65535))
    _kernel(format)(grid, _THREADS, (x, *tables, data, len(x), x.shape[1], data.shape[1]))


def device_tables(format: BlockFormat, device: cuda.KernelDevice) -> tuple[Any, ...]:
    """Return device arrays: values of the codes, steps and thresholds of scale bytes, bit map."""
    key = ("quantizer", format.name)
    if key not in device.constants:
        steps, bounds = np.zeros(1, np.float32), np.zeros(1, np.int32)
        if format.name == "mxfp4":
            steps, bounds = E8M0, codebook.thresholds(codebook.e8m0)
        elif format.name == "nvfp4":
            steps, bounds = E4M3, codebook.thresholds(codebook.e4m3)
        tables = (value_table(format.form), steps, bounds, bit_sources(format.fields))
        device.constants[key] = tuple(device.asarray(np.ascontiguousarray(t)) for t in tables)
    found: tuple[Any, ...] = device.constants[key]
    return found


@functools.cache
def _kernel(format: BlockFormat) -> cuda.Kernel:
    """Return the kernel that quantizes one block per thread."""
    block, block_bytes = format.block_size, format.block_bytes
    n_fields = sum(field.n for field in format.fields.fields)
    n_values = 1 << format.form.code_bits
    fit, pack = _fit(format), packer(format)

    @cuda.numba_kernel(
        "f32* x, f32* values, f32* steps, i32* bounds, i32* sources, u8* data, i32 T, "
        "i32 columns, i64 row_bytes",
        key=key_of(format), fuse=False, name=f"quantize_{format.name}",
    )  # fmt: skip
    def quantize(x, values, steps, bounds, sources, data, T, columns, row_bytes):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * block >= columns:
            return
        weights, fields = nc.local.array(block, np.float32), nc.local.array(n_fields, np.int32)
        levels = nc.local.array(n_values, np.float32)
        for k in range(n_values):
            levels[k] = values[k]
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            for i in range(block):  # padding repeats the row's last weight
                weights[i] = x[np.int64(t) * columns + min(b * block + i, columns - 1)]
            fit(weights, levels, steps, bounds, fields)
            pack(fields, sources, data, np.int64(t) * row_bytes + b * block_bytes, 0, 1)

    return quantize


def _fit(format: BlockFormat) -> Any:
    """Return ``(weights, levels, steps, bounds, fields)``, which sets the fields of a block."""
    if format.name.startswith("iq4"):
        return _fit_iq4(format)
    if format.name in ("mxfp4", "nvfp4"):
        return _fit_fp4(format)
    return _fit_few(format)


def _fit_iq4(format: BlockFormat) -> Any:
    block, n_subs = format.block_size, format.block_size // 32
    scale_of, codes_of = twin(codebook.iq4_scale), twin(codebook.iq4_codes)

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
    block, size = format.block_size, format.form.block
    code_of = twin(codebook.fp4_code)

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
    block, in_threes = format.block_size, format.name == "tq1_0"
    published = codebook.binary_block if format.name == "q1_0" else codebook.ternary_block
    codes_of = twin(published)

    @device
    def fit(weights, levels, steps, bounds, fields):
        fields[block] = codes_of(weights, fields[:block])

    @device
    def fit_in_threes(weights, levels, steps, bounds, fields):
        codes = nc.local.array(block, np.int32)
        fields[52] = codes_of(weights, codes)
        for r in range(52):
            # byte r < 32 holds weights r + 32 n; in the next 16 and 4 bytes the stride is 16 and 4
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
