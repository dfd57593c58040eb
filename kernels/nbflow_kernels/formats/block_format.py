"""Base classes of block formats: a field table for the bytes, a `CodecSpec` for the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import read_f16, read_i64, read_u16, write_i64
from nbflow_kernels.formats.bit_fields import (
    NO_FIELD,
    ONE_GROUP,
    FieldConstants,
    field_constants,
    pack_blocks,
    read_number,
    unpack_field,
)
from nbflow_kernels.formats.codec_spec import (
    CodecSpec,
    DecodedBlocks,
    Field,
    FieldTable,
    weights,
)
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

CHUNK = 1 << 22  # weights decoded or quantized at once: bounds temporaries to about 50 MB
DECODE_COST = 8.0  # operations per weight, for the choice of thread count
NO_TABLE = np.zeros(0, np.uint8)

Scales = NDArray[np.int16]


# ---- d ------------------------------------------------------------------------------------------


def _e8m0_halves() -> Floats:
    """Return the E8M0 values 2**(e - 128) for e = 0..255; the first two are subnormal."""
    return np.ldexp(np.ones(256, np.float32), np.arange(256) - 128).astype(np.float32)


def _e4m3_halves() -> Floats:
    """Return half of the unsigned E4M3 value of each byte."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, (byte & 7) / 8
    normal = np.ldexp(1 + mantissa, exponent - 7)
    number = np.where(exponent == 0, np.ldexp(mantissa, -6), normal)
    number[127] = 0
    return (number / 2).astype(np.float32)


E8M0, E4M3 = _e8m0_halves(), _e4m3_halves()
"""Lookup tables from a byte of `d` to its value; see `CodecSpec.d_type`."""


# ---- codes and scales ---------------------------------------------------------------------------


@jit.device_function(inline="always")
def read_code(row, at, i, table, code):
    """Read code `i` of the block at byte `at`; `code` are the constants of its field."""
    return read_number(row, at, i, code)


WordPlane = tuple[int, ...]
"""A plane of codes, for reads of 8 codes as the bytes of an int64: byte offset, log2 of numbers per
group, bytes between groups, log2 of the stride, bit, pitch, numbers per group - 1, mask of the
bits in each byte, shift."""
WordField = tuple[Any, ...]
"""Number of planes, XOR mask of 8 codes, and the planes."""
NO_WORD_PLANE: WordPlane = (0,) * 9


def word_field(field: Field) -> WordField | None:
    """Return the constants for `read_8_codes`, or None if 8 codes do not lie in 8 bytes."""
    if field.radix or field.n % 8 or field.bits > 8 or len(field.planes) > 3:
        return None
    planes: list[WordPlane] = []
    for plane in field.planes:
        group = plane.stride * plane.per_group
        together = plane.stride % 8 == 0 or (group == plane.step == 1)
        if not together or plane.word_bytes > 1 or plane.first or plane.count:
            return None
        in_one = group == plane.span(field.n)
        planes.append((
            plane.at, ONE_GROUP if in_one else group.bit_length() - 1, plane.step,
            plane.stride.bit_length() - 1, plane.bit, plane.pitch, plane.per_group - 1,
            _in_each_byte((1 << plane.bits) - 1), plane.shift,
        ))  # fmt: skip
    n_planes = len(planes)
    planes += [NO_WORD_PLANE] * (3 - n_planes)
    return (n_planes, _in_each_byte(field.flip), *planes)


def _in_each_byte(number: int) -> int:
    """Return the int64 of 8 equal bytes."""
    return int.from_bytes(bytes([number]) * 8, "little", signed=True)


@jit.device_function(inline="always")
def _read_8_bits(at, i, plane):
    """Return the bits of codes `i` .. `i` + 7 stored in a plane, one code per byte."""
    first = at + plane[0] + (i & ((1 << plane[3]) - 1))
    if plane[1] < ONE_GROUP:
        first += (i >> plane[1]) * plane[2]
    bit = plane[4] + ((i >> plane[3]) & plane[6]) * plane[5]
    return ((read_i64(first) >> bit) & plane[7]) << plane[8]


@jit.device_function(inline="always")
def _decode_8_codes(at, size, code, to):
    """Unpack the `size` codes of the block at an address to the bytes at `to`."""
    for i in range(0, size, 8):
        codes = _read_8_bits(at, i, code[2])
        if code[0] > 1:
            codes |= _read_8_bits(at, i, code[3])
        if code[0] > 2:
            codes |= _read_8_bits(at, i, code[4])
        write_i64(to + i, codes ^ code[1])


@jit.device_function(inline="always")
def decode_word_rows(code, sizes, scale, minimum, data, codes, scales, mins, start, stop):
    """Unpack as `decode_rows` codes of which 8 lie in 8 bytes; `code` is from `word_field`."""
    size, n_scales, n_mins, n_bytes = sizes
    for r in range(start, stop):
        row, out_scales, out_mins = data[r], scales[r], mins[r]
        for b in range(data.shape[1] // n_bytes):
            at = b * n_bytes
            _decode_8_codes(simd.address(row) + at, size, code, simd.address(codes[r]) + b * size)
            for s in range(n_scales):
                out_scales[b * n_scales + s] = read_number(row, at, s, scale)
            for s in range(n_mins):
                out_mins[b * n_mins + s] = read_number(row, at, s, minimum)


@jit.device_function(inline="always")
def decode_rows(read, code, sizes, scale, minimum, data, table, codes, scales, mins, start, stop):
    """Unpack codes, scales and minima of rows [start, stop).

    ``read(row, at, i, table, code)`` reads code `i` of the block at byte `at`; `sizes` are the
    numbers of weights, scales, minima and bytes per block.
    """
    size, n_scales, n_mins, n_bytes = sizes
    for r in range(start, stop):
        row, out, out_scales, out_mins = data[r], codes[r], scales[r], mins[r]
        for b in range(data.shape[1] // n_bytes):
            at = b * n_bytes
            for group in range(0, size, 8):
                for j in range(8):  # unrolled: subexpressions common to 8 codes are computed once
                    out[b * size + group + j] = read(row, at, group + j, table, code)
            for s in range(n_scales):
                out_scales[b * n_scales + s] = read_number(row, at, s, scale)
            for s in range(n_mins):
                out_mins[b * n_mins + s] = read_number(row, at, s, minimum)


@dataclass(frozen=True, eq=False, repr=False)
class FieldFormat(QuantFormat):
    """Weight format whose bytes are declared by a `FieldTable`.

    Subclasses add the decode formula: `AffineFormat` (base + scale * code), `BlockFormat` (codebook
    and integer scales, no base) and `KQuantFormat` (super-blocks).  A new packing needs one
    instance in a new module and an entry in the list of `nbflow_kernels.formats`; all
    kernels derive from the table and the formula.

    Examples
    --------
    The 5.5-bit format q5h: 45 levels, two weights in an 11-bit pair code.

    >>> from nbflow_kernels.formats.affine_format import RANGE, AffineFormat
    >>> from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
    >>> planes = (Plane(4, 1, shift=10), Plane(8, 2, shift=8), Plane(16, 4, shift=4), Plane(32, 4))
    >>> code = Field("code", 64, planes, radix=45)
    >>> table = FieldTable(64, (float16("base", 0), float16("scale", 2), code))
    >>> AffineFormat("q5h_b64t1", table, RANGE, divisor=44)
    <AffineFormat q5h_b64t1: 6 bits per weight>
    """

    name: str
    fields: FieldTable
    """Byte layout of a block, with the fields "code" (on grids "point" and "sign"), "scale", "min",
    "d", "dmin" and "base" as the formula needs them."""
    block_size: int = field(init=False)
    block_bytes: int = field(init=False)
    float_fields: ClassVar[tuple[str, str]] = ("d", "dmin")
    """Fields of `d` and `m`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", self.fields.block_size)
        object.__setattr__(self, "block_bytes", self.fields.block_bytes)

    @property
    def stored_d_type(self) -> str:
        """Stored type of `d` and `m`, where that of the decode formula is wider."""
        return self.integer_form.d_type

    @cached_property
    def n_scales(self) -> int:
        """Integer scales per block."""
        return self.block_size // self.integer_form.sub_block if self.integer_form.scales else 0

    @cached_property
    def n_mins(self) -> int:
        """Integer minima per block."""
        return self.n_scales if self.integer_form.base == "min" else 0

    @property
    def table(self) -> NDArray[Any]:
        """Lookup table of the code decoder; empty if it needs none."""
        return NO_TABLE

    def _decoder(self) -> tuple[tuple[int, ...], FieldConstants, FieldConstants]:
        """Return the constants `sizes`, `scale` and `minimum` of `decode_rows`."""
        sizes = (self.block_size, self.n_scales, self.n_mins, self.block_bytes)
        scale = field_constants(self.fields["scale"]) if self.n_scales else NO_FIELD
        return sizes, scale, field_constants(self.fields["min"]) if self.n_mins else NO_FIELD

    @cached_property
    def kernel(self) -> Callable[..., None]:
        """Kernel ``(data, table, codes, scales, mins, start, stop)``; see `decode_rows`."""
        code = field_constants(self.fields["code"])
        words = word_field(self.fields["code"])
        sizes, scale, minimum = self._decoder()

        # close over numbers only: they are the key of the compiled-kernel cache
        if words is not None:

            @jit.kernel
            def word_kernel(data, table, codes, scales, mins, start, stop):
                decode_word_rows(
                    words, sizes, scale, minimum, data, codes, scales, mins, start, stop
                )

            return word_kernel  # type: ignore[no-any-return]

        @jit.kernel
        def kernel(data, table, codes, scales, mins, start, stop):
            decode_rows(
                read_code, code, sizes, scale, minimum, data, table, codes, scales, mins, start,
                stop,
            )  # fmt: skip

        made: Callable[..., None] = kernel
        return made

    def integers(self, data: Bytes) -> DecodedBlocks:
        """Unpack rows (rows, row bytes); see `QuantFormat.integers`."""
        n_rows, n_blocks = len(data), data.shape[1] // self.block_bytes
        codes = np.empty((n_rows, n_blocks * self.block_size), np.uint8)
        scales = np.empty((n_rows, n_blocks * self.n_scales), np.int16)
        mins = np.empty((n_rows, n_blocks * self.n_mins), np.uint8)
        rows = np.ascontiguousarray(data)
        work = DECODE_COST * codes.size
        parallel_for(self.kernel, n_rows, work, rows, self.table, codes, scales, mins)
        d, m = self._row_floats(rows)
        return DecodedBlocks(
            codes,
            d,
            m,
            scales if self.n_scales else None,
            mins if self.n_mins else None,
        )

    def _row_floats(self, rows: Bytes) -> tuple[Floats, Floats | None]:
        """Return `d` and `m` of rows (rows, row bytes), float32 (rows, blocks * d per block)."""
        fields = [self.fields[name] for name in self.float_fields if name in self.fields]
        all_stored = len(fields) == 1 + (self.integer_form.base != "none")
        if all_stored and self.stored_d_type == "f16" and all(map(_is_halves, fields)):
            found = [_halves(field, rows, self.block_bytes) for field in fields]
            return found[0], found[1] if len(found) > 1 else None
        d, m = self.floats(rows.reshape(-1, self.block_bytes))
        return d.reshape(len(rows), -1), None if m is None else m.reshape(len(rows), -1)

    def floats(self, blocks: Bytes) -> tuple[Floats, Floats | None]:
        """Return `d` and `m` of blocks (n, block_bytes), float32 (n, block_size / form.block)."""
        d_type = self.integer_form.d_type
        m = stored_floats(self.fields["dmin"], d_type, blocks) if "dmin" in self.fields else None
        return stored_floats(self.fields["d"], d_type, blocks), m

    def unpack_codes(self, blocks: Bytes) -> Bytes:
        """Return the codes (n, block_size) of blocks, in NumPy."""
        return unpack_field(self.fields["code"], blocks).astype(np.uint8)

    def _unpack_integers(self, name: str, blocks: Bytes) -> Scales:
        """Return integer scales or minima (n, sub-blocks) of blocks, in NumPy."""
        field = self.fields[name]
        return field.factor * unpack_field(field, blocks).astype(np.int16) + np.int16(field.offset)

    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Dequantize blocks to (n, block_size) with the formula of `CodecSpec`, in NumPy."""
        d, m = (v if v is None else v.reshape(len(blocks), -1) for v in self.floats(blocks))
        assert d is not None
        scales = self._unpack_integers("scale", blocks) if self.n_scales else None
        mins = self._unpack_integers("min", blocks).astype(np.uint8) if self.n_mins else None
        rows = DecodedBlocks(self.unpack_codes(blocks), d, m, scales, mins)
        with np.errstate(invalid="ignore", over="ignore"):  # bytes from a file may hold inf
            return weights(self.integer_form, rows)

    def pack_blocks(self, **numbers: NDArray[Any]) -> Bytes:
        """Pack the stored numbers of each field into rows of bytes."""
        blocks = pack_blocks(self.fields, numbers)
        return blocks.reshape(len(numbers[self.fields.fields[0].name]), -1)


def stored_floats(field: Field, d_type: str, blocks: Bytes) -> Floats:
    """Read a field of floats from blocks (n, block_bytes) as float32 (n, floats)."""
    stored = unpack_field(field, blocks)
    if d_type == "f16":
        return stored.view(np.float16).astype(np.float32)
    if d_type == "f32":  # two numbers each, the lower half first
        return np.ascontiguousarray(stored).astype("<u2").view("<f4").astype(np.float32)
    return {"e8m0": E8M0, "e4m3": E4M3}[d_type][stored]


def _is_halves(field: Field) -> bool:
    """Return whether a field is contiguous float16 numbers."""
    plane = field.planes[0]
    whole = plane.bits == field.bits == 16 and plane.step == plane.word_bytes == 2
    return whole and len(field.planes) == 1


def _halves(field: Field, rows: Bytes, block_bytes: int) -> Floats:
    """Read a field of float16 from rows of blocks as float32 (rows, blocks * field.n)."""
    out = np.empty((len(rows), rows.shape[1] // block_bytes * field.n), np.float32)
    at, work = field.planes[0].at, 4.0 * out.size
    parallel_for(_read_halves, len(rows), work, rows, at, field.n, block_bytes, out)
    return out


@jit.kernel
def _read_halves(data, at, n, block_bytes, out, start, stop):
    """Read `n` float16 from byte `at` of each block of rows [start, stop)."""
    for row in range(start, stop):
        begin = simd.address(data[row]) + at
        for i in range(out.shape[1]):
            place = begin + i // n * block_bytes + 2 * (i % n)
            number = read_f16(place)
            if number != number:  # the processor would change the payload
                sign, payload = read_u16(place) >> 15, read_u16(place) & 0x3FF
                number = simd.bits_to_float(sign << 31 | 0x7F800000 | payload << 13)
            out[row, i] = number


# ---- a float scale per block, and integer scales ------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class BlockFormat(FieldFormat):
    """Block format without a base, decoded by the formula `form`."""

    form: CodecSpec
    """Decode formula."""

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return self.form

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        form = self.form
        values = value_table(form)
        step = max(1, CHUNK // max(out.shape[1], 1))
        for row in range(0, len(data), step):
            rows = self.integers(data[row : row + step])
            scales = rows.scales if rows.scales is not None else np.empty((0, 0), np.int16)
            parallel_for(
                _apply, len(rows.codes), 2.0 * rows.codes.size, rows.codes, rows.d, scales, values,
                form.block, form.sub_block, form.factor, out[row : row + step],
            )  # fmt: skip


def value_table(form: CodecSpec) -> Floats:
    """Return value(code) for all codes of a form."""
    if form.values is not None:
        return np.array(form.values, np.float32)
    return np.arange(-form.zero, 2**form.code_bits - form.zero, dtype=np.float32)


@jit.kernel
def _apply(codes, d, scales, values, block, sub_block, factor, out, start, stop):
    """Write d * factor * scale * value(code); all products but the last are exact."""
    for row in range(start, stop):
        for s in range((out.shape[1] + sub_block - 1) // sub_block):
            first = s * sub_block
            step = d[row, first // block] * np.float32(factor)
            if len(scales):
                step *= np.float32(scales[row, s])
            for column in range(first, min(first + sub_block, out.shape[1])):
                out[row, column] = step * values[codes[row, column]]
