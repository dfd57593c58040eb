"""LLVM types and emitters that the SIMD intrinsics share.

Addresses are int64 values; loads and stores are unaligned.  `LANES` is the width of the toolkit's
vectors, 16 lanes of 32 bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types

LANES = 16
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


def vector(element, lanes=LANES):
    """Return a vector type."""
    return ir.VectorType(element, lanes)


def constant(element, values):
    """Return a constant vector of these numbers."""
    return ir.Constant(vector(element, len(values)), list(values))


def repeated(kind, number):
    """Return a constant of a scalar type, or of a vector type with the number in all lanes."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def like(value, element):
    """Return the type of a scalar or vector value with another element type."""
    return vector(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def int64(context, builder, signature, args, i=0):
    """Return an argument of an intrinsic as int64."""
    return context.cast(builder, args[i], signature.args[i], types.int64)


def pointer(builder, address, target):
    """Return an address as a pointer to `target`."""
    return builder.inttoptr(address, ir.PointerType(target))


def offset(builder, address, n_bytes):
    """Return an address plus a constant number of bytes."""
    return builder.add(address, ir.Constant(I64, n_bytes))


def element(builder, address, stride, i):
    """Return the address of the i-th element, elements being `stride` bytes apart."""
    return builder.add(address, builder.mul(stride, ir.Constant(I64, i)))


def load(builder, address, target):
    """Emit an unaligned load."""
    value = builder.load(pointer(builder, address, target))
    value.align = 1
    return value


def store(builder, value, address):
    """Emit an unaligned store."""
    builder.store(value, pointer(builder, address, value.type)).align = 1


def shuffle(builder, a, b, lanes):
    """Emit a vector of the given lanes of two vectors."""
    return builder.shuffle_vector(a, b, constant(I32, lanes))


def splat(builder, scalar, lanes=LANES):
    """Emit a scalar in all lanes."""
    undefined = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return shuffle(builder, first, first, [0] * lanes)


def call(builder, name, result, args):
    """Emit a call of an LLVM intrinsic function."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma(builder, a, b, c):
    """Emit a * b + c with one rounding, for 16 float32."""
    return call(builder, f"llvm.fma.v{LANES}f32", a.type, [a, b, c])


def tree_reduce(builder, value, join):
    """Emit the reduction of a vector by halves until one lane is left."""
    width = value.type.count
    while width > 1:
        width //= 2
        halves = range(width), range(width, 2 * width)
        value = join(*(shuffle(builder, value, value, lanes) for lanes in halves))
    return builder.extract_element(value, ir.Constant(I32, 0))
