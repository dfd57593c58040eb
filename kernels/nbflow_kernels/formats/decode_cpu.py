"""LLVM intrinsics that decode the CPU layout in kernels: code vectors, scales, weights.

A factory makes a kernel per `CpuLayout`, which it closes over as a constant.  The intrinsics emit
only the instructions of this layout, so features a format lacks cost nothing::

    @functools.cache
    def make(form: CpuLayout):
        @jit.kernel
        def kernel(...):
            u = codes(form, block_at, unit, v)
            scale, base = parameters(form, block_at, s)
            w = weight(form, u, j, scale, base)

================================  =================================================================
`codes(form, at, i, v)`           code vector v of unit i of the block at address `at`: 64 bytes,
                                  where byte ``4 * row + j`` is the code of column ``4 * v + j``;
                                  value + 128 if the format has a codebook or a trellis
`d_of(form, at, s)`               `d` (times `factor`) of sub-block s of the block at `at`, 16 rows
`m_of(form, at, s)`               `m` likewise; -0, the additive identity, in formats without
`scale_of(form, at, s, d)`        d times the integer scale of sub-block s, exact
`base_of(form, at, s, m)`         m, or -m times the integer min of sub-block s, exact
`folded(form, at, s, u)`          the integer scale of sub-block s times each value of code vector
                                  u, plus `folded_zero`: bytes again
`parameters(form, at, s)`         scale and base for `weight`, with -zero * scale folded into the
                                  base if that is exact
`weight(form, u, j, scale, base)` column ``4 * v + j``, 16 float32: scale * value + base, rounded
                                  once, bit-equal to `dequantize`
`dots_of_unit(form, ints, at, i,  `register_tiles_int8.dots` with the code vectors of unit i, for
x_at, x_step)`                    formats with a trellis
`decode_blocks(form, at, n, to)`  all columns of n blocks, 16 float32 each, to address `to`
================================  =================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import datamodel, errors, extending, types
from numba.core.imputils import lower_constant
from numba.core.typing.typeof import typeof_impl

from nbflow_kernels.cpu import interpreter, isa, jit, llvm, simd
from nbflow_kernels.cpu.float16 import emit_widen
from nbflow_kernels.cpu.llvm import F32, I8, I16, I32, I64
from nbflow_kernels.cpu.register_tiles_int8 import Int8Tile
from nbflow_kernels.cpu.simd import f32x16, i8x64, i32x16
from nbflow_kernels.cpu.simd_bits import emit_lookup128, emit_windows
from nbflow_kernels.cpu.simd_int8 import emit_dot, emit_lookup16, emit_move, emit_pair
from nbflow_kernels.cpu.simd_shuffle import emit_lookup16_f32
from nbflow_kernels.formats import trellis_code
from nbflow_kernels.formats.layout_cpu import D_BYTES, FIELDS, PAIRS, CpuLayout

intrinsic = functools.partial(
    interpreter.intrinsic, fallback="nbflow_kernels.formats.interpreter_decode_cpu"
)


class CpuLayoutType(types.Type):
    """Numba type of one `CpuLayout`, whose fields are thus compile-time constants."""

    def __init__(self, form: CpuLayout) -> None:
        self.form = form
        super().__init__(name=f"quants.{form}")


@extending.register_model(CpuLayoutType)
class _FormModel(datamodel.models.OpaqueModel):
    pass


@typeof_impl.register(CpuLayout)
def _typeof_form(form, context):
    return CpuLayoutType(form)


@lower_constant(CpuLayoutType)
def _constant_form(context, builder, form_type, value):
    return context.get_dummy_value()


# ---- code generation ----------------------------------------------------------------------------


class _Emit:
    """Code generator of the decoders of one layout."""

    def __init__(self, builder: Any, form: CpuLayout) -> None:
        self.builder = builder
        self.form = form
        self.features = isa.features()
        self.shared_windows: dict[tuple[int, int], Any] | None = None
        """Windows of a trellis's unit, where code vectors follow each other in one basic block."""

    def load(self, at: Any, offset: int, element: Any, lanes: int = 16) -> Any:
        """Load the vector at address `at` + `offset`."""
        return llvm.load(
            self.builder, llvm.offset(self.builder, at, offset), llvm.vector(element, lanes)
        )

    def splat(self, scalar: Any, vector: Any) -> Any:
        """Broadcast a Python number or an LLVM scalar to all lanes."""
        if isinstance(scalar, int | float):
            return ir.Constant(vector, [scalar] * vector.count)
        return llvm.splat(self.builder, scalar, vector.count)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c."""
        return llvm.fma(self.builder, a, b, c)

    def floats(self, at: Any, offset: int, signed: bool) -> Any:
        """Load 16 bytes as float32."""
        loaded = self.load(at, offset, I8)
        if signed:
            return self.builder.sitofp(loaded, f32x16.llvm)
        return self.builder.uitofp(loaded, f32x16.llvm)

    def code(self, at: Any, v: int) -> Any:
        """Extract code vector `v`."""
        if self.form.bits == PAIRS:
            return emit_pair(self.builder, self._pair_word(at, v // 2), v % 2 == 1, self.features)
        parts = [field[1:] for field in FIELDS[self.form.bits] if field[0] == v]
        moved = [
            self._move(self._word(at, word), place, bit, width) for bit, width, word, place in parts
        ]
        return self._all(moved)

    def _word(self, at: Any, word: int) -> Any:
        return self.load(at, 64 * word, I8, 64)

    def _pair_word(self, at: Any, word: int) -> Any:
        """Return pair codes in the low 7 bits; word 7 is gathered from the top bits of the rest."""
        if word < PAIRS:
            return self._word(at, word)
        return self._all([self._move(self._word(at, i), 7, i, 1) for i in range(PAIRS)])

    def _move(self, v: Any, source: int, target: int, width: int) -> Any:
        if width == 8:
            return v
        if source == target:
            mask = ((1 << width) - 1) << target
            return self.builder.and_(v, self.splat(mask, i8x64.llvm))
        return emit_move(self.builder, v, source, target, width, self.features)

    def _all(self, parts: list[Any]) -> Any:
        result = parts[0]
        for part in parts[1:]:
            result = self.builder.or_(result, part)
        return result

    def trellis(self, at: Any, i: Any, v: int) -> Any:
        """Return code vector `v` of unit `i` of a block: bits of states, mixed and looked up."""
        k, n, n_oldest = self.form.bits, trellis_code.INDEX_BITS, trellis_code.OLDEST_BITS
        end = k * (4 * v + 1)  # of the state of the first column
        # with 2 bits, the oldest bits are the top ones of the newest bits of the columns before
        below = n - n_oldest if 4 * k == trellis_code.STATE_BITS - n_oldest else 0
        newest = self._windows(at, i, end - n, n)
        oldest = self._windows(at, i, end - trellis_code.STATE_BITS - below, below + n_oldest)
        flips = trellis_code.flips().tolist()
        flips = [flips[byte >> below & (1 << n_oldest) - 1] for byte in range(1 << n)]
        flip = emit_lookup128(self.builder, flips, oldest, self.features)
        index = self.builder.xor(newest, flip)
        return emit_lookup128(self.builder, trellis_code.levels(k).tolist(), index, self.features)

    def _windows(self, at: Any, i: Any, first: int, n: int) -> Any:
        """Return `n` bits of the stream per column, from bit `first` of unit `i` on.

        The bits above of each byte are arbitrary.
        """
        shared = {} if self.shared_windows is None else self.shared_windows
        if (first, n) not in shared:
            shared[first, n] = self._new_windows(at, i, first, n)
        return shared[first, n]

    def _new_windows(self, at: Any, i: Any, first: int, n: int) -> Any:
        """Emit `_windows`."""
        k = self.form.bits
        word, last = first // 32, (first + 3 * k + n - 1) // 32
        words = self._stream_word(at, i, word)
        first -= 32 * word
        if last > word:  # 32 bits around the border
            both = [self._stream_word(at, i, last), words]
            skipped = 16 if first >= 16 else 8
            shift = ir.Constant(i32x16.llvm, [skipped] * 16)
            words = llvm.call(self.builder, "llvm.fshr.v16i32", i32x16.llvm, [*both, shift])
            first -= skipped
        return emit_windows(self.builder, words, first, k, self.features)

    def _stream_word(self, at: Any, i: Any, word: int) -> Any:
        """Return a word of the stream of unit `i`; word -1 is the last of the unit before, or 0."""
        builder, unit = self.builder, self.unit(at, i)
        if word >= 0:
            return self.load(unit, 64 * word, I32)
        inside = builder.icmp_unsigned("!=", i, ir.Constant(I64, 0))
        before = builder.mul(builder.zext(inside, I64), ir.Constant(I64, 64))
        words = self.load(builder.sub(unit, before), 0, I32)
        return builder.and_(words, self.splat(builder.sext(inside, I32), i32x16.llvm))

    def value(self, block: Any, i: Any, v: int) -> Any:
        """Return code vector `v` of unit `i`; looked-up values plus 128 where there are such."""
        if self.form.trellis:
            return self.trellis(block, i, v)
        code = self.code(self.unit(block, i), v)
        if self.form.values is None or self.form.has_float_values:
            return code
        table = ([value + 128 for value in self.form.values] * 16)[:16]
        constant = ir.Constant(i8x64.llvm, table * 4)
        return emit_lookup16(self.builder, constant, code, self.features)

    def stored(self, at: Any, offset: int, base: bool) -> Any:
        """Load `d` or `m` of 16 rows as float32."""
        builder, kind = self.builder, self.form.d_type
        if kind == "f16":
            return emit_widen(builder, self.load(at, offset, I16))
        if kind == "f32":
            return self.load(at, offset, F32)
        if kind == "e8m0":
            return self._power(at, offset)
        if kind == "e4m3":  # a truncated float16 with another exponent bias
            wide = builder.zext(self.load(at, offset, I8), ir.VectorType(I16, 16))
            bits = builder.shl(wide, self.splat(7, wide.type))
            return builder.fmul(emit_widen(builder, bits), self.splat(128.0, f32x16.llvm))
        quotient = self._quotient(at, offset, 100.0 if base else 1000.0)
        return builder.fsub(quotient, self.splat(1.0, f32x16.llvm)) if base else quotient

    def _power(self, at: Any, offset: int) -> Any:
        """Return 2 ** (e - 128) as a product of two powers, since 2 ** -128 is subnormal."""
        builder, words = self.builder, i32x16.llvm
        e = builder.zext(self.load(at, offset, I8), words)
        half = builder.lshr(e, self.splat(1, words))
        factors = []
        for part in (half, builder.sub(e, half)):
            exponent = builder.add(part, self.splat(63, words))
            bits = builder.shl(exponent, self.splat(23, words))
            factors.append(builder.bitcast(bits, f32x16.llvm))
        return builder.fmul(*factors)

    def _quotient(self, at: Any, offset: int, divisor: float) -> Any:
        """Divide bytes by a constant, correctly rounded: reciprocal and one FMA correction."""
        u = self.floats(at, offset, signed=False)
        # LLVM accepts only constants that are exact in float32
        inverse = self.splat(float(np.float32(1 / divisor)), f32x16.llvm)
        q = self.builder.fmul(u, inverse)
        rest = self.fma(q, self.splat(-divisor, f32x16.llvm), u)
        return self.fma(rest, inverse, q)

    def d(self, at: Any, s: Any) -> Any:
        """Return `d` of sub-block `s`."""
        d = self.stored(self._of_block(at, s), 0, base=False)
        if self.form.factor == 1.0:
            return d
        return self.builder.fmul(d, self.splat(self.form.factor, f32x16.llvm))

    def m(self, at: Any, s: Any) -> Any:
        """Return `m` of sub-block `s`, or -0."""
        form = self.form
        if form.base == "none":
            return self.splat(-0.0, f32x16.llvm)
        offset = 16 * D_BYTES[form.d_type] * (form.block // form.d_block)
        return self.stored(self._of_block(at, s), offset, base=True)

    def _of_block(self, at: Any, s: Any) -> Any:
        """Return the address of `d` of sub-block `s`."""
        form, builder = self.form, self.builder
        if form.block == form.d_block:
            return at
        per_d = ir.Constant(I64, form.d_block // form.sub_block)
        size = ir.Constant(I64, 16 * D_BYTES[form.d_type])
        return builder.add(at, builder.mul(builder.udiv(s, per_d), size))

    def scale(self, at: Any, s: Any, d: Any) -> Any:
        """Return d times the integer scale of sub-block `s`."""
        form, builder = self.form, self.builder
        if form.scales == "none":
            return d
        place = self._of_segment(at, s)
        if form.scales == "u4":
            both = self.load(place, 0, I8)
            low = builder.and_(both, self.splat(15, both.type))
            return builder.fmul(d, builder.uitofp(low, f32x16.llvm))
        return builder.fmul(d, self.floats(place, 0, signed=form.scales in ("i6", "i8")))

    def _of_segment(self, at: Any, s: Any) -> Any:
        """Return the address of the integer scales of sub-block `s`."""
        form, builder = self.form, self.builder
        count = ir.Constant(I64, form.segment_scales)
        segment = builder.mul(builder.udiv(s, count), ir.Constant(I64, form.segment_bytes))
        scale = builder.mul(builder.urem(s, count), ir.Constant(I64, 16))
        first = builder.add(at, ir.Constant(I64, form.d_bytes))
        return builder.add(first, builder.add(segment, scale))

    def unit(self, at: Any, i: Any) -> Any:
        """Return the address of the codes of unit `i`."""
        form, builder = self.form, self.builder
        first = builder.add(at, ir.Constant(I64, form.d_bytes + form.codes_at))
        if form.segment == form.block:
            return builder.add(first, builder.mul(i, ir.Constant(I64, form.unit_bytes)))
        count = ir.Constant(I64, form.segment // form.unit)
        segment = builder.mul(builder.udiv(i, count), ir.Constant(I64, form.segment_bytes))
        unit = builder.mul(builder.urem(i, count), ir.Constant(I64, form.unit_bytes))
        return builder.add(first, builder.add(segment, unit))

    def base(self, at: Any, s: Any, m: Any) -> Any:
        """Return the base of sub-block `s`: m, or -m times its integer min."""
        form, builder = self.form, self.builder
        if form.base != "min":
            return m
        place = self._of_segment(at, s)
        if form.scales == "u4":
            both = self.load(place, 0, I8)
            high = builder.lshr(both, self.splat(4, both.type))
            number = builder.uitofp(high, f32x16.llvm)
        else:
            number = self.floats(place, 16 * form.segment_scales, signed=False)
        return builder.fmul(builder.fmul(m, self.splat(-1.0, f32x16.llvm)), number)

    def folded(self, at: Any, s: Any, u: Any) -> Any:
        """Return scale * value + folded_zero of a code vector of sub-block `s`, modulo 256."""
        form, builder = self.form, self.builder
        numbers = self.load(self._of_segment(at, s), 0, I8)
        if form.scales == "u4":
            numbers = builder.and_(numbers, self.splat(15, numbers.type))
        lanes = [row for row in range(16) for _ in range(4)]
        scales = llvm.shuffle(builder, numbers, numbers, lanes)
        value = builder.sub(u, self.splat(form.zero, i8x64.llvm))
        product = builder.mul(value, scales)
        return builder.add(product, self.splat(form.folded_zero, i8x64.llvm))

    def weight(self, u: Any, j: Any, scale: Any, base: Any) -> Any:
        """Dequantize column `j` of a code vector."""
        builder, words = self.builder, i32x16.llvm
        shift = builder.trunc(builder.shl(j, ir.Constant(I64, 3)), I32)
        code = builder.lshr(builder.bitcast(u, words), self.splat(shift, words))
        code = builder.and_(code, self.splat(255, words))
        if self.form.has_float_values:
            number = emit_lookup16_f32(builder, self.form.values or (), code, self.features)
            return self.fma(scale, number, base)
        number = builder.sitofp(code, f32x16.llvm)
        if self.form.zero and not self.form.folds_zero:
            number = builder.fsub(number, self.splat(float(self.form.zero), f32x16.llvm))
        return self.fma(scale, number, base)


# ---- the functions ------------------------------------------------------------------------------


def _function(name: str, result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """Make the intrinsic ``name(form, *arguments)`` that calls ``emit(_Emit, *LLVM values)``."""

    def define(form: Any, given: tuple[Any, ...]) -> Any:
        if not isinstance(form, CpuLayoutType) or len(given) != len(arguments):
            raise errors.TypingError(f"unpack.{name}: wanted a form and {arguments}, got {given}")
        vectors = (f32x16, i32x16, i8x64)
        for wanted, found in zip(arguments, given, strict=True):
            if (wanted in vectors or found in vectors) and wanted != found:
                raise errors.TypingError(f"unpack.{name}: wanted {arguments}, got {given}")

        def codegen(context, builder, signature, args):
            found = signature.args[1:]
            values = [
                value if have == want else context.cast(builder, value, have, want)
                for value, have, want in zip(args[1:], found, arguments, strict=True)
            ]
            emitted = emit(_Emit(builder, form.form), *values)
            if isinstance(emitted, tuple):
                return context.make_tuple(builder, signature.return_type, emitted)
            return emitted

        return result(form, *given), codegen

    def two(typing_context, form, a, b):
        return define(form, (a, b))

    def three(typing_context, form, a, b, c):
        return define(form, (a, b, c))

    def four(typing_context, form, a, b, c, d):
        return define(form, (a, b, c, d))

    chosen = (two, three, four)[len(arguments) - 2]
    chosen.__name__ = name
    return intrinsic(chosen)


def _emit_codes(emit: _Emit, at: Any, i: Any, v: Any) -> Any:
    """Switch on `v`, which is constant after LLVM unrolls the loop over code vectors."""
    builder = emit.builder
    n = emit.form.unit // 4
    done = builder.append_basic_block("codes.done")
    cases = [builder.append_basic_block(f"codes.{case}") for case in range(n)]
    switch = builder.switch(v, cases[-1])
    values = []
    for vector, case in enumerate(cases):
        if vector < n - 1:
            switch.add_case(ir.Constant(I64, vector), case)
        builder.position_at_end(case)
        values.append((emit.value(at, i, vector), builder.block))
        builder.branch(done)
    builder.position_at_end(done)
    result = builder.phi(i8x64.llvm)
    for value, block in values:
        result.add_incoming(value, block)
    return result


def _emit_parameters(emit: _Emit, at: Any, s: Any) -> tuple[Any, Any]:
    form = emit.form
    scale = emit.scale(at, s, emit.d(at, s))
    if form.zero and form.folds_zero:
        return scale, emit.builder.fmul(scale, emit.splat(-float(form.zero), f32x16.llvm))
    return scale, emit.base(at, s, emit.m(at, s))


_INT = types.int64

codes = _function("codes", i8x64, (_INT, _INT, _INT), _emit_codes)
d_of = _function("d_of", f32x16, (_INT, _INT), lambda emit, at, s: emit.d(at, s))
m_of = _function("m_of", f32x16, (_INT, _INT), lambda emit, at, s: emit.m(at, s))
scale_of = _function(
    "scale_of", f32x16, (_INT, _INT, f32x16), lambda emit, at, s, d: emit.scale(at, s, d)
)
base_of = _function(
    "base_of", f32x16, (_INT, _INT, f32x16), lambda emit, at, s, m: emit.base(at, s, m)
)
folded = _function(
    "folded", i8x64, (_INT, _INT, i8x64), lambda emit, at, s, u: emit.folded(at, s, u)
)
parameters = _function("parameters", types.UniTuple(f32x16, 2), (_INT, _INT), _emit_parameters)
weight = _function(
    "weight",
    f32x16,
    (i8x64, _INT, f32x16, f32x16),
    lambda emit, u, j, scale, base: emit.weight(u, j, scale, base),
)


@intrinsic
def dots_of_unit(typing_context, form, ints, at, i, x_at, x_step):
    """Return sums of a unit of a trellis, 32 columns, times int8 activations, added to `ints`.

    As `register_tiles_int8.dots` with each of its `codes`, whose windows of bits are shared.
    """
    if not isinstance(form, CpuLayoutType) or not isinstance(ints, Int8Tile) or ints.rows != 1:
        raise errors.TypingError("unpack.dots_of_unit: wanted a form and sums of a row group")

    def codegen(context, builder, signature, args):
        kinds = signature.args[2:]
        at, i, x_at, x_step = (
            context.cast(builder, value, kind, types.int64)
            for value, kind in zip(args[2:], kinds, strict=True)
        )
        emit, sums = _Emit(builder, form.form), args[1]
        emit.shared_windows = {}
        for v in range(form.form.unit // 4):
            u = emit.trellis(at, i, v)
            for t in range(ints.tokens):
                address = llvm.element(builder, llvm.offset(builder, x_at, 4 * v), x_step, t)
                x = llvm.splat(builder, llvm.load(builder, address, I32))
                x, old = builder.bitcast(x, i8x64.llvm), builder.extract_value(sums, t)
                new = emit_dot(builder, old, u, x, False, emit.features)
                sums = builder.insert_value(sums, new, t)
        return sums

    return ints(form, ints, at, i, x_at, x_step), codegen


def decode_blocks(form: Any, at: Any, n_blocks: Any, to: Any) -> None:
    """Dequantize blocks of a row group inside a kernel; see the module docstring."""
    _decoder(form)(form, at, n_blocks, to)


_OPTIONS: Any = {
    "forceinline": True,
    "error_model": "numpy",
    "fastmath": jit.FAST_MATH,
    "no_cfunc_wrapper": True,
}  # as `helper`


@extending.overload(decode_blocks, jit_options=_OPTIONS)
def _decode_blocks(form, at, n_blocks, to):
    decode: Callable[..., Any] = _decoder(form.form)
    return decode


@functools.cache
def _decoder(known: CpuLayout) -> Callable[..., Any]:
    """Make `decode_blocks` for a layout."""
    units, vectors, per_scale = known.block // known.unit, known.unit // 4, known.sub_block // 4
    block_bytes = known.block_bytes

    def decode(form, at, n_blocks, to):
        for _ in range(n_blocks):
            for unit in range(units):
                for v in range(vectors):
                    s = (unit * vectors + v) // per_scale
                    scale, base = parameters(form, at, s)
                    u = codes(form, at, unit, v)
                    for j in range(4):
                        simd.store_f32(to + 64 * j, weight(form, u, j, scale, base))
                    to += 256
            at += block_bytes

    return decode
