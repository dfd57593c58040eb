"""Emitters of float16 and bfloat16 conversions, also for processors without instructions for them.

On x86 without F16C LLVM calls its runtime library, which Numba does not load.  There the result is
computed from the bits, equal but for the payload of NaN.
"""

from __future__ import annotations

from nbflow_kernels.cpu import isa
from nbflow_kernels.cpu.llvm import F16, F32, I16, I32, like, repeated


def _converts() -> bool:
    """Return whether LLVM converts float16 without its runtime library."""
    features = isa.features()
    return "x86" not in features or "f16c" in features or "avx512f" in features


def emit_widen(builder, bits, kind="f16"):
    """Emit float32 from the bits of ``"f16"`` or ``"bf16"``, scalar or vector; None: unchanged."""
    if kind is None:
        return bits
    words, floats = like(bits, I32), like(bits, F32)
    if kind == "f16" and _converts():
        return builder.fpext(builder.bitcast(bits, like(bits, F16)), floats)
    wide = builder.zext(bits, words)
    if kind == "bf16":
        return builder.bitcast(builder.shl(wide, repeated(words, 16)), floats)
    size = builder.shl(builder.and_(wide, repeated(words, 0x7FFF)), repeated(words, 13))
    # a product that moves the exponent is exact below 2 ** -14 too
    power = builder.bitcast(repeated(words, (127 + 112) << 23), floats)
    number = builder.bitcast(builder.fmul(builder.bitcast(size, floats), power), words)
    special = builder.icmp_unsigned(">=", size, repeated(words, 0x7C00 << 13))
    number = builder.select(special, builder.or_(size, repeated(words, 0x7F800000)), number)
    sign = builder.shl(builder.and_(wide, repeated(words, 0x8000)), repeated(words, 16))
    return builder.bitcast(builder.or_(number, sign), floats)


def emit_narrow(builder, value):
    """Emit the int16 bits of the nearest float16, ties to even, scalar or vector."""
    if _converts():
        return builder.bitcast(builder.fptrunc(value, like(value, F16)), like(value, I16))
    words, floats = like(value, I32), like(value, F32)
    bits = builder.bitcast(value, words)
    size = builder.and_(bits, repeated(words, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, repeated(words, 13)), repeated(words, 1))
    offset = repeated(words, 0xFFF - (112 << 23))
    normal = builder.lshr(builder.add(builder.add(size, offset), odd), repeated(words, 13))
    # below 2 ** -14 the sum with 0.5 rounds to multiples of 2 ** -24
    half = repeated(words, 126 << 23)
    total = builder.fadd(builder.bitcast(size, floats), builder.bitcast(half, floats))
    small = builder.sub(builder.bitcast(total, words), half)
    result = builder.select(
        builder.icmp_unsigned("<", size, repeated(words, (127 - 14) << 23)), small, normal
    )
    large = builder.icmp_unsigned(">=", size, repeated(words, (127 + 16) << 23))
    result = builder.select(large, repeated(words, 0x7C00), result)
    nan = builder.icmp_unsigned(">", size, repeated(words, 0x7F800000))
    result = builder.select(nan, repeated(words, 0x7E00), result)
    sign = builder.and_(builder.lshr(bits, repeated(words, 16)), repeated(words, 0x8000))
    return builder.trunc(builder.or_(result, sign), like(value, I16))


def emit_narrow_bf16(builder, value):
    """Emit the int16 bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    words = like(value, I32)
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, repeated(words, 16)), repeated(words, 1))
    near = builder.add(bits, builder.add(odd, repeated(words, 0x7FFF)))
    quiet = builder.or_(bits, repeated(words, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, near)
    return builder.trunc(builder.lshr(chosen, repeated(words, 16)), like(value, I16))
