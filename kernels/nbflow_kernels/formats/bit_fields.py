"""Bit packing and unpacking, derived from a format's `FieldTable`.

=======================  ==========================================================================
`pack_blocks`            pack the numbers of all fields into blocks
`unpack_field`           unpack one field, in NumPy
`write_field`            write one field of a block, in kernels of the CUDA quantizers
`byte_rows`              byte table of a block, for docs/formats.md
`bit_sources`            map from bits of a block to bits of numbers, for the CUDA quantizers
=======================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd, simd_memory, simd_narrow
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane
from nbflow_kernels.formats.registry import Bytes

LOWEST_BITS, GATHER_BITS, GATHER_PAIRS = 0x0101010101010101, 0x0102040810204080, 0x01041040
PACK_COST = 3.0  # operations per number, for the choice of thread count

# ---- arrays -------------------------------------------------------------------------------------


def _plane_bytes(plane: Plane, n: int, blocks: Bytes, k: int) -> Bytes:
    """Return byte `k` of the words of a plane as a view (blocks, groups, stride)."""
    row, byte = blocks.strides
    shape = (len(blocks), plane.n_groups(n), plane.stride)
    return as_strided(blocks[:, plane.at + k :], shape, (row, plane.step * byte, byte))


def pack_blocks(table: FieldTable, numbers: Mapping[str, NDArray[Any]]) -> Bytes:
    """Pack numbers, an array (n, field.n) per field, into blocks (n, block_bytes)."""
    parts = {f.name: numbers[f.name].reshape(-1, f.n) for f in table.fields}
    blocks = np.zeros((len(parts[table.fields[0].name]), table.block_bytes), np.uint8)
    for field in table.fields:
        pack_field(field, parts[field.name], blocks)
    return blocks


def pack_field(field: Field, numbers: NDArray[Any], blocks: Bytes) -> None:
    """OR numbers (n, field.n) into blocks (n, block_bytes), whose bits there must be zero."""
    if numbers.dtype.type not in (np.uint8, np.uint16):
        numbers = numbers.astype(np.uint16)
    plane = field.planes[0]
    if field.bits == plane.bits == 8 * plane.step == 8 * plane.word_bytes and not field.radix:
        stored = numbers.astype(f"u{plane.step}", copy=False)  # whole words
        if field.flip:
            stored = stored ^ stored.dtype.type(field.flip)
        # as words: an inner loop over the bytes of each block takes ten times as long
        part = blocks[:, plane.at : plane.at + plane.n_bytes(field.n)].view(stored.dtype)
        part |= stored
        return
    planes = np.array([_plane_numbers(plane, field.n_stored) for plane in field.planes])
    parallel_for(
        _pack_field, len(blocks), PACK_COST * numbers.size, np.ascontiguousarray(numbers),
        field.radix, field.flip, planes, blocks,
    )  # fmt: skip


def _plane_numbers(plane: Plane, n: int) -> tuple[int, ...]:
    """Return a plane of a field of `n` numbers as `_pack_field` takes it."""
    return (
        plane.at, (1 << plane.bits) - 1, plane.shift, plane.stride, plane.bit, plane.per_group,
        plane.first, plane.step, plane.pitch, plane.n_groups(n), plane.word_bytes,
    )  # fmt: skip


@jit.kernel
def _pack_field(numbers, radix, flip, planes, blocks, start, stop):
    """Pack the numbers of blocks [start, stop); one kernel for all fields and formats."""
    size, n = numbers.itemsize, numbers.shape[1]
    pairs = np.empty(n // 2 if radix else 0, np.uint16)
    for b in range(start, stop):
        source, block = simd.address(numbers) + b * n * size, simd.address(blocks)
        for i in range(len(pairs)):
            pairs[i] = numbers[b, 2 * i] + radix * numbers[b, 2 * i + 1]
        for p in range(len(planes)):
            if radix:
                _pack_plane(simd.address(pairs), 2, flip, planes[p], block + b * blocks.shape[1])
            else:
                _pack_plane(source, size, flip, planes[p], block + b * blocks.shape[1])


@jit.device_function
def _pack_plane(source, size, flip, plane, block):
    """OR one plane of numbers of `size` bytes at address `source` into the block at `block`."""
    mask, shift, stride, bit = plane[1], plane[2], plane[3], plane[4]
    per_group, step, pitch, n_groups, word_bytes = plane[5], plane[7], plane[8], plane[9], plane[10]
    source, block = source + plane[6] * size, block + plane[0]
    flips, masks = flip * LOWEST_BITS, mask * LOWEST_BITS
    is_tight = size == 1 and stride == 1 and step == 1 and bit == 0 and per_group * pitch == 8
    if is_tight and pitch == 4 and n_groups % 8 == 0:
        for g in range(0, n_groups, 8):
            low = _nibbles(((simd_memory.read_i64(source + 2 * g) ^ flips) >> shift) & masks)
            high = _nibbles(((simd_memory.read_i64(source + 2 * g + 8) ^ flips) >> shift) & masks)
            eight = simd_memory.read_i64(block + g) | low | (high << 32)
            simd_memory.write_i64(block + g, eight)
        return
    for _ in range(n_groups):
        if stride >= 8 and size == 1:  # eight numbers at once
            for k in range(per_group):
                for r in range(0, stride, 8):
                    eight = ((simd_memory.read_i64(source + r) ^ flips) >> shift) & masks
                    eight = simd_memory.read_i64(block + r) | (eight << (bit + pitch * k))
                    simd_memory.write_i64(block + r, eight)
                source += stride
        elif stride > 1:  # words of one byte
            for k in range(per_group):
                for r in range(stride):
                    number = read_number(source + r * size, size) ^ flip
                    _or_byte(block + r, ((number >> shift) & mask) << (bit + pitch * k))
                source += stride * size
        elif is_tight and pitch == 1:
            # the product moves the lowest bit of byte k to bit 56 + k
            eight = ((simd_memory.read_i64(source) ^ flips) >> shift) & masks
            _or_byte(block, (eight * GATHER_BITS) >> 56)
            source += 8
        elif is_tight and pitch == 2:
            # the product moves the lowest two bits of byte k to bit 24 + 2 k
            four = ((simd_memory.read_i32(source) ^ flips) >> shift) & masks & 0xFFFFFFFF
            _or_byte(block, (four * GATHER_PAIRS) >> 24)
            source += 4
        else:
            word = 0
            for k in range(per_group):
                number = read_number(source, size) ^ flip
                word |= ((number >> shift) & mask) << (bit + pitch * k)
                source += size
            for k in range(word_bytes):
                _or_byte(block + k, word >> (8 * k))
        block += step


@jit.device_function
def _nibbles(eight):
    """Return 4 bytes of the low nibbles of 8 bytes."""
    eight = (eight | (eight >> 4)) & 0x00FF00FF00FF00FF
    eight = (eight | (eight >> 8)) & 0x0000FFFF0000FFFF
    return (eight | (eight >> 16)) & 0xFFFFFFFF


@jit.device_function
def read_number(address, size):
    """Return the number of 1 or 2 bytes at an address."""
    return simd_memory.read_u8(address) if size == 1 else simd_memory.read_u16(address)


@jit.device_function
def _or_byte(address, bits):
    """OR the low 8 bits of a number into the byte at an address."""
    simd_narrow.write_u8(address, simd_memory.read_u8(address) | (bits & 255))


def unpack_field(field: Field, blocks: Bytes) -> NDArray[np.uint16]:
    """Return the numbers (n, field.n) of a field from blocks (n, block_bytes)."""
    stored = np.zeros((len(blocks), field.n_stored), np.uint16)
    for plane in field.planes:
        dtype = np.dtype(f"u{plane.word_bytes}").type
        if plane.bits == field.bits == 8 * plane.word_bytes == 8 * plane.step:  # whole words
            data = blocks[:, plane.at : plane.at + plane.n_bytes(field.n_stored)]
            stored = np.ascontiguousarray(data).view(dtype).astype(np.uint16, copy=False)
            break
        words = _plane_bytes(plane, field.n_stored, blocks, 0).astype(dtype)
        for k in range(1, plane.word_bytes):
            words |= _plane_bytes(plane, field.n_stored, blocks, k).astype(dtype) << dtype(8 * k)
        shifts = (plane.bit + plane.pitch * np.arange(plane.per_group)).astype(dtype)
        part = (words[:, :, None] >> shifts[:, None]) & dtype((1 << plane.bits) - 1)
        into = stored[:, plane.first : plane.first + plane.span(field.n_stored)]
        into |= part.reshape(into.shape).astype(np.uint16) << np.uint16(plane.shift)
    if field.flip:
        stored = stored ^ np.uint16(field.flip)
    if not field.radix:
        return stored
    pairs = np.stack([stored % field.radix, stored // field.radix], axis=2)
    return pairs.reshape(len(blocks), field.n).astype(np.uint16)


# ---- constants in kernels of the CUDA quantizers -----------------------------------------------

# A plane as constants that fold in kernels: byte offset, log2 of numbers per group, bytes between
# groups, log2 of the stride, bit, pitch, numbers per group - 1, mask, shift, first number, end
# (0: no bound), bytes per word, number of groups, numbers per group.
PlaneConstants = tuple[int, ...]
NO_PLANE: PlaneConstants = (0,) * 14
MOST_PLANES = 4
ONE_GROUP = 63  # log2 of numbers per group if all numbers are one group
FieldConstants = tuple[Any, ...]
"""Number of planes, XOR mask, radix, its reciprocal, factor, offset, and the planes' constants."""
NO_FIELD: FieldConstants = (0, 0, 0, 0, 1, 0, *[NO_PLANE] * MOST_PLANES)


def field_constants(field: Field) -> FieldConstants:
    """Return the constants of a field that `write_field` takes."""
    planes: list[PlaneConstants] = []
    for plane in field.planes:
        stride = plane.stride.bit_length() - 1
        group, slots = stride + plane.per_group.bit_length() - 1, plane.per_group - 1
        n_groups = plane.n_groups(field.n_stored)
        end = plane.first + plane.span(field.n_stored) if plane.first or plane.count else 0
        if plane.span(field.n_stored) == 1 << group:  # LLVM would not fold these terms
            group, slots = ONE_GROUP, -1
        planes.append(
            (
                plane.at, group, plane.step, stride, plane.bit, plane.pitch, slots,
                (1 << plane.bits) - 1, plane.shift, plane.first, end, plane.word_bytes, n_groups,
                plane.per_group,
            )
        )  # fmt: skip
    n_planes = len(planes)
    planes += [NO_PLANE] * (MOST_PLANES - n_planes)
    radix = (field.radix, reciprocal(field.radix))
    return (n_planes, field.flip, *radix, field.factor, field.offset, *planes)


def reciprocal(radix: int) -> int:
    """Return m with ``c * m >> 16 == c // radix`` for all pair codes c; 0 without a radix."""
    if not radix:
        return 0
    m = -(-(1 << 16) // radix)
    codes = np.arange(radix * radix)
    assert np.array_equal(codes * m >> 16, codes // radix), radix
    return m


@jit.device_function(inline="llvm")
def _write_plane(numbers, block, flip, offset, plane):
    """OR one plane of numbers into a block, whose bits there must be zero."""
    stride = 1 << plane[3]
    for g in range(plane[12]):
        for r in range(stride):
            word = 0
            for k in range(plane[13]):
                number = numbers[plane[9] + (g * plane[13] + k) * stride + r] - offset
                word |= (((number ^ flip) >> plane[8]) & plane[7]) << (plane[4] + plane[5] * k)
            to = plane[0] + g * plane[2] + r
            for k in range(plane[11]):
                block[to + k] |= (word >> (8 * k)) & 255


@jit.device_function(inline="always")
def write_field(numbers, block, field):
    """OR the numbers of a field without a factor into a block, whose bits there must be zero."""
    if field[0] > 0:
        _write_plane(numbers, block, field[1], field[5], field[6])
    if field[0] > 1:
        _write_plane(numbers, block, field[1], field[5], field[7])
    if field[0] > 2:
        _write_plane(numbers, block, field[1], field[5], field[8])


# ---- documentation ------------------------------------------------------------------------------


def byte_rows(table: FieldTable) -> list[tuple[int, int, str]]:
    """Return offset, bytes and contents of the parts of a block.

    Planes that interleave, such as the scales and minima of q4_k, share one row.

    Examples
    --------
    >>> from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
    >>> code = Field("code", 32, (Plane(2, 4, stride=16),))
    >>> byte_rows(FieldTable(32, (float16("scale", 0), code)))
    [(0, 2, 'scale: float16'), (2, 16, 'code: 2 in a byte, 16 apart')]
    """
    rows: list[tuple[int, int, str]] = []
    for at, end, text in sorted(
        (plane.at, plane.at + plane.n_bytes(field.n_stored), _described(field, plane))
        for field in table.fields
        for plane in field.planes
    ):
        if rows and at < sum(rows[-1][:2]):
            first, n_bytes, others = rows.pop()
            rows.append((first, max(first + n_bytes, end) - first, f"{others}; {text}"))
        else:
            rows.append((at, end - at, text))
    return rows


def _described(field: Field, plane: Plane) -> str:
    """Describe the numbers of a plane and their order."""
    name = f"pair {field.name}" if field.radix else field.name
    span = plane.span(field.n_stored)
    if span < field.n_stored:
        name = f"{name} {plane.first}-{plane.first + span - 1}"
    if plane.bits < field.bits:
        top = plane.shift + plane.bits - 1
        which = f"bit {top}" if plane.bits == 1 else f"bits {plane.shift}-{top}"
        name = f"{which} of {name}"
    elif plane.bits in (8, 16):
        kind = "float16" if plane.bits == 16 else "int8" if field.signed else "uint8"
        return f"{name}: {kind}"
    word = {1: "byte", 2: "uint16", 4: "uint32"}[plane.word_bytes]
    if plane.per_group == 1:
        return f"{name}: bits {plane.bit}-{plane.bit + plane.bits - 1} of each {word}"
    apart = "neighbours" if plane.stride == 1 else f"{plane.stride} apart"
    return f"{name}: {plane.per_group} in a {word}, {apart}"


# ---- map of bits --------------------------------------------------------------------------------

FIELD_BITS = 16
"""Maximum bits of a number."""


def bit_sources(table: FieldTable, counts: Mapping[str, int] | None = None) -> NDArray[np.int32]:
    """Map each bit of a block to the bit of a number that it stores.

    Parameters
    ----------
    table : FieldTable
        The bytes of a block.  Numbers are counted over all fields, in order.
    counts : mapping, optional
        Field name to the count of numbers given, if runs of equal numbers are stored once.

    Returns
    -------
    array of int32, shape (block_bytes * 8,)
        ``16 * number + bit``.

    Examples
    --------
    >>> from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane
    >>> two = FieldTable(2, (Field("code", 2, (Plane(0, 4),)),))
    >>> bit_sources(two).tolist()
    [0, 1, 2, 3, 16, 17, 18, 19]
    """
    sources = np.zeros(8 * table.block_bytes, np.int32)
    first = 0
    for field in table.fields:
        assert not field.flip
        assert not field.radix
        count = (counts or {}).get(field.name, field.n)
        numbers = first + count // field.n * np.arange(field.n)
        sources[field.positions()] = FIELD_BITS * numbers[:, None] + np.arange(field.bits)
        first += count
    return sources
