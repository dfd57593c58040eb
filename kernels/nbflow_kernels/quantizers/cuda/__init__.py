"""Encoding weights on CUDA devices: the plain encoders of one pass, and those of the K-quants.

These are Inferflow's and GGML's formats of one scale for a block, floats, and users' formats whose
encoder is plain loops; the K-quants are in `cuda_encode_k`, formats with tables of levels in
`cuda_encode_levels`, those on grids in `cuda_encode_grid` and `cuda_encode_iq1`.  The bytes are the
CPU's: the same arithmetic, compiled without fusing.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.affine_format import (
    ABSMAX,
    F16_SCALE,
    GGML_EXTREME,
    MIDRISE,
    U8_PAIR,
    AffineFormat,
)
from nbflow_kernels.formats.block_format import BlockFormat
from nbflow_kernels.formats.cuda_dequantize import on_device, user_key
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.quantizers.cuda import (
    codebook as cuda_encode_levels,
)
from nbflow_kernels.quantizers.cuda import (
    ggml_iq1 as cuda_encode_iq1,
)
from nbflow_kernels.quantizers.cuda import (
    ggml_iq2_iq3 as cuda_encode_grid,
)
from nbflow_kernels.quantizers.cuda import (
    ggml_k as cuda_encode_k,
)
from nbflow_kernels.quantizers.reference import inferflow as linear_plain

if TYPE_CHECKING:
    from nbflow_kernels.formats.registry import QuantFormat

_THREADS = 64
_DECLARED = "f32* x, i32*? places, u8* data, i32 T, i32 columns, i64 row_bytes"


def encode(x: Any, format: QuantFormat, encoder: str) -> Any:
    """Return the bytes (rows, row bytes) of weights (rows, columns) on their device.

    Raises
    ------
    UsageError
        If the format has no such encoder there.
    """
    one = isinstance(format, FloatFormat | UserFormat)  # of which both encoders are the same
    if encoder != "plain" and not one:
        raise UsageError(
            f"{format.name} has no encoder {encoder!r} on a CUDA device; it has encoder='plain'; "
            "quantize in host memory and take to_device()"
        )
    device = cuda.device_of(x)
    n_blocks = format.row_blocks(x.shape[1])
    data = device.empty((x.shape[0], n_blocks * format.block_bytes), np.uint8)
    if not data.size:
        return data
    if isinstance(format, KQuantFormat):
        cuda_encode_k.encode(x, format, data)
        return data
    if isinstance(format, BlockFormat):
        of_grids = {"iq1": cuda_encode_iq1, "iq2": cuda_encode_grid, "iq3": cuda_encode_grid}
        of_grids.get(format.name[:3], cuda_encode_levels).encode(x, format, data)
        return data
    places = None
    if isinstance(format, AffineFormat):
        kernel = _linear_encoder(format)
        places = _places_there(format, device)
    else:
        kernel = _user_encoder(format) if isinstance(format, UserFormat) else _float_encoder(format)
    grid = (cuda.ceil_div(n_blocks, _THREADS), min(len(x), 65535))
    args = (x, places, data, len(x), x.shape[1], data.shape[1])
    try:
        kernel(grid, _THREADS, args)
    except cuda.CompileError as error:
        if not isinstance(format, UserFormat):
            raise
        raise UsageError(
            f"format {format.name}: quantize_block does not compile for CUDA, which knows loops "
            f"over numbers but no operations on arrays ({str(error).splitlines()[-1]}); quantize "
            "in host memory and take to_device()"
        ) from error
    return data


def _places_there(format: AffineFormat, device: cuda.KernelDevice) -> Any:
    """Return the bit of the block of each bit of the stored codes, int32 on the device."""
    key = ("quantizer", format.name)
    if key not in device.constants:
        device.constants[key] = device.asarray(format.fields["code"].positions().astype(np.int32))
    return device.constants[key]


@functools.cache
def _linear_encoder(format: AffineFormat) -> cuda.Kernel:
    """Return the kernel that encodes a block in each thread."""
    nc: Any = importlib.import_module("numba.cuda")
    block, block_bytes, code = format.block_size, format.block_bytes, format.fields["code"]
    n_numbers, n_bits, radix, flip = code.n_stored, code.bits, code.radix, code.flip
    fit = _inferflow_fit(format) if format.rule <= ABSMAX else _ggml_fit(format)

    @cuda.numba_kernel(_DECLARED, key=format.name, fuse=False, name=f"encode_{format.name}")
    def encode(x, places, data, T, columns, row_bytes):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * block >= columns:
            return
        weights, codes = nc.local.array(block, np.float32), nc.local.array(block, np.int32)
        room = nc.local.array(block_bytes, np.uint8)
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            for i in range(block):  # padding is the row's last weight again
                weights[i] = x[np.int64(t) * columns + min(b * block + i, columns - 1)]
            for i in range(block_bytes):
                room[i] = 0
            fit(weights, codes, room)
            for i in range(n_numbers):
                number = codes[2 * i] + radix * codes[2 * i + 1] if radix else codes[i] ^ flip
                for k in range(n_bits):
                    place = places[i * n_bits + k]
                    room[place >> 3] |= ((number >> k) & 1) << (place & 7)
            for i in range(block_bytes):
                data[np.int64(t) * row_bytes + b * block_bytes + i] = room[i]

    return encode


def _inferflow_fit(format: AffineFormat) -> Any:
    """Return Inferflow's ``(weights, codes, room)``: codes, and the parameters' bytes to `room`."""
    from nbflow_kernels.cuda import numba_conversions as numbers

    block, scale_at = format.block_size, format.fields.at("scale")
    base_at = format.fields.at("base") if "base" in format.fields else 0
    kind, zero, n_codes = format.parameters, format.zero, format.n_codes
    midrise = format.rule == MIDRISE
    divisor = np.float32(format.divisor)
    offset = np.float32(1e-4) if midrise else np.float32(0.5)

    @numbers.device
    def fit(weights, codes, room):
        low, high = linear_plain.extent(weights, 0, block)
        if kind == F16_SCALE:
            scale = max(abs(low), abs(high)) / divisor
            inverse = linear_plain.inverse_of(scale)
            for i in range(block):
                codes[i] = linear_plain.signed_code(weights[i], inverse, n_codes, zero)
            base = np.float32(0)
        else:
            if kind == U8_PAIR:
                low = linear_plain.on_grid(low)
            scale = (high - low) / divisor
            inverse = linear_plain.inverse_of(scale)
            for i in range(block):
                codes[i] = linear_plain.range_code(weights[i], low, inverse, offset, n_codes)
            base = low + scale / np.float32(2) if midrise else low
        if kind == U8_PAIR:
            room[base_at] = linear_plain.base_byte(base)
            room[scale_at] = linear_plain.scale_byte(scale)
        else:
            if kind != F16_SCALE:
                numbers.put_f16(room, base_at, base)
            numbers.put_f16(room, scale_at, scale)

    return fit


def _ggml_fit(format: AffineFormat) -> Any:
    """Return GGML's ``(weights, codes, room)``, as `ggml_legacy` has it for arrays of blocks."""
    from nbflow_kernels.cuda import numba_conversions as numbers

    block, scale_at = format.block_size, format.fields.at("scale")
    base_at = format.fields.at("base") if "base" in format.fields else 0
    zero, last, signed = format.zero, format.n_codes - 1, format.parameters == F16_SCALE
    divisor, extreme = np.float32(format.divisor), format.rule == GGML_EXTREME
    if extreme:
        divisor = -divisor
    half = np.float32(zero + 0.5) if extreme else np.float32(0.5)

    @numbers.device
    def fit(weights, codes, room):
        low, high = linear_plain.extent(weights, 0, block)
        top = weights[0]
        for i in range(1, block):
            top = weights[i] if abs(weights[i]) > abs(top) else top
        base = np.float32(0)
        if not signed:
            base = low
            top = high - low
        elif not extreme:
            top = abs(top)
        scale = top / divisor
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        for i in range(block):
            step = (weights[i] - base) * inverse
            if (
                signed and not extreme
            ):  # halves away from zero; adding 0.5 would round 0.49999997 up
                whole = numbers.truncated(step)
                if abs(step - whole) >= half:
                    whole += np.float32(1) if step > 0 else np.float32(-1)
                step = whole + np.float32(zero)
            else:
                step = numbers.truncated(step + half)
            step = step if step == step else np.float32(0)
            codes[i] = np.int32(min(max(step, np.float32(0)), np.float32(last)))
        if not signed:
            numbers.put_f16(room, base_at, base)
        numbers.put_f16(room, scale_at, scale)

    return fit


@functools.cache
def _user_encoder(format: UserFormat) -> cuda.Kernel:
    """Return the kernel that encodes a block of a user's format in each thread."""
    nc: Any = importlib.import_module("numba.cuda")
    block, block_bytes = format.block_size, format.block_bytes
    quantize_block = on_device(format, "quantize_block")

    @cuda.numba_kernel(
        _DECLARED, key=user_key(format), fuse=False, name=f"encode_{format.name}"
    )  # fmt: skip
    def encode(x, places, data, T, columns, row_bytes):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * block >= columns:
            return
        weights, room = nc.local.array(block, np.float32), nc.local.array(block_bytes, np.uint8)
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            for i in range(block):
                weights[i] = x[np.int64(t) * columns + min(b * block + i, columns - 1)]
            for i in range(block_bytes):
                room[i] = 0
            quantize_block(weights, room)
            for i in range(block_bytes):
                data[np.int64(t) * row_bytes + b * block_bytes + i] = room[i]

    return encode


@functools.cache
def _float_encoder(format: Any) -> cuda.Kernel:
    """Return the kernel that rounds a weight in each thread."""
    from nbflow_kernels.cuda import numba_conversions as numbers

    nc: Any = importlib.import_module("numba.cuda")
    bits, n_bytes = getattr(numbers, f"bits_of_{format.name}"), format.block_bytes

    @cuda.numba_kernel(_DECLARED, key=format.name, fuse=False, name=f"encode_{format.name}")
    def encode(x, places, data, T, columns, row_bytes):
        i = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if i >= columns:
            return
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            stored = bits(x[np.int64(t) * columns + i])
            for k in range(n_bytes):
                data[np.int64(t) * row_bytes + n_bytes * i + k] = (stored >> (8 * k)) & 255

    return encode
