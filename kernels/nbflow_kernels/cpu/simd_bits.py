"""Emitters for bit streams in byte vectors: windows of bits, lookups among 128 bytes.

Each is one instruction for 64 bytes on processors with AVX-512 VBMI, and a sequence of common
vector operations with the same result elsewhere.  `nbflow_kernels.formats.decode_cpu` joins
them to the decoder of trellis-coded formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from nbflow_kernels.cpu.llvm import I8, I32, call, constant
from nbflow_kernels.cpu.simd import i8x64, i32x16
from nbflow_kernels.cpu.simd_int8 import emit_lookup16


def emit_windows(builder: Any, words: Any, first: int, step: int, features: frozenset[str]) -> Any:
    """Emit bytes of bits: byte j of each word's four is its 8 bits from ``first + step * j`` on.

    Bits outside of 0..31 are arbitrary.
    """
    starts = [first + step * j for j in range(4)]
    if "avx512vbmi" in features:
        # two words are one source of 64 bits
        controls = [start % 64 for start in (*starts, *(32 + start for start in starts))]
        given = [builder.bitcast(words, i8x64.llvm), constant(I8, controls * 8)]
        return call(builder, "llvm.x86.avx512.pmultishift.qb.512", i8x64.llvm, given[::-1])
    result = ir.Constant(i32x16.llvm, [0] * 16)
    for j, start in enumerate(starts):
        shift, mask = start - 8 * j, constant(I32, [0xFF << 8 * j] * 16)
        by = constant(I32, [abs(shift)] * 16)
        moved = builder.lshr(words, by) if shift >= 0 else builder.shl(words, by)
        result = builder.or_(result, builder.and_(moved, mask))
    return builder.bitcast(result, i8x64.llvm)


def emit_lookup128(
    builder: Any, table: Sequence[int], index: Any, features: frozenset[str]
) -> Any:  # fmt: skip
    """Look the low 7 bits of each byte up among 128 constant bytes."""
    if "avx512vbmi" in features:
        low, high = constant(I8, list(table[:64])), constant(I8, list(table[64:]))
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        return call(builder, name, i8x64.llvm, [low, index, high])
    nibbles = builder.and_(index, constant(I8, [15] * 64))
    sixteenth = builder.and_(index, constant(I8, [0x70] * 64))
    result = ir.Constant(i8x64.llvm, [0] * 64)
    for i in range(8):
        entries = constant(I8, list(table[16 * i : 16 * i + 16]) * 4)
        found = emit_lookup16(builder, entries, nibbles, features)
        hit = builder.icmp_unsigned("==", sixteenth, constant(I8, [16 * i] * 64))
        result = builder.select(hit, found, result)
    return result
