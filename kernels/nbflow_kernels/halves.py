"""LLVM code that converts float16 and bfloat16, on processors without such an instruction too.

LLVM turns a conversion the processor lacks into a call of a function of the C compiler's library
(``__extendhfsf2``), which a process need not have.  There the same is written with integers; the
results are the same to the bit: rounded to nearest, halves to even, denormal numbers kept, NaN made
quiet.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from nbflow_kernels import isa

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_F16, _F32 = ir.HalfType(), ir.FloatType()


def has_conversion(features: frozenset[str]) -> bool:
    """Return whether a processor converts float16 in one instruction.

    Examples
    --------
    >>> has_conversion(frozenset({"x86", "sse2"})), has_conversion(frozenset({"x86", "f16c"}))
    (False, True)
    """
    return not features.isdisjoint({"f16c", "avx512f", "avx512fp16", "aarch64"})


def widen(builder: Any, bits: Any, features: frozenset[str] | None = None) -> Any:
    """Return the float16 with these bits (int16, one or a vector) as float32."""
    single = _like(bits, _F32)
    if has_conversion(isa.features() if features is None else features):
        return builder.fpext(builder.bitcast(bits, _like(bits, _F16)), single)
    wide = builder.zext(bits, _like(bits, _I32))
    magnitude = builder.and_(wide, _all(wide, 0x7FFF))
    sign = builder.shl(builder.and_(wide, _all(wide, 0x8000)), _all(wide, 16))
    moved = builder.shl(magnitude, _all(wide, 13))
    normal = builder.add(moved, _all(wide, (127 - 15) << 23))
    special = builder.or_(moved, _all(wide, 0x7F800000))
    quiet = builder.or_(special, _all(wide, 0x400000))
    # a denormal number is a multiple of 2 ** -24
    step = ir.Constant(single, 2.0**-24 if single is _F32 else [2.0**-24] * single.count)
    small = builder.bitcast(builder.fmul(builder.uitofp(magnitude, single), step), wide.type)
    result = builder.select(_below(builder, magnitude, 0x400), small, normal)
    result = builder.select(_below(builder, magnitude, 0x7C00), result, special)
    result = builder.select(_below(builder, magnitude, 0x7C01), result, quiet)
    return builder.bitcast(builder.or_(result, sign), single)


def narrow(builder: Any, value: Any, features: frozenset[str] | None = None) -> Any:
    """Return the bits (int16) of the float16 nearest to float32, one or a vector."""
    short = _like(value, _I16)
    if has_conversion(isa.features() if features is None else features):
        return builder.bitcast(builder.fptrunc(value, _like(value, _F16)), short)
    bits = builder.bitcast(value, _like(value, _I32))
    magnitude = builder.and_(bits, _all(bits, 0x7FFFFFFF))
    sign = builder.and_(builder.lshr(bits, _all(bits, 16)), _all(bits, 0x8000))
    moved = builder.lshr(magnitude, _all(bits, 13))
    odd = builder.and_(moved, _all(bits, 1))
    rebased = builder.sub(magnitude, _all(bits, (127 - 15) << 23))
    normal = builder.add(builder.add(rebased, _all(bits, 0xFFF)), odd)
    normal = builder.lshr(normal, _all(bits, 13))
    # the last bit of numbers in [0.5, 1) is 2 ** -24, so this sum rounds to a denormal number
    half = ir.Constant(value.type, 0.5 if value.type is _F32 else [0.5] * value.type.count)
    small = builder.fadd(builder.bitcast(magnitude, value.type), half)
    small = builder.sub(builder.bitcast(small, bits.type), _all(bits, 0x3F000000))
    quiet = builder.or_(builder.and_(moved, _all(bits, 0x3FF)), _all(bits, 0x7E00))
    result = builder.select(_below(builder, magnitude, (127 - 14) << 23), small, normal)
    large = _below(builder, magnitude, (127 + 16) << 23)
    result = builder.select(large, result, _all(bits, 0x7C00))
    result = builder.select(_below(builder, magnitude, 0x7F800001), result, quiet)
    return builder.trunc(builder.or_(result, sign), short)


def narrow_bf16(builder: Any, value: Any) -> Any:
    """Return the bits (int16) of the bfloat16 nearest to float32, one or a vector."""
    bits = builder.bitcast(value, _like(value, _I32))
    high = builder.lshr(bits, _all(bits, 16))
    odd = builder.and_(high, _all(bits, 1))
    near = builder.add(bits, builder.add(odd, _all(bits, 0x7FFF)))
    quiet = builder.or_(high, _all(bits, 0x40))
    magnitude = builder.and_(bits, _all(bits, 0x7FFFFFFF))
    rounded = builder.lshr(near, _all(bits, 16))
    result = builder.select(_below(builder, magnitude, 0x7F800001), rounded, quiet)
    return builder.trunc(result, _like(value, _I16))


def _like(value: Any, element: Any) -> Any:
    """Return the type of as many elements as `value` has."""
    is_vector = isinstance(value.type, ir.VectorType)
    return ir.VectorType(element, value.type.count) if is_vector else element


def _all(value: Any, number: int) -> Any:
    is_vector = isinstance(value.type, ir.VectorType)
    return ir.Constant(value.type, [number] * value.type.count if is_vector else number)


def _below(builder: Any, value: Any, limit: int) -> Any:
    return builder.icmp_unsigned("<", value, _all(value, limit))
