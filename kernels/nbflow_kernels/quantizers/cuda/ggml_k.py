"""GGML's K-quant quantizers on CUDA devices, one super-block per thread."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda as nc

from nbflow_kernels import cuda
from nbflow_kernels.cuda import numba_conversions as numbers
from nbflow_kernels.cuda.numba_conversions import device
from nbflow_kernels.formats.bit_fields import NO_FIELD, field_constants, write_field
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.cuda import simt_adapter
from nbflow_kernels.quantizers.cuda import simt_lanes as own
from nbflow_kernels.quantizers.cuda.simt_adapter import key_of, twin
from nbflow_kernels.quantizers.k_formats import QUANTIZERS
from nbflow_kernels.quantizers.reference import ggml_k

if TYPE_CHECKING:
    from nbflow_kernels.formats.ggml.k_format import KQuantFormat

_THREADS = 64
_BLOCKS_PER_SM = 2  # thread blocks; a thread has 3.4 KB of scratch memory


def quantize(x: Any, format: KQuantFormat, data: Any) -> None:
    """Write the bytes (rows, row bytes) of weights (rows, columns)."""
    device = cuda.device_of(x)
    n_blocks = data.shape[1] // format.block_bytes * len(x)
    grid = min(cuda.ceil_div(n_blocks, _THREADS), _BLOCKS_PER_SM * device.n_sms)
    size = simt_adapter.scratch_size(grid * _THREADS, ggml_k.VECTORS)
    scratch = device.empty((size,), np.float32)
    _kernel(format)(grid, _THREADS, (x, scratch, data, len(x), x.shape[1], data.shape[1]))


@functools.cache
def _kernel(format: KQuantFormat) -> cuda.Kernel:
    """Return the kernel that quantizes one super-block per thread."""
    offset_of = numbers.device(simt_adapter.scratch_offset)
    vectors, vector, size = ggml_k.VECTORS, simd_panel.VECTOR, ggml_k.SUPER
    codes_at, scales_at, mins_at = ggml_k.CODES, ggml_k.SCALE_CODES, ggml_k.MIN_CODES
    bits_at, bits_min_at = ggml_k.BITS, ggml_k.BITS_MIN
    sub_block, n_subs, block_bytes = format.form.sub_block, format.sub_blocks, format.block_bytes
    has_mins = format.has_mins
    fit, choose, pack = _fit(format), twin(ggml_k._choose_codes), _pack(format)
    top = (1 << format.form.code_bits) - 1 if has_mins else format.form.zero - 1
    low = 0 if has_mins else -format.form.zero

    @cuda.numba_kernel(
        "f32* x, f32* scratch, u8* data, i32 T, i32 columns, i64 row_bytes",
        key=key_of(format), fuse=False, name=f"quantize_{format.name}",
    )  # fmt: skip
    def quantize(x, scratch, data, T, columns, row_bytes):
        thread = np.int64(nc.blockIdx.x) * nc.blockDim.x + nc.threadIdx.x
        at = numbers.address(scratch) + offset_of(thread, vectors)
        codes = nc.local.array((1, 256), np.uint8)
        block = nc.local.array((1, block_bytes), np.uint8)
        scales, mins = nc.local.array((1, 16), np.int16), nc.local.array((1, 16), np.uint8)
        params = nc.local.array((1, 2), np.uint16)
        blocks = row_bytes // block_bytes
        for s in range(thread, T * blocks, np.int64(nc.gridDim.x) * nc.blockDim.x):
            row, first = s // blocks, s % blocks * size
            for i in range(size):  # padding repeats the row's last weight
                own.store_f32(at + i * vector, x[row * columns + min(first + i, columns - 1)])
            for i in range(size, vectors):
                own.store_f32(at + i * vector, np.float32(0))
            fit(at)
            choose(at, sub_block, low, top, has_mins)
            for i in range(size):
                codes[0, i] = np.int32(own.load_f32(at + codes_at + i * vector))
            for j in range(n_subs):
                scales[0, j] = np.int32(own.load_f32(at + scales_at + j * vector))
                mins[0, j] = np.int32(own.load_f32(at + mins_at + j * vector))
            params[0, 0] = numbers.load_number(at + bits_at) & 0xFFFF
            params[0, 1] = numbers.load_number(at + bits_min_at) & 0xFFFF
            pack(codes[0], scales[0], mins[0], params[0], block[0])
            for i in range(block_bytes):
                data[row * row_bytes + first // size * block_bytes + i] = block[0, i]

    return quantize


def _fit(format: KQuantFormat) -> Any:
    """Return the function ``(at)`` that fits the scales of a super-block."""
    if format.has_mins:
        fit_ranges = twin(ggml_k.fit_ranges)
        recipe = QUANTIZERS[format.name].recipe(format, weighted=False)

        @device
        def fit(at):
            fit_ranges(at, recipe)

        return fit
    return twin(ggml_k.fit_q3_k if format.form.zero == 4 else ggml_k.fit_q6_k)


def _pack(format: KQuantFormat) -> Any:
    """Return the function ``(codes, scales, mins, params, block)`` that packs a super-block.

    `params` are the float16 bits of `d` and `dmin`.
    """
    n_bytes, write = format.block_bytes, twin(write_field)
    code, scale, minimum, d, dmin = (
        field_constants(format.fields[name]) if name in format.fields else NO_FIELD
        for name in ("code", "scale", "min", "d", "dmin")
    )

    @device
    def pack(codes, scales, mins, params, block):
        for i in range(n_bytes):
            block[i] = 0
        write(codes, block, code)
        write(scales, block, scale)
        write(mins, block, minimum)
        write(params[:1], block, d)
        write(params[1:], block, dmin)

    return pack
