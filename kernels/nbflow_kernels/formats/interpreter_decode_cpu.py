"""NumPy fallbacks of `nbflow_kernels.formats.decode_cpu`; `form` is a `CpuLayout`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter import register_tiles_int8, simd, simd_int8
from nbflow_kernels.cpu.interpreter.memory import LANES, read
from nbflow_kernels.formats import trellis_code
from nbflow_kernels.formats.layout_cpu import D_BYTES, FIELDS, PAIRS

Vector = NDArray[Any]

# ---- code vectors -------------------------------------------------------------------------------


def codes(form: Any, at: Any, i: Any, v: Any) -> Vector:
    """Return code vector `v` of unit `i` of the block at address `at`."""
    if form.trellis:
        return _trellis(form, at, i, v)
    at = unit_of(form, at, i)
    if form.bits == PAIRS:
        pairs = _pair_word(at, v // 2)
        return simd_int8.pair_second(pairs) if v % 2 else simd_int8.pair_first(pairs)
    code = np.zeros(4 * LANES, np.uint8)
    for vector, bit, width, word, place in FIELDS[form.bits]:
        if vector == v:
            stored = simd_int8.load_bytes(at + 64 * word)
            code |= simd_int8.move(stored, place, bit, width)
    if form.values is None or form.has_float_values:
        return code
    table = np.resize(np.array(form.values, np.int32) + 128, LANES).astype(np.uint8)
    return table[code]


def dots_of_unit(form: Any, ints: Any, at: Any, i: Any, x_at: Any, x_step: Any) -> Any:
    """Return sums of a unit of a trellis times int8 activations, added to `ints`."""
    for v in range(form.unit // 4):
        u = codes(form, at, i, v)
        ints = register_tiles_int8.dots(ints, u, 0, x_at + 4 * v, x_step, 8)
    return ints


def _trellis(form: Any, at: Any, i: Any, v: Any) -> Vector:
    """Return code vector `v` of unit `i` of the bit stream of a block."""
    bits = form.bits
    end = bits * (32 * i + 4 * v + np.arange(1, 5))  # of the states of four columns
    bytes_of_row = np.concatenate(
        [read(unit_of(form, at, 0) + 64 * w, np.uint32, LANES)[:, None] for w in range(8 * bits)],
        axis=1,
    ).view(np.uint8)
    states = trellis_code.states_of_stream(bytes_of_row, bits)[:, end // bits - 1]
    found: Vector = trellis_code.codes_of_states(bits)[states].reshape(-1)
    return found


def _pair_word(at: Any, word: int) -> Vector:
    """Return pair codes in the low 7 bits; word 7 is gathered from the top bits of words 0 to 6."""
    if word < PAIRS:
        return simd_int8.load_bytes(at + 64 * word)
    bits = [simd_int8.move(simd_int8.load_bytes(at + 64 * i), 7, i, 1) for i in range(PAIRS)]
    joined: Vector = np.bitwise_or.reduce(bits)
    return joined


def unit_of(form, at, i):
    """Return the address of the codes of unit `i` of the block at address `at`."""
    segment, unit = divmod(i, form.segment // form.unit)
    first = at + form.d_bytes + form.codes_at
    return first + segment * form.segment_bytes + unit * form.unit_bytes


# ---- scales and bases ---------------------------------------------------------------------------


def _stored(form: Any, at: Any, base: bool) -> Vector:
    """Load `d` or `m` of 16 rows as float32."""
    if form.d_type == "f16":
        return simd.load_f16(at)
    if form.d_type == "f32":
        return simd.load_f32(at)
    numbers = read(at, np.uint8, LANES)
    if form.d_type == "e8m0":
        return np.ldexp(np.float32(1), numbers.astype(np.int32) - 128).astype(np.float32)
    if form.d_type == "e4m3":  # a truncated float16 with another exponent bias
        return (numbers.astype(np.uint16) << 7).view(np.float16).astype(np.float32) * np.float32(
            128
        )
    quotient = numbers.astype(np.float32) / np.float32(100 if base else 1000)
    return quotient - np.float32(1) if base else quotient


def _of_block(form, at, s):
    """Return the address of `d` of sub-block `s`."""
    per_d = form.d_block // form.sub_block
    return at + (0 if form.block == form.d_block else s // per_d * LANES * D_BYTES[form.d_type])


def _of_segment(form, at, s):
    """Return the address of the integer scales of sub-block `s`."""
    segment, scale = divmod(s, form.segment_scales)
    return at + form.d_bytes + segment * form.segment_bytes + LANES * scale


def d_of(form: Any, at: Any, s: Any) -> Vector:
    """Return `d` of a sub-block."""
    d = _stored(form, _of_block(form, at, s), base=False)
    return d * np.float32(form.factor)


def m_of(form: Any, at: Any, s: Any) -> Vector:
    """Return `m` of a sub-block, or -0."""
    if form.base == "none":
        return simd.splat(-0.0)
    offset = LANES * D_BYTES[form.d_type] * (form.block // form.d_block)
    return _stored(form, _of_block(form, at, s) + offset, base=True)


def scale_of(form: Any, at: Any, s: Any, d: Vector) -> Vector:
    """Return d times the integer scale of a sub-block."""
    if form.scales == "none":
        return d
    return d * _integer_scales(form, at, s).astype(np.float32)


def _integer_scales(form: Any, at: Any, s: Any) -> Vector:
    if form.scales in ("i6", "i8"):
        return read(_of_segment(form, at, s), np.int8, LANES)
    low: Vector = read(_of_segment(form, at, s), np.uint8, LANES) & np.uint8(
        15 if form.scales == "u4" else 255
    )
    return low


def folded(form: Any, at: Any, s: Any, u: Vector) -> Vector:
    """Return the integer scale of a sub-block times each value, plus `folded_zero`."""
    scales = _integer_scales(form, at, s).astype(np.int32).repeat(4)
    products: Vector = scales * (u.astype(np.int32) - form.zero) + form.folded_zero
    return products.astype(np.uint8)


def base_of(form: Any, at: Any, s: Any, m: Vector) -> Vector:
    """Return the base of a sub-block: m, or -m times its integer min."""
    if form.base != "min":
        return m
    place = _of_segment(form, at, s)
    if form.scales == "u4":
        numbers = read(place, np.uint8, LANES) >> np.uint8(4)
    else:
        numbers = read(place + LANES * form.segment_scales, np.uint8, LANES)
    return -m * numbers.astype(np.float32)


# ---- weights ------------------------------------------------------------------------------------


def parameters(form: Any, at: Any, s: Any) -> tuple[Vector, Vector]:
    """Return scale and base of a sub-block."""
    scale = scale_of(form, at, s, d_of(form, at, s))
    if form.zero and form.folds_zero:
        return scale, scale * np.float32(-form.zero)
    return scale, base_of(form, at, s, m_of(form, at, s))


def weight(form: Any, u: Vector, j: Any, scale: Vector, base: Vector) -> Vector:
    """Dequantize column `j` of a code vector."""
    if form.has_float_values:
        return simd.fma(scale, np.array(form.values, np.float32)[u[j::4]], base)
    number = u[j::4].astype(np.float32)
    if form.zero and not form.folds_zero:
        number = number - np.float32(form.zero)
    return simd.fma(scale, number, base)
