"""Base classes of block formats: a field table for the bytes, a `CodecSpec` for the formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f16, read_u16, write_f32
from nbflow_kernels.formats.bit_fields import pack_blocks, unpack_field
from nbflow_kernels.formats.codec_spec import (
    CodecSpec,
    DecodedBlocks,
    Field,
    FieldTable,
    weights,
)
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.formats.unpack_rows import Unpacking, unpack_rows, unpacking

CHUNK = 1 << 22  # weights decoded or quantized at once: bounds temporaries to about 50 MB
DECODE_COST = 8.0  # operations per weight, for the choice of thread count

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

    @cached_property
    def unpacking(self) -> Unpacking:
        """Constants of `unpack_rows`."""
        return unpacking(self.block_bytes, (self.fields["code"], 1), *self._scale_fields())

    def _scale_fields(self) -> tuple[tuple[Field | None, int], tuple[Field | None, int]]:
        """Return the fields of integer scales and minima with the bytes of their numbers."""
        scale = self.fields["scale"] if self.n_scales else None
        return (scale, 2), (self.fields["min"] if self.n_mins else None, 1)

    def integers(self, data: Bytes) -> DecodedBlocks:
        """Unpack rows (rows, row bytes); see `QuantFormat.integers`."""
        n_rows, n_blocks = len(data), data.shape[1] // self.block_bytes
        scales = np.empty((n_rows, n_blocks * self.n_scales), np.int16)
        mins = np.empty((n_rows, n_blocks * self.n_mins), np.uint8)
        rows = np.ascontiguousarray(data)
        codes = self._unpack(rows, scales, mins)
        d, m = self._row_floats(rows)
        return DecodedBlocks(
            codes,
            d,
            m,
            scales if self.n_scales else None,
            mins if self.n_mins else None,
        )

    def _unpack(self, rows: Bytes, scales: Scales, mins: Bytes) -> Bytes:
        """Write integer scales and minima of contiguous rows; return the codes."""
        codes = np.empty((len(rows), rows.shape[1] // self.block_bytes * self.block_size), np.uint8)
        outs, work = (codes, scales, mins), DECODE_COST * codes.size
        unpack_rows(rows, self.block_bytes, self.unpacking, outs, work)
        return codes

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
    parallel_for(
        _read_halves, len(rows), work, address_of(rows) + at, rows.strides[0], field.n, block_bytes,
        address_of(out), out.shape[1],
    )  # fmt: skip
    return out


@jit.kernel(unroll=False)
def _read_halves(first, row_bytes, n, block_bytes, out, n_columns, start, stop):
    """Read `n` float16 of each block of rows [start, stop), at address `first` in the first."""
    for row in range(start, stop):
        to = out + 4 * n_columns * row
        for i in range(n_columns):
            place = first + row * row_bytes + i // n * block_bytes + 2 * (i % n)
            number = read_f16(place)
            if number != number:  # the processor would change the payload
                sign, payload = read_u16(place) >> 15, read_u16(place) & 0x3FF
                number = simd.bits_to_float(sign << 31 | 0x7F800000 | payload << 13)
            write_f32(to + 4 * i, number)


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
