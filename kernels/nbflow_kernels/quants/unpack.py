"""Reading the packed layout inside kernels: code vectors, and what turns codes into weights.

A kernel is made for a `PackedForm` by a factory and holds the form as a constant; the functions
here look at it while they are compiled, so what a format does not have costs nothing::

    @functools.cache
    def make(form: PackedForm):
        @njit
        def kernel(...):
            u = codes(form, unit_at, v)          # 64 bytes: column 4v + j of row r in byte 4r + j
            scale, base = parameters(form, block_at, s)
            w = weight(form, u, j, scale, base)  # column 4v + j of 16 rows

The weight is ``scale * value + base`` with one rounding, bit-equal to `dequantize`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import datamodel, extending, types
from numba.core.imputils import lower_constant
from numba.core.typing.typeof import typeof_impl

from nbflow_kernels import simd, simd_bytes
from nbflow_kernels._jit import FAST_MATH, helper
from nbflow_kernels.quants.packed import D_BYTES, PAIRS, PLANES, PackedForm
from nbflow_kernels.simd_bytes import dot_u7_i8, dot_u8_i8, field, load_bytes
from nbflow_kernels.stepping import intrinsic


class FormType(types.Type):
    """The Numba type of one `PackedForm`: all that is known of it is known to the compiler."""

    def __init__(self, form: PackedForm) -> None:
        self.form = form
        super().__init__(name=f"quants.{form}")


@extending.register_model(FormType)
class _FormModel(datamodel.models.OpaqueModel):
    pass


@typeof_impl.register(PackedForm)
def _typeof_form(form: PackedForm, context: Any) -> FormType:
    return FormType(form)


@lower_constant(FormType)
def _constant_form(context: Any, builder: Any, form_type: Any, value: Any) -> Any:
    return context.get_dummy_value()


_OPTIONS: Any = {"forceinline": True, "error_model": "numpy", "fastmath": FAST_MATH}  # as `helper`


def by_form(choose: Callable[[PackedForm], Callable[..., Any]]) -> Callable[..., Any]:
    """Make a function for kernels whose body is picked for its first argument, a form."""
    picked = functools.cache(choose)

    def function(form: Any, *args: Any) -> Any:
        return picked(form)(form, *args)

    def chosen(form: Any, *args: Any) -> Any:
        return choose(form.form)

    extending.overload(function, strict=False, jit_options=_OPTIONS)(chosen)
    function.__name__, function.__doc__ = choose.__name__, choose.__doc__
    return function


# ---- code vectors -------------------------------------------------------------------------------


@helper
def _shift_left(v: Any, bits: Any) -> Any:
    """Shift bytes left that have room for it."""
    words = simd.shl(simd_bytes.as_words(v), simd.splat_i32(bits))
    return simd_bytes.as_bytes(words)


@helper
def _pair_word(at: Any, w: Any) -> Any:
    """Return pair codes in the low 7 bits; those of the eighth word are the top bits of seven."""
    if w < 7:
        return load_bytes(at + 64 * w)
    word = simd_bytes.splat_bytes(0)
    for i in range(7):
        word = simd.or_(word, field(load_bytes(at + 64 * i), 7 - i, 1 << i))
    return word


def _pair_code(form: Any, at: Any, v: Any) -> Any:
    word = _pair_word(at, v >> 1)
    return simd_bytes.pair_second(word) if v & 1 else simd_bytes.pair_first(word)


def _plane(bits: int, offset: int) -> Any:
    """Return the reader of a plane of 1, 2, 4 or 8 bits that starts `offset` bytes into a unit."""
    if bits == 8:
        return helper(lambda at, v: load_bytes(at + offset + 64 * v))
    shift, last = {4: (1, 1), 2: (2, 3), 1: (3, 7)}[bits]
    mask = (1 << bits) - 1

    @helper
    def plane(at: Any, v: Any) -> Any:
        return field(load_bytes(at + offset + 64 * (v >> shift)), bits * (v & last), mask)

    return plane


@by_form
def stored_codes(form: PackedForm) -> Callable[..., Any]:
    """Return code vector v of a unit, values not looked up: ``stored_codes(form, at, v)``."""
    low_bits, high_bits = PLANES[form.bits]
    low = _plane(low_bits, 0)
    if not high_bits:
        return lambda form, at, v: low(at, v)
    high = _plane(high_bits, 64 * low_bits)
    return lambda form, at, v: simd.or_(low(at, v), _shift_left(high(at, v), low_bits))


@by_form
def codes(form: PackedForm) -> Callable[..., Any]:
    """Return code vector v of the unit at address `at`: ``codes(form, at, v)``, 64 bytes.

    Byte ``4 * row + j`` is the code of column ``4 * v + j``; a value plus 128, if the form has any.
    """
    if form.bits == PAIRS:
        return _pair_code
    if form.values is None:
        return lambda form, at, v: stored_codes(form, at, v)
    return lambda form, at, v: simd_bytes.lookup16(value_table(form), stored_codes(form, at, v))


@intrinsic
def value_table(typing_context: Any, form: Any) -> Any:
    """Return the form's values plus 128, 16 of them, 4 times."""
    values = [value + 128 for value in form.form.values]
    values = (values * 16)[:16]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(simd.i8x64.llvm, values * 4)

    return simd.i8x64(form), codegen


@by_form
def dot(form: PackedForm) -> Callable[..., Any]:
    """Return acc plus sums of 4 products of codes u and int8 x: ``dot(form, acc, u, x)``."""
    if form.bits == 8 or form.values is not None:
        return lambda form, acc, u, x: dot_u8_i8(acc, u, x)
    return lambda form, acc, u, x: dot_u7_i8(acc, u, x)


# ---- scales and bases ---------------------------------------------------------------------------


@helper
def _power(at: Any) -> Any:
    """Return 2 ** (e - 128) of 16 bytes e; in two factors, since 2 ** -128 is no normal number."""
    e = simd.load_u8(at)
    half = simd.shr(e, simd.splat_i32(1))
    bias, mantissa = simd.splat_i32(63), simd.splat_i32(23)
    first = simd.as_f32(simd.shl(simd.add(half, bias), mantissa))
    rest = simd.add(simd.sub(e, half), bias)
    return simd.mul(first, simd.as_f32(simd.shl(rest, mantissa)))


@helper
def _quotient(at: Any, divisor: Any) -> Any:
    """Return 16 bytes over a divisor, rounded as by a division: one correction is enough."""
    u = simd.to_f32(simd.load_u8(at))
    inverse = simd.splat(1.0 / divisor)
    q = simd.mul(u, inverse)
    return simd.fma(simd.fma(q, simd.splat(-divisor), u), inverse, q)


_LOAD_D: dict[str, Callable[..., Any]] = {
    "f16": lambda form, at: simd.load_f16(at),
    "f32": lambda form, at: simd.load_f32(at),
    "e8m0": lambda form, at: _power(at),
    "u8": lambda form, at: _quotient(at, 1000.0),
}


@by_form
def load_d(form: PackedForm) -> Callable[..., Any]:
    """Return `d` of 16 rows from the header: ``load_d(form, at)``."""
    return _LOAD_D[form.d_type]


@by_form
def load_m(form: PackedForm) -> Callable[..., Any]:
    """Return `m` of 16 rows from the header: ``load_m(form, at)``."""
    if form.d_type == "u8":
        return lambda form, at: simd.sub(_quotient(at, 100.0), simd.splat(1.0))
    return _LOAD_D[form.d_type]


@by_form
def scale_of(form: PackedForm) -> Callable[..., Any]:
    """Return the scales of sub-block s of a block: ``scale_of(form, at, s)``, exact."""
    per_d, size = form.d_block // form.sub_block, 16 * D_BYTES[form.d_type]
    factor, scales_at = form.factor, form.d_bytes

    def unscaled(form: Any, at: Any, s: Any) -> Any:
        d = load_d(form, at + s // per_d * size)
        return d if factor == 1.0 else simd.mul(d, simd.splat(factor))

    if form.scales == "none":
        return unscaled
    known = helper(unscaled)
    if form.scales == "u4":
        load = helper(lambda at: simd.and_(simd.load_u8(at), simd.splat_i32(15)))
    else:
        load = simd.load_i8 if form.scales == "i8" else simd.load_u8
    return lambda form, at, s: simd.mul(
        known(form, at, s), simd.to_f32(load(at + scales_at + 16 * s))
    )


@by_form
def base_of(form: PackedForm) -> Callable[..., Any]:
    """Return the bases of sub-block s of a block: ``base_of(form, at, s)``, exact."""
    per_d, size = form.d_block // form.sub_block, 16 * D_BYTES[form.d_type]
    m_at, mins_at = form.block // form.d_block * size, form.d_bytes
    if form.base == "none":
        return lambda form, at, s: simd.splat(-0.0)  # which changes no number it is added to
    if form.base == "d":
        return lambda form, at, s: load_m(form, at + m_at + s // per_d * size)
    if form.scales == "u4":
        load = helper(lambda at: simd.shr(simd.load_u8(at), simd.splat_i32(4)))
    else:
        mins_at += 16 * (form.block // form.sub_block)
        load = helper(lambda at: simd.load_u8(at))

    def minus_m_min(form: Any, at: Any, s: Any) -> Any:
        m = load_m(form, at + m_at + s // per_d * size)
        return simd.mul(simd.mul(m, simd.splat(-1.0)), simd.to_f32(load(at + mins_at + 16 * s)))

    return minus_m_min


def folds_zero(form: PackedForm) -> bool:
    """Return whether ``zero * scale`` is exact (while it is finite) and can stand for the base."""
    power_of_two = form.zero & (form.zero - 1) == 0
    return form.base == "none" and (
        power_of_two or (form.d_type == "f16" and form.scales == "none")
    )


@by_form
def parameters(form: PackedForm) -> Callable[..., Any]:
    """Return what `weight` needs of a sub-block: ``scale, base = parameters(form, at, s)``."""
    zero = -float(form.zero)

    def folded(form: Any, at: Any, s: Any) -> Any:
        scale = scale_of(form, at, s)
        return scale, simd.mul(scale, simd.splat(zero))

    if form.zero and folds_zero(form):
        return folded
    return lambda form, at, s: (scale_of(form, at, s), base_of(form, at, s))


@by_form
def weight(form: PackedForm) -> Callable[..., Any]:
    """Return column j of 4 of a code vector as weights: ``weight(form, u, j, scale, base)``."""
    zero = float(form.zero)

    def of_code(form: Any, u: Any, j: Any, scale: Any, base: Any) -> Any:
        code = simd.shr(simd_bytes.as_words(u), simd.splat_i32(8 * j))
        value = simd.to_f32(simd.and_(code, simd.splat_i32(255)))
        return simd.fma(scale, value, base)

    def of_signed(form: Any, u: Any, j: Any, scale: Any, base: Any) -> Any:
        code = simd.shr(simd_bytes.as_words(u), simd.splat_i32(8 * j))
        value = simd.to_f32(simd.and_(code, simd.splat_i32(255)))
        return simd.fma(scale, simd.sub(value, simd.splat(zero)), base)

    return of_code if not form.zero or folds_zero(form) else of_signed


# ---- whole blocks -------------------------------------------------------------------------------


@by_form
def decode_blocks(form: PackedForm) -> Callable[..., Any]:
    """Decode blocks of a row group: ``decode_blocks(form, at, n_blocks, to)``.

    Writes 16 float32 for each column, one after the other, to address `to`.
    """
    units, vectors, per_scale = form.block // form.unit, form.unit // 4, form.sub_block // 4
    header, unit_bytes, block_bytes = form.header_bytes, form.unit_bytes, form.block_bytes

    def decode(form: Any, at: Any, n_blocks: Any, to: Any) -> None:
        for _ in range(n_blocks):
            for unit in range(units):
                for v in range(vectors):
                    scale, base = parameters(form, at, (unit * vectors + v) // per_scale)
                    u = codes(form, at + header + unit * unit_bytes, v)
                    for j in range(4):
                        simd.store_f32(to + 64 * j, weight(form, u, j, scale, base))
                    to += 256
            at += block_bytes

    return decode
