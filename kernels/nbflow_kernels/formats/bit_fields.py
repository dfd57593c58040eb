"""Packing, unpacking and decoding of a block's numbers, derived from its table of fields.

`nbflow_kernels.formats.codec_spec.FieldTable` describes the bytes.  Here:

=======================  ==========================================================================
`pack_field`             numbers to the bytes of blocks, in NumPy
`unpack_field`           and back
`scalar_decoder`         function ``(row, at, i)`` of one number, for kernels (CPU and CUDA)
`codes_kernel`           kernel that decodes the codes of rows
`byte_table`             the table of bytes for a docstring
`bit_sources`            map of bits of a format that brings its own packing (`BlockFields`)
=======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane
from nbflow_kernels.formats.registry import Bytes

# ---- arrays -------------------------------------------------------------------------------------


def pack_field(field: Field, numbers: NDArray[Any], blocks: Bytes) -> None:
    """Write numbers (n, field.n) to their bits of blocks (n, block bytes), which are zero there."""
    stored = numbers.astype(np.uint16)
    if field.radix:
        stored = stored[:, 0::2] + np.uint16(field.radix) * stored[:, 1::2]
    stored = stored ^ np.uint16(field.flip)
    for plane in field.planes:
        count = plane.span(stored.shape[1])
        part = (stored[:, plane.first : plane.first + count] >> np.uint16(plane.shift)) & np.uint16(
            (1 << plane.bits) - 1
        )
        into = blocks[:, plane.at : plane.at + plane.n_bytes(stored.shape[1])]
        if plane.bits == 16:
            into[...] = np.ascontiguousarray(part).astype("<u2").view(np.uint8)
            continue
        slots = part.reshape(len(part), -1, plane.per_byte, plane.stride) if plane.stride else part
        for k in range(plane.per_byte):
            shifted = slots[:, :, k] << np.uint16(plane.place + plane.bits * k)
            into |= shifted.reshape(len(part), -1).astype(np.uint8)


def unpack_field(field: Field, blocks: Bytes) -> NDArray[np.uint16]:
    """Return the numbers (n, field.n) of blocks (n, block bytes)."""
    stored = np.zeros((len(blocks), field.n_stored), np.uint16)
    for plane in field.planes:
        data = blocks[:, plane.at : plane.at + plane.n_bytes(field.n_stored)]
        into = stored[:, plane.first : plane.first + plane.span(field.n_stored)]
        if plane.bits == 16:
            into[...] = np.ascontiguousarray(data).view("<u2")
            continue
        groups = data.reshape(len(data), -1, 1, plane.stride)
        shifts = plane.place + plane.bits * np.arange(plane.per_byte, dtype=np.uint8)
        part = (groups >> shifts[:, None]) & np.uint8((1 << plane.bits) - 1)
        into |= part.reshape(len(data), -1).astype(np.uint16) << np.uint16(plane.shift)
    stored ^= np.uint16(field.flip)
    if not field.radix:
        return stored
    pairs = np.stack([stored % field.radix, stored // field.radix], axis=2)
    return pairs.reshape(len(blocks), field.n).astype(np.uint16)


# ---- scalars ------------------------------------------------------------------------------------

# A plane as numbers for kernels, where constants fold: address, log2 of numbers of a group of
# bytes, log2 of the stride, stride - 1, place, bits, slots - 1, mask, shift, first number, and the
# one after the last (0: all numbers).
PlaneConstants = tuple[int, ...]
NO_PLANE: PlaneConstants = (0,) * 11
MOST_PLANES = 4
ONE_GROUP = 63  # in the place of log2 of a group's numbers, where there is one group


def _constants(field: Field) -> tuple[Any, ...]:
    """Return what `read_number` reads of a field."""
    planes: list[PlaneConstants] = []
    for plane in field.planes:
        assert plane.bits <= 8, f"floats are read as such: {field}"
        stride = plane.stride.bit_length() - 1
        group, slots = stride + plane.per_byte.bit_length() - 1, plane.per_byte - 1
        end = plane.first + plane.span(field.n_stored) if plane.first or plane.count else 0
        if plane.span(field.n_stored) == 1 << group:  # the terms that LLVM would not fold
            group, slots = ONE_GROUP, -1
        planes.append(
            (
                plane.at, group, stride, plane.stride - 1, plane.place, plane.bits, slots,
                (1 << plane.bits) - 1, plane.shift, plane.first, end,
            )
        )  # fmt: skip
    n_planes = len(planes)
    planes += [NO_PLANE] * (MOST_PLANES - n_planes)
    return (n_planes, field.flip, field.radix, reciprocal(field.radix), *planes)


def reciprocal(radix: int) -> int:
    """Return m for which ``c * m >> 16`` is c // radix, for all pair codes c; 0 for no radix."""
    if not radix:
        return 0
    m = -(-(1 << 16) // radix)
    codes = np.arange(radix * radix)
    assert np.array_equal(codes * m >> 16, codes // radix), radix
    return m


@jit.device_function(inline="always")
def read_bits(row, at, i, plane):
    """Return the bits of number `i` in a plane of the block at byte `at`, where they belong."""
    if plane[10]:
        if i < plane[9] or i >= plane[10]:
            return 0
        i = i - plane[9]
    first, place = at + plane[0], plane[4] + ((i >> plane[2]) & plane[6]) * plane[5]
    if plane[1] < ONE_GROUP:
        first += (i >> plane[1]) << plane[2]
    return ((row[first + (i & plane[3])] >> place) & plane[7]) << plane[8]


@jit.device_function(inline="always")
def read_number(row, at, i, field):
    """Return number `i` of a field of the block at byte `at`."""
    j = i >> 1 if field[2] else i
    value = read_bits(row, at, j, field[4])
    if field[0] > 1:
        value |= read_bits(row, at, j, field[5])
    if field[0] > 2:
        value |= read_bits(row, at, j, field[6])
    if field[0] > 3:
        value |= read_bits(row, at, j, field[7])
    value ^= field[1]
    if field[2]:
        y = (value * field[3]) >> 16  # value // radix
        value = y if i & 1 else value - field[2] * y
    return value


def scalar_decoder(field: Field) -> Callable[..., Any]:
    """Return the function ``(row, at, i)`` of number `i` of a field in the block at byte `at`."""
    constants = _constants(field)

    @jit.device_function(inline="always")
    def decode(row, at, i):
        return read_number(row, at, i, constants)

    decoder: Callable[..., Any] = decode
    return decoder


def codes_kernel(table: FieldTable) -> Callable[..., None]:
    """Return the kernel ``(data, codes, start, stop)`` that decodes the codes of rows."""
    constants, size, n_bytes = _constants(table["code"]), table.block_size, table.block_bytes

    # only numbers are closed over: the cache of compiled kernels tells formats apart by them
    @jit.kernel
    def kernel(data, codes, start, stop):
        for r in range(start, stop):
            row, out = data[r], codes[r]
            for b in range(data.shape[1] // n_bytes):
                for i in range(size):
                    out[b * size + i] = read_number(row, b * n_bytes, i, constants)

    made: Callable[..., None] = kernel
    return made


# ---- documentation ------------------------------------------------------------------------------


def byte_table(table: FieldTable) -> str:
    """Return the table of a block's bytes in reStructuredText, as format docstrings show it."""
    rows = sorted(
        (plane.at, plane.n_bytes(field.n_stored), _described(field, plane))
        for field in table.fields
        for plane in field.planes
    )
    rule = "======  =====  " + 82 * "="
    lines = [rule, "offset  bytes  field", rule]
    lines += [f"{at:<6}  {n:<5}  {text}" for at, n, text in rows]
    return "\n".join([*lines, rule])


def _described(field: Field, plane: Plane) -> str:
    """Return which numbers a plane holds and in which order."""
    if plane.bits == 16:
        return f"{field.name}, float16"
    what = "pair code" if field.radix else "code" if field.name == "code" else field.name
    if field.n == 1:
        return f"{what}, uint8"
    whole = plane.bits == field.bits
    if whole and plane.bits == 8:
        return f"{what}s, {'int8' if field.signed else 'uint8'}"
    top = plane.shift + plane.bits - 1
    which = f"bit {top}" if plane.bits == 1 else f"bits {plane.shift}-{top}"
    head = f"{what}s" if whole else f"{which} of the {what}s"
    if plane.per_byte == 1:
        return f"{head}: one in each byte"
    apart = "neighbours" if plane.stride == 1 else f"{plane.stride} apart"
    return f"{head}: {plane.per_byte} in a byte, {apart}, the first lowest"


# ---- planes of formats that bring functions of their own ----------------------------------------


def pack_fields(values: Bytes, width: int) -> Bytes:
    """Return values (n, count), each below ``2 ** width``, as bytes (n, count * width / 8)."""
    per_byte = 8 // width
    parts = values.reshape(len(values), -1, per_byte)
    result = np.zeros(parts.shape[:2], np.uint8)
    for i in range(per_byte):
        result |= parts[:, :, i] << np.uint8(width * i)
    return result


def unpack_fields(data: Bytes, width: int) -> Bytes:
    """Return the values (n, count) of a plane of bytes (n, count * width / 8)."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return ((data[:, :, None] >> shifts) & np.uint8(2**width - 1)).reshape(len(data), -1)


def pack_halves(values: Bytes) -> Bytes:
    """Return values (n, 2m), each below 16, as (n, m): the first m in the low nibbles."""
    half = values.shape[1] // 2
    data: Bytes = values[:, :half] | (values[:, half:] << np.uint8(4))
    return data


def unpack_halves(data: Bytes) -> Bytes:
    """Return the values (n, 2m) of bytes (n, m): the low nibbles first, then the high ones."""
    return np.hstack([data & np.uint8(15), data >> np.uint8(4)])


@jit.device_function(inline="always")
def half_nibble(row, at, i):
    """Return value `i` of 32 in 16 bytes at `at`: the low nibbles first, then the high ones."""
    return (row[at + (i & 15)] >> (i >> 4 << 2)) & 15


@jit.device_function(inline="always")
def nibble(row, at, i):
    """Return value `i` of the 4-bit plane that starts at byte `at`."""
    return (row[at + (i >> 1)] >> (4 * (i & 1))) & 15


@jit.device_function(inline="always")
def crumb(row, at, i):
    """Return value `i` of the 2-bit plane that starts at byte `at`."""
    return (row[at + (i >> 2)] >> (2 * (i & 3))) & 3


@jit.device_function(inline="always")
def bit(row, at, i):
    """Return value `i` of the 1-bit plane that starts at byte `at`."""
    return (row[at + (i >> 3)] >> (i & 7)) & 1


# ---- maps of bits read off a function that packs ------------------------------------------------

FIELD_BITS = 16
"""Most bits of a number."""


class Part(NamedTuple):
    """Numbers of one kind in a block, such as its codes."""

    n: int
    bits: int
    """Bits of a number that are stored, at most `FIELD_BITS`."""
    dtype: Any = np.uint8
    """What the function that packs takes."""


class BlockFields(NamedTuple):
    """The numbers of a block, in order, and what makes bytes of them."""

    parts: tuple[Part, ...]
    pack: Callable[..., Bytes]
    """Arrays (blocks, count), one for each part, to bytes (blocks, block bytes).  Each bit of the
    bytes must come from one bit of the numbers, or be constant."""

    @property
    def n_numbers(self) -> int:
        """How many numbers there are."""
        return sum(part.n for part in self.parts)


def bit_sources(fields: BlockFields) -> tuple[NDArray[np.int32], Bytes]:
    """Return where each bit of a block comes from, and the bytes of numbers that are all 0.

    Returns
    -------
    sources : array of int32, shape (block bytes * 8)
        ``16 * number + bit``, counted over all parts, or -1 for a bit that is constant.
    blank : array of uint8, shape (block bytes)
        The bits are those of this, turned around where the source is 1.

    Examples
    --------
    >>> import numpy as np
    >>> two = BlockFields((Part(2, 4),), lambda codes: codes[:, :1] | codes[:, 1:] << 4)
    >>> bit_sources(two)[0].tolist()
    [0, 1, 2, 3, 16, 17, 18, 19]
    """

    def packed(numbers: NDArray[np.int64]) -> Bytes:
        ends = np.cumsum([part.n for part in fields.parts])
        columns = np.split(numbers, ends[:-1], axis=1)
        given = [c.astype(p.dtype) for c, p in zip(columns, fields.parts, strict=True)]
        return fields.pack(*given).reshape(len(numbers), -1)

    blank = packed(np.zeros((1, fields.n_numbers), np.int64))[0]
    sources = np.full(8 * len(blank), -1, np.int32)
    for part, first in zip(fields.parts, _firsts(fields), strict=True):
        for bit in range(part.bits):
            ones = np.zeros((part.n, fields.n_numbers), np.int64)
            ones[np.arange(part.n), first + np.arange(part.n)] = 1 << bit
            turned = np.unpackbits(packed(ones) ^ blank, axis=1, bitorder="little")
            number, place = np.nonzero(turned)
            assert (sources[place] < 0).all(), "a bit of a block has two sources"
            sources[place] = FIELD_BITS * (first + number) + bit
    return sources, blank


def _firsts(fields: BlockFields) -> list[int]:
    counts = [part.n for part in fields.parts]
    return [sum(counts[:k]) for k in range(len(counts))]
