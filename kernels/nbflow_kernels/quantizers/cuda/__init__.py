"""CUDA quantizers: the published ones, with the bytes of the CPU.

This file has the formats with one scale per block, floats, and user formats whose quantizer is
plain loops; `ggml_k` has the K-quants, `codebook` the formats with tables of levels, `ggml_iq1`
and `ggml_iq2_iq3` those on grids.  The scalar code is the CPU's, without fused multiply-adds.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda as nc

from nbflow_kernels import cuda
from nbflow_kernels.cuda import numba_conversions as numbers
from nbflow_kernels.cuda.numba_conversions import device
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
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.formats.trellis import TrellisFormat
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.formats.user_cuda import on_device, user_key
from nbflow_kernels.quantizers.cuda import codebook, ggml_iq1, ggml_iq2_iq3, ggml_k
from nbflow_kernels.quantizers.reference import inferflow

if TYPE_CHECKING:
    from nbflow_kernels.formats.registry import QuantFormat

_THREADS = 64
_DECLARED = "f32* x, i32*? bits, u8* data, i32 T, i32 columns, i64 row_bytes"


def quantize(x: Any, format: QuantFormat, quantizer: str) -> Any:
    """Return the bytes (rows, row bytes) of weights (rows, columns) on their device.

    Raises
    ------
    UsageError
        If the format has no such quantizer on CUDA devices.
    """
    if isinstance(format, TrellisFormat):
        raise UsageError(
            f"{format.name} has no quantizer on a CUDA device; quantize in host memory and take "
            "to_device()"
        )
    # a float or user format has one quantizer under both names
    if quantizer != "reference" and not isinstance(format, FloatFormat | UserFormat):
        raise UsageError(
            f"{format.name} has no quantizer {quantizer!r} on a CUDA device; "
            "it has quantizer='reference'; quantize in host memory and take to_device()"
        )
    device = cuda.device_of(x)
    n_blocks = format.row_blocks(x.shape[1])
    data = device.empty((x.shape[0], n_blocks * format.block_bytes), np.uint8)
    if not data.size:
        return data
    if isinstance(format, KQuantFormat):
        ggml_k.quantize(x, format, data)
        return data
    if isinstance(format, BlockFormat):
        grids: dict[str, Any] = {"iq1": ggml_iq1, "iq2": ggml_iq2_iq3, "iq3": ggml_iq2_iq3}
        grids.get(format.name[:3], codebook).quantize(x, format, data)
        return data
    bits = None
    if isinstance(format, AffineFormat):
        kernel = _block_kernel(format)
        bits = _device_bits(format, device)
    else:
        kernel = _block_kernel(format) if isinstance(format, UserFormat) else _float_kernel(format)
    grid = (cuda.ceil_div(n_blocks, _THREADS), min(len(x), 65535))
    args = (x, bits, data, len(x), x.shape[1], data.shape[1])
    try:
        kernel(grid, _THREADS, args)
    except cuda.CompileError as error:
        if not isinstance(format, UserFormat):
            raise
        raise UsageError(
            f"format {format.name}: quantize_block does not compile for CUDA, which compiles "
            f"loops over numbers but no operations on arrays ({str(error).splitlines()[-1]}); "
            "quantize in host memory and take to_device()"
        ) from error
    return data


def _device_bits(format: AffineFormat, device: cuda.KernelDevice) -> Any:
    """Return the position in the block of each bit of the stored codes, int32 on the device."""
    key = ("quantizer", format.name)
    if key not in device.constants:
        device.constants[key] = device.asarray(format.fields["code"].positions().astype(np.int32))
    return device.constants[key]


@functools.cache
def _block_kernel(format: AffineFormat | UserFormat) -> cuda.Kernel:
    """Return the kernel that quantizes one block per thread."""
    block, block_bytes = format.block_size, format.block_bytes
    if isinstance(format, UserFormat):
        key, quantize_block = user_key(format), _user_block(format)
    else:
        key, quantize_block = format.name, _affine_block(format)

    @cuda.numba_kernel(_DECLARED, key=key, fuse=False, name=f"quantize_{format.name}")
    def quantize(x, bits, data, T, columns, row_bytes):
        b = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if b * block >= columns:
            return
        weights, out = nc.local.array(block, np.float32), nc.local.array(block_bytes, np.uint8)
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            for i in range(block):  # padding repeats the row's last weight
                weights[i] = x[np.int64(t) * columns + min(b * block + i, columns - 1)]
            for i in range(block_bytes):
                out[i] = 0
            quantize_block(weights, bits, out)
            for i in range(block_bytes):
                data[np.int64(t) * row_bytes + b * block_bytes + i] = out[i]

    return quantize


def _user_block(format: UserFormat) -> Any:
    """Return ``(weights, bits, out)``: the bytes of a block of a user format."""
    quantize_block = on_device(format, "quantize_block")

    @device
    def of_user(weights, bits, out):
        quantize_block(weights, out)

    return of_user


def _affine_block(format: AffineFormat) -> Any:
    """Return ``(weights, bits, out)``: the bytes of a block with one base and scale."""
    block, code = format.block_size, format.fields["code"]
    n_numbers, n_bits, radix, flip = code.n_stored, code.bits, code.radix, code.flip
    fit = _inferflow_fit(format) if format.rule <= ABSMAX else _ggml_fit(format)

    @device
    def quantize_block(weights, bits, out):
        codes = nc.local.array(block, np.int32)
        fit(weights, codes, out)
        for i in range(n_numbers):
            number = codes[2 * i] + radix * codes[2 * i + 1] if radix else codes[i] ^ flip
            for k in range(n_bits):
                bit = bits[i * n_bits + k]
                out[bit >> 3] |= ((number >> k) & 1) << (bit & 7)

    return quantize_block


def _inferflow_fit(format: AffineFormat) -> Any:
    """Return Inferflow's ``(weights, codes, out)``: codes, and the parameters' bytes to `out`."""
    block, scale_at = format.block_size, format.fields.at("scale")
    base_at = format.fields.at("base") if "base" in format.fields else 0
    kind, zero, n_codes = format.parameters, format.zero, format.n_codes
    midrise, divisor = format.rule == MIDRISE, np.float32(format.divisor)

    @numbers.device
    def fit(weights, codes, out):
        low, high = inferflow.extent(weights, 0, block)
        base, scale = inferflow.quantize_block(
            weights, block, low, high, n_codes, divisor, kind, midrise, zero, codes
        )
        if kind == U8_PAIR:
            out[base_at] = inferflow.base_byte(base)
            out[scale_at] = inferflow.scale_byte(scale)
        else:
            if kind != F16_SCALE:
                numbers.put_f16(out, base_at, base)
            numbers.put_f16(out, scale_at, scale)

    return fit


def _ggml_fit(format: AffineFormat) -> Any:
    """Return GGML's ``(weights, codes, out)``, the scalar form of `reference.ggml_legacy`."""
    block, scale_at = format.block_size, format.fields.at("scale")
    base_at = format.fields.at("base") if "base" in format.fields else 0
    zero, last, signed = format.zero, format.n_codes - 1, format.parameters == F16_SCALE
    divisor, extreme = np.float32(format.divisor), format.rule == GGML_EXTREME
    if extreme:
        divisor = -divisor
    half = np.float32(zero + 0.5) if extreme else np.float32(0.5)

    @numbers.device
    def fit(weights, codes, out):
        low, high = inferflow.extent(weights, 0, block)
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
            # halves away from zero; adding 0.5 would round 0.49999997 up
            if signed and not extreme:
                whole = numbers.truncated(step)
                if abs(step - whole) >= half:
                    whole += np.float32(1) if step > 0 else np.float32(-1)
                step = whole + np.float32(zero)
            else:
                step = numbers.truncated(step + half)
            step = step if step == step else np.float32(0)
            codes[i] = np.int32(min(max(step, np.float32(0)), np.float32(last)))
        if not signed:
            numbers.put_f16(out, base_at, base)
        numbers.put_f16(out, scale_at, scale)

    return fit


@functools.cache
def _float_kernel(format: Any) -> cuda.Kernel:
    """Return the kernel that rounds one weight per thread."""
    to_bits, n_bytes = getattr(numbers, f"bits_of_{format.name}"), format.block_bytes

    @cuda.numba_kernel(_DECLARED, key=format.name, fuse=False, name=f"quantize_{format.name}")
    def quantize(x, bits, data, T, columns, row_bytes):
        i = nc.blockIdx.x * nc.blockDim.x + nc.threadIdx.x
        if i >= columns:
            return
        for t in range(nc.blockIdx.y, T, nc.gridDim.y):
            stored = to_bits(x[np.int64(t) * columns + i])
            for k in range(n_bytes):
                data[np.int64(t) * row_bytes + n_bytes * i + k] = (stored >> (8 * k)) & 255

    return quantize
