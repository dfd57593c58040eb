"""Unpacking of rows of blocks: up to three fields of a format at once, by one compiled kernel.

`unpacking` derives the constants of a kernel from a format's `FieldTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd_narrow
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    allocate,
    read_i32,
    read_i64,
    read_u8,
    read_u16,
    read_word,
    release,
    write_i64,
)
from nbflow_kernels.formats.bit_fields import LOWEST_BITS, read_number, reciprocal
from nbflow_kernels.formats.codec_spec import Field, Plane
from nbflow_kernels.formats.registry import Bytes

Numbers = NDArray[np.int64]

MOST_FIELDS = 3
ONE_OF_2, ONE_OF_4 = 0x0000000100000001, 0x0001000100010001
# Columns of `Unpacking.fields` and of `Unpacking.planes`.
N_NUMBERS, SIZE, STORED_SIZE, RADIX, INVERSE, FACTOR, OFFSET, FIRST_PLANE, END_PLANE, CHANGES = (
    range(10)
)
KIND, MASK, SHIFT, FLIP, WIDTH, FIRST_NUMBER, FIRST_STEP, END_STEP, KEEPS = range(9)
FIELD_BYTES, PLANE_BYTES = 80, 72
ONE_NUMBER, EIGHT_BYTES, NEIGHBOURS = range(3)
"""Numbers that a step of a plane reads: one; 8 codes in 8 bytes; 8 codes in 1, 2 or 4 bytes."""


class Unpacking(NamedTuple):
    """Constants of `unpack_rows` for up to three fields of a block."""

    fields: Numbers
    """(3, 10): numbers, their bytes and those of stored ones, radix, its reciprocal, factor,
    offset, first plane and the one after the last, 1 if numbers change after the planes."""
    planes: Numbers
    """(planes, 9): kind, mask, shift, XOR mask, width in bits or bytes, first number, first step
    and the one after the last, 1 if earlier planes have bits of these numbers."""
    steps: Numbers
    """(steps, 2): offset in the block in bytes, and bit."""


def unpacking(block_bytes: int, *fields: tuple[Field | None, int]) -> Unpacking:
    """Return the constants for fields (None: left out) unpacked to numbers of 1 or 2 bytes."""
    constants, planes = np.zeros((MOST_FIELDS, 10), np.int64), list[tuple[int, ...]]()
    steps = [np.zeros((0, 2), np.int64)]
    for i, (field, size) in enumerate(fields):
        if field is None:
            continue
        stored, n = 1 if field.bits <= 8 else 2, field.n_stored
        first, flip, is_covered = len(planes), field.flip, field.planes[0].span(n) == n
        assert is_covered or not flip
        for plane in field.planes:
            kind, mask, found = _steps(plane, n, stored, block_bytes)
            flip = flip if kind == ONE_NUMBER else _in_bytes(flip, np.arange(8))
            width = plane.word_bytes if kind == ONE_NUMBER else plane.bits
            begin = plane.first if kind == ONE_NUMBER else 0
            at, keeps = sum(map(len, steps)), len(planes) > first or not is_covered
            planes.append((kind, mask, plane.shift, flip, width, begin, at, at + len(found), keeps))
            steps.append(found)
            flip = 0
        factor, offset = field.factor, field.offset
        changes = bool(field.radix or stored != size or factor != 1 or offset or not is_covered)
        constants[i] = (
            field.n, size, stored, field.radix, reciprocal(field.radix), factor, offset, first,
            len(planes), changes,
        )  # fmt: skip
    return Unpacking(constants, np.array(planes, np.int64), np.concatenate(steps))


def _steps(plane: Plane, n: int, size: int, block_bytes: int) -> tuple[int, int, Numbers]:
    """Return kind, mask and steps of a plane of `n` numbers, for numbers of `size` bytes."""
    bits, mask = plane.positions(n), (1 << plane.bits) - 1
    if size == 1 and n % 8 == 0 and plane.word_bytes == 1:
        places = np.full(n, -1, np.int64)
        places[plane.first : plane.first + len(bits)] = bits
        groups = places.reshape(-1, 8)
        lanes = np.flatnonzero(groups[0] >= 0)  # of the 8 numbers, those with bits in the plane
        if len(lanes) and np.array_equal(groups >= 0, [np.isin(range(8), lanes)] * len(groups)):
            first = groups[:, lanes[0]] - 8 * lanes[0]
            steps = np.stack([first // 8, first % 8], axis=1)
            in_block = first.min() >= 0 and steps[:, 0].max() + 8 <= block_bytes
            if in_block and np.array_equal(groups[:, lanes], first[:, None] + 8 * lanes):
                return EIGHT_BYTES, _in_bytes(mask, lanes), steps
            is_tight = np.array_equal(groups, first[:, None] + plane.bits * np.arange(8))
            if is_tight and plane.bits in (1, 2, 4) and not steps[:, 1].any():
                return NEIGHBOURS, mask, steps
    at = bits // 8
    if plane.word_bytes > 1:  # words begin at the first byte of their group
        at = plane.at + np.arange(len(bits)) // plane.per_group * plane.step
    return ONE_NUMBER, mask, np.stack([at, bits - 8 * at], axis=1)


def _in_bytes(number: int, lanes: NDArray[np.int64]) -> int:
    """Return the int64 with a number in some of its 8 bytes and 0 in the others."""
    found = np.zeros(8, np.uint8)
    found[lanes] = number
    return int.from_bytes(found.tobytes(), "little", signed=True)


def unpack_rows(
    rows: Bytes,
    block_bytes: int,
    constants: Unpacking,
    outs: Sequence[NDArray[Any]],
    work: float,
) -> None:
    """Unpack up to three fields of contiguous rows of blocks.

    Parameters
    ----------
    rows : array of uint8, shape (rows, blocks * block_bytes)
        Blocks of a format.
    block_bytes : int
        Bytes per block.
    constants : Unpacking
        Constants of the fields.
    outs : sequence of array, shape (rows, numbers)
        The numbers of each field.
    work : float
        Operations, for the choice of thread count.
    """
    places = [place for out in outs for place in (address_of(out), out.strides[0])]
    places += [0] * (2 * MOST_FIELDS - len(places))
    parallel_for(
        _unpack_rows, len(rows), work, (address_of(rows), rows.strides[0]), block_bytes,
        rows.shape[1] // block_bytes, *map(address_of, constants), tuple(places),
    )  # fmt: skip


@jit.kernel(unroll=False)
def _unpack_rows(rows, block_bytes, n_blocks, fields, planes, steps, outs, start, stop):
    """Unpack fields of rows [start, stop); one kernel for all formats.

    `rows` and the three `outs` are addresses, each with the bytes from row to row; `fields`,
    `planes` and `steps` are the addresses of arrays from `unpacking`.  (Arrays as arguments would
    multiply the compile time.)
    """
    room = np.int64(0)
    for f in range(MOST_FIELDS):
        field = fields + FIELD_BYTES * f
        room = max(room, n_blocks * read_word(field, N_NUMBERS) * read_word(field, STORED_SIZE))
    scratch = allocate(room + 8)
    for r in range(start, stop):
        block = rows[0] + r * rows[1]
        for f in range(MOST_FIELDS):
            field = fields + FIELD_BYTES * f
            if f == 0:
                out = outs[0] + r * outs[1]
            elif f == 1:
                out = outs[2] + r * outs[3]
            else:
                out = outs[4] + r * outs[5]
            _unpack_field(block, block_bytes, n_blocks, field, planes, steps, scratch, out)
    release(scratch)


@jit.device_function
def _unpack_field(block, block_bytes, n_blocks, field, planes, steps, scratch, out):
    """Unpack a field of a row of blocks to the numbers at `out`."""
    size, radix, to = read_word(field, STORED_SIZE), read_word(field, RADIX), out
    n, n_bytes = n_blocks * read_word(field, N_NUMBERS), read_word(field, N_NUMBERS) * size
    changes = read_word(field, CHANGES) != 0
    if changes:
        to = scratch
        for i in range(0, n * size, 8):
            write_i64(scratch + i, 0)
    if radix != 0:
        n_bytes //= 2
    for p in range(read_word(field, FIRST_PLANE), read_word(field, END_PLANE)):
        plane = planes + PLANE_BYTES * p
        if read_word(plane, KIND) == ONE_NUMBER:
            _unpack_numbers(block, block_bytes, n_blocks, plane, steps, to, n_bytes, size)
        else:
            _unpack_eights(block, block_bytes, n_blocks, plane, steps, to, n_bytes)
    if radix != 0:
        _split_pairs(to, n // 2, size, radix, read_word(field, INVERSE), out)
    elif changes:
        factor, offset = read_word(field, FACTOR), read_word(field, OFFSET)
        _scale_numbers(to, n, size, factor, offset, out, read_word(field, SIZE))


@jit.device_function
def _unpack_eights(block, block_bytes, n_blocks, plane, steps, to, n_bytes):
    """Unpack a plane of numbers of which 8 lie in 8 bytes, or closely in 1, 2 or 4 bytes.

    A block has `n_bytes` of numbers.
    """
    mask, shift, flip = read_word(plane, MASK), read_word(plane, SHIFT), read_word(plane, FLIP)
    first, end = read_word(plane, FIRST_STEP), read_word(plane, END_STEP)
    keeps, bits = read_word(plane, KEEPS), read_word(plane, WIDTH)
    in_bytes = read_word(plane, KIND) == EIGHT_BYTES
    for _ in range(n_blocks):
        at = to
        for step in range(steps + 16 * first, steps + 16 * end, 16):
            source = block + read_i64(step)
            if in_bytes:
                eight = (read_i64(source) >> read_i64(step + 8)) & mask
            elif bits == 4:
                eight = spread_8(read_i32(source) & 0xFFFFFFFF, np.int64(4))
            elif bits == 2:
                eight = spread_8(read_u16(source), np.int64(2))
            else:
                eight = spread_8(read_u8(source), np.int64(1))
            eight = (eight << shift) ^ flip
            if keeps != 0:
                eight ^= read_i64(at)
            write_i64(at, eight)
            at += 8
        block += block_bytes
        to += n_bytes


@jit.device_function(inline="llvm")
def spread_8(numbers, pitch):
    """Return eight numbers of `pitch` bits, 1 to 4, in a byte each of an int64."""
    numbers = (numbers | (numbers << (32 - 4 * pitch))) & (((1 << 4 * pitch) - 1) * ONE_OF_2)
    numbers = (numbers | (numbers << (16 - 2 * pitch))) & (((1 << 2 * pitch) - 1) * ONE_OF_4)
    return (numbers | (numbers << (8 - pitch))) & (((1 << pitch) - 1) * LOWEST_BITS)


@jit.device_function
def _unpack_numbers(block, block_bytes, n_blocks, plane, steps, to, n_bytes, size):
    """Unpack a plane of numbers of `size` bytes, one after the other."""
    mask, shift, flip = read_word(plane, MASK), read_word(plane, SHIFT), read_word(plane, FLIP)
    first, end = read_word(plane, FIRST_STEP), read_word(plane, END_STEP)
    keeps, width = read_word(plane, KEEPS), read_word(plane, WIDTH)
    to += read_word(plane, FIRST_NUMBER) * size
    for _ in range(n_blocks):
        at = to
        for step in range(steps + 16 * first, steps + 16 * end, 16):
            source = block + read_i64(step)
            if width == 1:
                word = read_u8(source)
            elif width == 2:
                word = read_u16(source)
            else:
                word = read_i32(source) & 0xFFFFFFFF
            number = (((word >> read_i64(step + 8)) & mask) << shift) ^ flip
            if keeps != 0:
                number ^= read_number(at, size)
            _write(at, number, size)
            at += size
        block += block_bytes
        to += n_bytes


@jit.device_function
def _split_pairs(pairs, n, size, radix, inverse, to):
    """Write two codes for each of `n` pair codes of `size` bytes."""
    for i in range(n):
        pair = read_number(pairs + i * size, size)
        y = (pair * inverse) >> 16  # pair // radix
        simd_narrow.write_u16(to + 2 * i, (pair - radix * y) | (y << 8))


@jit.device_function
def _scale_numbers(stored, n, stored_size, factor, offset, to, size):
    """Write factor * number + offset for `n` numbers."""
    for i in range(n):
        number = factor * read_number(stored + i * stored_size, stored_size) + offset
        _write(to + i * size, number, size)


@jit.device_function(inline="llvm")
def _write(address, number, size):
    """Write a number of 1 or 2 bytes."""
    if size == 1:
        simd_narrow.write_u8(address, number)
    else:
        simd_narrow.write_u16(address, number)
