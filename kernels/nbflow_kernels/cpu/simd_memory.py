"""Scalar, partial and strided loads and stores, scratch memory and prefetch, on addresses.

Kernels that take addresses and byte strides instead of arrays compile once for all layouts and
element types.  They need scalar reads and writes for the tail of a row; `sum16` computes sixteen
horizontal sums at the cost of about five.

====================================  =========================================================
`read_f32 read_f16 read_bf16(addr)`   one element as float32
`read_i64 read_i32 read_u16 read_u8`  one element as int64
`read_word(addr, i)`                  the i-th int64 from an address on
`write_f32(addr, x)`                  one float32
`write_i64(addr, x)`                  one int64
`write_f16(addr, x)`                  one float32, rounded to float16
`store_f16(addr, v)`                  16 float32, rounded to float16, halves to even
`load_first(addr, n, rest)`           16 float32 of which the first `n` are read, the others `rest`
`load_first_f16 load_first_bf16`      the same, widened; the others 0
`store_first(addr, n, v)`             the first `n` lanes only
`allocate(n_bytes)`                   scratch memory at a cache line, until `release(addr)`
`prefetch(addr)`                      prefetch a cache line; any address is allowed
`prefetch_lines(addr, n)`             prefetch `n` consecutive lines; `n` is a constant
`store_quarters(addr, step, v)`       lanes 0-3 to `addr`, 4-7 to `addr + step`, and so on
`address_of(array)`                   called from Python: a quarter of the time of ``.ctypes.data``
`sum16(v0, ..., v15)`                 the vector of `simd.sum(v0)`, ..., `simd.sum(v15)`
====================================  =========================================================

`sum16` adds the lanes of each argument in the order of `simd.sum`, so that a dot product does not
depend on its position among the sixteen.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, errors, types
from numpy.typing import NDArray

from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.float16 import emit_narrow, emit_widen
from nbflow_kernels.cpu.llvm import F32, I8, I16, I32, I64, LANES
from nbflow_kernels.cpu.simd import f32x16

intrinsic = functools.partial(interpreter.intrinsic, fallback="simd_memory")

LINE = 64
"""Bytes of a cache line."""


def _make_read(name: str, stored: Any, result: Any, widen: str | None) -> Any:
    def read(typing_context, addr):
        def codegen(context, builder, signature, args):
            value = llvm.load(builder, llvm.int64(context, builder, signature, args), stored)
            if widen in ("zext", "sext"):
                return getattr(builder, widen)(value, I64)
            return emit_widen(builder, value, widen)

        return result(addr), codegen

    read.__name__ = name
    return intrinsic(read)


read_f32 = _make_read("read_f32", F32, types.float32, None)
read_f16 = _make_read("read_f16", I16, types.float32, "f16")
read_bf16 = _make_read("read_bf16", I16, types.float32, "bf16")
read_i64 = _make_read("read_i64", I64, types.int64, None)
read_i32 = _make_read("read_i32", I32, types.int64, "sext")
read_u8 = _make_read("read_u8", I8, types.int64, "zext")
read_u16 = _make_read("read_u16", I16, types.int64, "zext")


@intrinsic
def read_word(typing_context, addr, i):
    """Return the i-th int64 from an address on."""

    def codegen(context, builder, signature, args):
        first, i = (llvm.int64(context, builder, signature, args, n) for n in range(2))
        address = builder.add(first, builder.shl(i, ir.Constant(I64, 3)))
        return llvm.load(builder, address, I64)

    return types.int64(addr, i), codegen


def _make_write(name: str, narrow: bool) -> Any:
    def write(typing_context, addr, x):
        def codegen(context, builder, signature, args):
            value = context.cast(builder, args[1], signature.args[1], types.float32)
            if narrow:
                value = emit_narrow(builder, value)
            llvm.store(builder, value, llvm.int64(context, builder, signature, args))
            return context.get_dummy_value()

        return types.none(addr, x), codegen

    write.__name__ = name
    return intrinsic(write)


@intrinsic
def write_i64(typing_context, addr, x):
    """Write one integer as int64."""

    def codegen(context, builder, signature, args):
        address, value = (llvm.int64(context, builder, signature, args, i) for i in range(2))
        llvm.store(builder, value, address)
        return context.get_dummy_value()

    return types.none(addr, x), codegen


write_f32 = _make_write("write_f32", narrow=False)
write_f16 = _make_write("write_f16", narrow=True)


@intrinsic
def store_f16(typing_context, addr, v):
    """Write 16 float32 as float16, rounded to nearest, halves to even."""

    def codegen(context, builder, signature, args):
        value = emit_narrow(builder, args[1])
        llvm.store(builder, value, llvm.int64(context, builder, signature, args))
        return context.get_dummy_value()

    return types.none(addr, v), codegen


def first_lanes(context, builder, n, n_type):
    """Emit the mask of the first `n` lanes, for any `n`."""
    counts = llvm.splat(builder, context.cast(builder, n, n_type, types.int64))
    return builder.icmp_signed("<", llvm.constant(I64, range(LANES)), counts)


def masked_load(builder, pointer, mask, rest):
    """Emit the load of the lanes of a mask; the others are those of `rest`."""
    element = "f32" if rest.type == f32x16.llvm else "i16"
    name = f"llvm.masked.load.v{LANES}{element}.p0"
    return llvm.call(builder, name, rest.type, [pointer, ir.Constant(I32, 1), mask, rest])


@intrinsic
def load_first(typing_context, addr, n, rest):
    """Return 16 float32 of which the first `n` are read, and the others are `rest`."""

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args)
        mask = first_lanes(context, builder, args[1], signature.args[1])
        value = context.cast(builder, args[2], signature.args[2], types.float32)
        pointer = llvm.pointer(builder, address, f32x16.llvm)
        return masked_load(builder, pointer, mask, llvm.splat(builder, value))

    return f32x16(addr, n, rest), codegen


def _make_load_first(name: str, widen: str) -> Any:
    def load(typing_context, addr, n):
        def codegen(context, builder, signature, args):
            stored = llvm.vector(I16)
            address = llvm.int64(context, builder, signature, args)
            mask = first_lanes(context, builder, args[1], signature.args[1])
            pointer = llvm.pointer(builder, address, stored)
            value = masked_load(builder, pointer, mask, ir.Constant(stored, None))
            return emit_widen(builder, value, widen)

        return f32x16(addr, n), codegen

    load.__name__ = name
    return intrinsic(load)


load_first_f16 = _make_load_first("load_first_f16", "f16")
load_first_bf16 = _make_load_first("load_first_bf16", "bf16")


@intrinsic
def store_first(typing_context, addr, n, v):
    """Write the first `n` lanes of 16 float32."""

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args)
        pointer = llvm.pointer(builder, address, f32x16.llvm)
        mask = first_lanes(context, builder, args[1], signature.args[1])
        name = f"llvm.masked.store.v{LANES}f32.p0"
        llvm.call(builder, name, ir.VoidType(), [args[2], pointer, ir.Constant(I32, 1), mask])
        return context.get_dummy_value()

    return types.none(addr, n, v), codegen


@intrinsic
def allocate(typing_context, n_bytes):
    """Return the address of scratch memory, of a cache line, that lives until `release`.

    It compiles much faster than np.empty, and Numba frees an array after its last use by name even
    if its address is still in use.  The address of the allocation is stored before the line.
    """

    def codegen(context, builder, signature, args):
        size = context.cast(builder, args[0], signature.args[0], types.intp)
        pointer = context.nrt.allocate(builder, builder.add(size, ir.Constant(I64, LINE)))
        with builder.if_then(cgutils.is_null(builder, pointer), likely=False):
            context.call_conv.return_user_exc(builder, MemoryError, ("scratch memory of a kernel",))
        allocated = builder.ptrtoint(pointer, I64)
        # allocations are multiples of 16, so that there is room before the next line
        line = builder.and_(llvm.offset(builder, allocated, LINE), ir.Constant(I64, -LINE))
        llvm.store(builder, allocated, llvm.offset(builder, line, -8))
        return line

    return types.int64(n_bytes), codegen


@intrinsic
def release(typing_context, addr):
    """Free memory from `allocate`."""

    def codegen(context, builder, signature, args):
        line = llvm.int64(context, builder, signature, args)
        address = llvm.load(builder, llvm.offset(builder, line, -8), I64)
        context.nrt.free(builder, llvm.pointer(builder, address, I8))
        return context.get_dummy_value()

    return types.none(addr), codegen


def _emit_prefetch(builder, address, write=0, keep=2):
    """Emit the prefetch of a cache line, into the second-level cache if `keep` is 2."""
    numbers = [ir.Constant(I32, n) for n in (write, keep, 1)]
    arguments = [llvm.pointer(builder, address, I8), *numbers]
    llvm.call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments)


@intrinsic
def prefetch(typing_context, addr):
    """Prefetch the cache line of an address into the second-level cache."""

    def codegen(context, builder, signature, args):
        _emit_prefetch(builder, llvm.int64(context, builder, signature, args))
        return context.get_dummy_value()

    return types.none(addr), codegen


@intrinsic
def prefetch_write(typing_context, addr):
    """Prefetch the cache line of an address that will be written."""

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args)
        _emit_prefetch(builder, address, write=1, keep=3)
        return context.get_dummy_value()

    return types.none(addr), codegen


@intrinsic(prefer_literal=True)
def prefetch_lines(typing_context, addr, n):
    """Prefetch `n` cache lines from an address on; `n` must be a constant: the code is unrolled."""
    if not isinstance(n, types.IntegerLiteral):
        raise errors.TypingError("simd_memory.prefetch_lines: n must be a constant")
    count = n.literal_value

    def codegen(context, builder, signature, args):
        address = llvm.int64(context, builder, signature, args)
        for i in range(count):
            _emit_prefetch(builder, llvm.offset(builder, address, 64 * i))
        return context.get_dummy_value()

    return types.none(addr, n), codegen


@intrinsic
def store_quarters(typing_context, addr, step, v):
    """Write lanes 4i..4i+3 to the address ``addr + i * step``."""

    def codegen(context, builder, signature, args):
        address, step = (llvm.int64(context, builder, signature, args, i) for i in range(2))
        for i in range(4):
            quarter = llvm.shuffle(builder, args[2], args[2], range(4 * i, 4 * i + 4))
            llvm.store(builder, quarter, llvm.element(builder, address, step, i))
        return context.get_dummy_value()

    return types.none(addr, step, v), codegen


def _fold(builder, join, a, b, width):
    """Halve the sums of `width` lanes in `a` and in `b`; those of `a` come first in each segment.

    A blend, which any vector port executes, and one shuffle: [a0, b1] + [a1, b0].  Two shuffles
    [a0, b0] + [a1, b1] would add the same numbers.
    """
    half, n = width // 2, a.type.count
    blend = [lane if lane % width < half else lane + n for lane in range(n)]
    swap = [lane + half if lane % width < half else lane + n - half for lane in range(n)]
    return join(llvm.shuffle(builder, a, b, blend), llvm.shuffle(builder, a, b, swap))


@intrinsic
def sum16(typing_context, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    """Return the vector whose lane i is the sum of the lanes of argument i."""
    vectors = (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15)
    if any(v != f32x16 for v in vectors):
        raise errors.TypingError("simd_memory.sum16: wanted 16 vectors of float32")

    return f32x16(*vectors), lambda context, builder, signature, args: emit_sums(builder, args)


def emit_sums(builder, vectors):
    """Emit the vector of the sums of 16 vectors."""
    return emit_reductions(builder, builder.fadd, vectors)


def emit_reductions(builder, join, vectors):
    """Emit the vector of the reductions of 16 vectors by a function of two vectors."""
    # The halves of a vector first: the lower one is a register already, while a blend of two
    # vectors by halves would be a shuffle.
    half = LANES // 2
    lower, upper = range(half), range(half, LANES)
    values = [
        join(llvm.shuffle(builder, v, v, lower), llvm.shuffle(builder, v, v, upper))
        for v in vectors
    ]
    width = half
    while width > 1:
        n = width // 2  # `values` has two groups of `width` vectors, folded separately
        pairs = [(i, i + n) for first in (0, width) for i in range(first, first + n)]
        values = [_fold(builder, join, values[i], values[j], width) for i, j in pairs]
        width = n
    return llvm.shuffle(builder, *values, range(LANES))


# NumPy's ABI: the data pointer follows the object header.
_HEADER = object.__basicsize__
_word_at = ctypes.c_int64.from_address
_probe = np.zeros((2, 3), np.int16)[1:, 2:]
_FOLLOWS_HEADER = _word_at(id(_probe) + _HEADER).value == _probe.ctypes.data


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's first element, from Python."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            "the first array is in host memory, another one on a CUDA device; copy it to the "
            f"host (cupy.asnumpy), got {type(array).__module__}.{type(array).__name__}"
        )
    return _word_at(id(array) + _HEADER).value if _FOLLOWS_HEADER else array.ctypes.data
