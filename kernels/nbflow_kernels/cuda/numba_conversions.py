"""Numbers in bytes and their conversions in Numba CUDA kernels; importing it needs numba-cuda."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core import types
from numba.cuda import libdevice
from numba.cuda.extending import intrinsic

_TO_FLOAT = np.float32(2.0**112)  # float16's exponents, shifted into float32's place


def device(function: Any) -> Any:
    """Compile a function for kernels to call."""
    return cuda.jit(device=True)(function)


# ---- numbers at addresses of global memory -------------------------------------------------------

_INT32 = ir.IntType(32)


def _intrinsic(function):
    """Return an intrinsic, whose first argument callers do not give."""
    return intrinsic(function)


@_intrinsic
def address(typing_context, array):
    """Return the address of a kernel's array as int64."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(array), codegen


@_intrinsic
def load_number(typing_context, at):
    """Return the int32 at an address."""

    def codegen(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _INT32.as_pointer(addrspace=1)), align=4)

    return types.int32(types.int64), codegen


@_intrinsic
def store_number(typing_context, at, number):
    """Write an int32 to an address."""

    def codegen(context, builder, signature, args):
        there = builder.inttoptr(args[0], _INT32.as_pointer(addrspace=1))
        builder.store(args[1], there, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), codegen


# ---- conversions ---------------------------------------------------------------------------------


@device
def fma(a, b, c):
    """Return a * b + c, rounded once."""
    return libdevice.fmaf(a, b, c)


@device
def half(bits):
    """Return the float16 of 16 bits as float32, exactly."""
    bits = np.int32(bits)
    size = bits & np.int32(0x7FFF)
    number = libdevice.int_as_float(np.int32(size << 13)) * _TO_FLOAT
    if size >= 0x7C00:  # infinity and NaN
        number = libdevice.int_as_float(np.int32(size << 13) | np.int32(0x7F800000))
    return -number if bits & np.int32(0x8000) else number


@device
def half_at(data, at):
    """Return the float16 at byte `at` as float32."""
    return half(np.int32(data[at]) | (np.int32(data[at + 1]) << 8))


@device
def truncated(x):
    """Return a float32 without its fraction."""
    return libdevice.truncf(x)


@device
def same(x):
    """Return a float32 as it is stored."""
    return x


@device
def narrow(x):
    """Return the bits of the float16 nearest to a float32, halves to even."""
    bits = libdevice.float_as_int(x)
    size = bits & np.int32(0x7FFFFFFF)
    sign = (bits >> 16) & np.int32(0x8000)
    if size > 0x7F800000:
        return np.uint16(sign | 0x7E00)
    if size >= (127 + 16) << 23:
        return np.uint16(sign | 0x7C00)
    if size < (127 - 14) << 23:  # the sum with 0.5 rounds to multiples of 2**-24
        total = libdevice.float_as_int(libdevice.int_as_float(size) + np.float32(0.5))
        return np.uint16(sign | (total - (126 << 23)))
    odd = (size >> 13) & 1
    return np.uint16(sign | ((size + 0xFFF - (112 << 23) + odd) >> 13))


@device
def bits_of_f32(x):
    """Return the bits of a float32."""
    return libdevice.float_as_int(x)


@device
def bits_of_f16(x):
    """Return the bits of the nearest float16."""
    return np.int32(narrow(x))


@device
def bits_of_bf16(x):
    """Return the bits of the nearest bfloat16, halves to even."""
    bits = libdevice.float_as_int(x)
    return (bits + np.int32(0x7FFF) + ((bits >> 16) & np.int32(1))) >> 16


# ---- the functions of `block_bytes`, for the functions of user formats ---------------------------


@device
def get_f16(block, at):
    """See `nbflow_kernels.formats.block_bytes.get_f16`."""
    return half_at(block, at)


@device
def get_f32(block, at):
    """See `nbflow_kernels.formats.block_bytes.get_f32`."""
    low = np.int32(block[at]) | (np.int32(block[at + 1]) << 8)
    high = np.int32(block[at + 2]) | (np.int32(block[at + 3]) << 8)
    return libdevice.int_as_float(np.int32(low | (high << 16)))


@device
def put_f16(block, at, value):
    """See `nbflow_kernels.formats.block_bytes.put_f16`."""
    bits = narrow(np.float32(value))
    block[at], block[at + 1] = bits & 255, bits >> 8


@device
def put_f32(block, at, value):
    """See `nbflow_kernels.formats.block_bytes.put_f32`."""
    bits = libdevice.float_as_int(np.float32(value))
    for i in range(4):
        block[at + i] = (bits >> (8 * i)) & 255
