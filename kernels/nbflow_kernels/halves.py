"""float16 to float32 and back in generated code, also where the processor has no instruction.

On x86 without F16C LLVM calls functions of its runtime library, which no Numba process contains.
The same numbers are computed here from the bits; a NaN stays a NaN, maybe with another payload.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from nbflow_kernels import isa

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_F16, _F32 = ir.HalfType(), ir.FloatType()


def _converts() -> bool:
    """Return whether LLVM can convert without its runtime library."""
    features = isa.features()
    return "x86" not in features or "f16c" in features or "avx512f" in features


def _like(value, element):
    """Return the type of a scalar or vector with other elements."""
    if isinstance(value.type, ir.VectorType):
        return ir.VectorType(element, value.type.count)
    return element


def _constant(value_type: Any, number: int) -> Any:
    if isinstance(value_type, ir.VectorType):
        return ir.Constant(value_type, [number] * value_type.count)
    return ir.Constant(value_type, number)


def emit_widen(builder, bits):
    """Emit the float32 of float16 given as int16, one or a vector."""
    if _converts():
        return builder.fpext(builder.bitcast(bits, _like(bits, _F16)), _like(bits, _F32))
    words, floats = _like(bits, _I32), _like(bits, _F32)
    wide = builder.zext(bits, words)
    size = builder.shl(builder.and_(wide, _constant(words, 0x7FFF)), _constant(words, 13))
    # moving the exponent by a product keeps numbers below 2 ** -14 exact
    power = builder.bitcast(_constant(words, (127 + 112) << 23), floats)
    number = builder.bitcast(builder.fmul(builder.bitcast(size, floats), power), words)
    special = builder.icmp_unsigned(">=", size, _constant(words, 0x7C00 << 13))
    number = builder.select(special, builder.or_(size, _constant(words, 0x7F800000)), number)
    sign = builder.shl(builder.and_(wide, _constant(words, 0x8000)), _constant(words, 16))
    return builder.bitcast(builder.or_(number, sign), floats)


def emit_narrow(builder, value):
    """Emit the bits (int16) of the float16 nearest to float32, halves to even, one or a vector."""
    if _converts():
        return builder.bitcast(builder.fptrunc(value, _like(value, _F16)), _like(value, _I16))
    words, floats = _like(value, _I32), _like(value, _F32)
    bits = builder.bitcast(value, words)
    size = builder.and_(bits, _constant(words, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, _constant(words, 13)), _constant(words, 1))
    offset = _constant(words, 0xFFF - (112 << 23))
    normal = builder.lshr(builder.add(builder.add(size, offset), odd), _constant(words, 13))
    # below 2 ** -14 the sum with 0.5 rounds to multiples of 2 ** -24
    half = _constant(words, 126 << 23)
    total = builder.fadd(builder.bitcast(size, floats), builder.bitcast(half, floats))
    small = builder.sub(builder.bitcast(total, words), half)
    result = builder.select(
        builder.icmp_unsigned("<", size, _constant(words, (127 - 14) << 23)), small, normal
    )
    large = builder.icmp_unsigned(">=", size, _constant(words, (127 + 16) << 23))
    result = builder.select(large, _constant(words, 0x7C00), result)
    nan = builder.icmp_unsigned(">", size, _constant(words, 0x7F800000))
    result = builder.select(nan, _constant(words, 0x7E00), result)
    sign = builder.and_(builder.lshr(bits, _constant(words, 16)), _constant(words, 0x8000))
    return builder.trunc(builder.or_(result, sign), _like(value, _I16))
