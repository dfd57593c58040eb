"""CPU layout of packed weights: 16 rows interleaved, one SIMD lane per row.

All block formats are repacked into it from their integer form (`codec_spec`), so one set of kernels
serves them all.  A *row group* is 16 rows, zero-padded.  Its blocks are contiguous; columns are
padded with zero weights to whole blocks.  A block consists of

====================  =============================================================================
floats                `d` of each group of `d_block` columns, 16 rows each; then `m` likewise, if
                      the format has one
segments              of `segment` columns: integer scales of each sub-block, 16 bytes each; mins
                      (with 4-bit scales, in the same byte: min << 4 | scale); codes
codes                 units of 32 columns (64 with pairs), a *word vector* of 64 bytes per bit
====================  =============================================================================

Scales directly precede their codes: hardware prefetches a single stream best.  All scales at the
front of a block of 256 columns made the GEMV 15 % slower.

Byte ``4 * row + j`` of *code vector* v is the code of column ``4 * v + j`` of the unit, the operand
of a 4-way int8 dot product.  `FIELDS` maps code vectors to bits of word vectors: most are
contiguous, so that a shift and a mask extract them; the rest fill the unused high bits.  Pair codes
store code vectors 2w and 2w + 1 as ``x + 11 * y`` in the low 7 bits of word w; bit i of word 7 is
the top bit of word i.

Trellis-coded formats keep their bit streams: word w of a unit is, for each row, the 32 bits of the
stream from bit 32 * w on, counted from the first weight of the unit.

Codes take as many bits as in storage; integer scales are widened to bytes, which costs at most 4 %
(`CpuPacked.bits_per_weight`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import huge_pages, jit, register_tiles, simd, simd_int8
from nbflow_kernels.cpu.parallel_for import parallel_chunks, parallel_for
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    allocate,
    read_f16,
    read_f32,
    read_i32,
    read_word,
    release,
    write_f16,
    write_i64,
)
from nbflow_kernels.cpu.simd_narrow import write_u16
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks, ReadRows, has_floats

ROWS = 16  # rows per group: the lanes of a SIMD vector
CHUNK = 1 << 20  # weights packed by a thread at once: the temporary arrays stay in the caches

PAIRS = 7
"""Value of `CpuLayout.bits` for pair codes."""
FIELDS: dict[int, tuple[tuple[int, int, int, int, int], ...]] = {
    1: tuple((v, 0, 1, 0, v) for v in range(8)),
    2: tuple((v, 0, 2, v // 4, 2 * (v % 4)) for v in range(8)),
    3: (
        *((v, 0, 3, v // 2, 3 * (v % 2)) for v in range(6)),
        *((6, 0, 2, 0, 6), (6, 2, 1, 1, 6)),
        *((7, 0, 1, 1, 7), (7, 1, 2, 2, 6)),
    ),
    4: tuple((v, 0, 4, v // 2, 4 * (v % 2)) for v in range(8)),
    5: (
        *((v, 0, 5, v, 0) for v in range(5)),
        *((5, 0, 3, 0, 5), (5, 3, 2, 1, 5)),
        *((6, 0, 3, 2, 5), (6, 3, 2, 3, 5)),
        *((7, 0, 3, 4, 5), (7, 3, 1, 1, 7), (7, 4, 1, 3, 7)),
    ),
    6: (
        *((v, 0, 6, v, 0) for v in range(6)),
        *((6, 2 * w, 2, w, 6) for w in range(3)),
        *((7, 2 * w, 2, w + 3, 6) for w in range(3)),
    ),
    8: tuple((v, 0, 8, v, 0) for v in range(8)),
}
"""Code bits to bit fields of a unit: (code vector, first bit, width, word, bit offset in word)."""
SCALE_RANGE = {"i8": (-128, 127), "i6": (-32, 31), "u8": (0, 255), "u4": (0, 15)}
"""Lowest and highest integer scale by `CpuLayout.scales`."""
D_BYTES = {"f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1, "u8": 1}


@dataclass(frozen=True)
class CpuLayout:
    """Compile-time parameters of the CPU kernels; formats with equal ones share kernels."""

    bits: int
    """1 to 6, 8, or `PAIRS`."""
    block: int
    """Columns per packed block, a multiple of 32."""
    d_block: int
    """Columns that share `d`."""
    sub_block: int
    """Columns that share scale and min."""
    zero: int
    """value = code - zero; 128 with integer `values`, which are stored plus 128; 0 with floats."""
    values: tuple[int, ...] | tuple[float, ...] | None
    factor: float
    d_type: str
    base: str
    """"none", "d" or "min", as in `CodecSpec`."""
    scales: str
    """"none", "i8", "i6" (a byte too, in -32..31), "u8" or "u4"."""
    trellis: bool = False
    """True if the `bits` bits per weight are a bit stream of trellis states (`trellis_code`)."""

    @property
    def operand_bits(self) -> int:
        """Bits of the bytes that products multiply: looked-up ones take 8."""
        return 8 if self.trellis or self.values is not None else self.bits

    @property
    def has_float_values(self) -> bool:
        """See `CodecSpec.has_float_values`."""
        return has_floats(self.values)

    @property
    def folds_zero(self) -> bool:
        """True if ``-zero * scale`` is exact (while finite) and can be folded into the base."""
        power_of_two = self.zero & (self.zero - 1) == 0
        exact = power_of_two or (self.d_type == "f16" and self.scales == "none")
        return self.base == "none" and exact

    @property
    def one_d(self) -> bool:
        """True if integer scales multiply one `d` per packed block."""
        return self.scales != "none" and self.block == self.d_block

    @property
    def folded_zero(self) -> int | None:
        """Number that takes scale * value to 0..255 in sub-blocks of 16; None if no number does."""
        looked_up = self.values is not None or self.trellis
        if self.sub_block != 16 or looked_up or self.bits == PAIRS or not self.one_d:
            return None
        lowest, highest = -self.zero, (1 << self.bits) - 1 - self.zero
        products = [
            scale * code for scale in SCALE_RANGE[self.scales] for code in (lowest, highest)
        ]
        return -min(products) if max(products) - min(products) <= 255 else None

    @property
    def unit(self) -> int:
        """Columns per unit."""
        return 64 if self.bits == PAIRS else 32

    @property
    def unit_bytes(self) -> int:
        """Bytes per unit of 16 rows."""
        return 64 * self.bits

    @property
    def d_bytes(self) -> int:
        """Bytes of `d` and `m` per block."""
        n_floats = self.block // self.d_block * (1 if self.base == "none" else 2)
        return ROWS * n_floats * D_BYTES[self.d_type]

    @property
    def segment(self) -> int:
        """Columns per segment: whole units and whole sub-blocks."""
        return max(self.unit, self.sub_block)

    @property
    def segment_scales(self) -> int:
        """Integer scales per segment and row."""
        return 0 if self.scales == "none" else self.segment // self.sub_block

    @property
    def codes_at(self) -> int:
        """Offset of the codes in a segment, in bytes."""
        has_mins = self.base == "min" and self.scales != "u4"
        return ROWS * self.segment_scales * (2 if has_mins else 1)

    @property
    def segment_bytes(self) -> int:
        """Bytes per segment of 16 rows."""
        return self.codes_at + self.segment // self.unit * self.unit_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes per block of 16 rows."""
        return self.d_bytes + self.block // self.segment * self.segment_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.block_bytes / (ROWS * self.block)


def packed_form(form: CodecSpec) -> CpuLayout:
    """Return the CPU layout of an integer form.

    Raises
    ------
    UsageError
        If the layout does not support the form's block sizes or code bits.
    """
    bits = PAIRS if form.pairs else 8 if form.code_bits == 7 else form.code_bits
    bits = form.trellis or bits
    n_values = 0 if form.values is None else len(form.values)
    sizes_fit = form.block % form.sub_block == 0 == form.sub_block % 16
    if not sizes_fit or (form.sub_block > 32 and form.sub_block % 32):
        raise UsageError(
            "an integer form needs a sub_block of 16 or a multiple of 32, and a block that is a "
            f"multiple of it; got {form.sub_block} and {form.block}"
        )
    if bits not in (*FIELDS, PAIRS) or n_values not in (0, 1 << bits) or n_values > 16:
        raise UsageError(
            "an integer form needs code_bits 1..8, and `values` only up to 4 bits, 2**code_bits "
            f"of them; got {form.code_bits} bits and {n_values} values"
        )
    unit = 64 if bits == PAIRS else 32
    if form.block > unit and form.block % unit:
        raise UsageError(f"a block must divide or be a multiple of {unit}, got {form.block}")
    scales = "none"
    if form.scales:
        # formats with mins have nonnegative scales
        scales = "i6" if form.scale_bits == 6 else "i8"
        if form.base == "min":
            scales = "u4" if form.scale_bits == 4 else "u8"
    elif form.base == "min":
        raise UsageError('base "min" needs integer scales')
    return CpuLayout(
        bits=bits,
        block=max(form.block, unit),
        d_block=form.block,
        sub_block=form.sub_block,
        zero=form.zero if form.values is None else 0 if form.has_float_values else 128,
        values=form.values,
        factor=form.factor,
        d_type=form.d_type,
        base=form.base,
        scales=scales,
        trellis=form.trellis > 0,
    )


@dataclass(frozen=True, eq=False)
class CpuPacked:
    """Matrix of weights in the CPU layout."""

    form: CpuLayout
    n_rows: int
    n_blocks: int
    """Packed blocks per row."""
    data: NDArray[np.uint8]
    """Flat bytes, ``n_groups * group_bytes``, aligned to `huge_pages.ALIGNMENT`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, padding included."""
        return self.data.nbytes

    @property
    def n_groups(self) -> int:
        """Number of row groups."""
        return -(-self.n_rows // ROWS)

    @property
    def n_columns(self) -> int:
        """Number of columns, padding included."""
        return self.n_blocks * self.form.block

    @property
    def group_bytes(self) -> int:
        """Bytes per row group."""
        return self.n_blocks * self.form.block_bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, padding excluded."""
        return self.form.bits_per_weight


def pack(
    form: CodecSpec,
    integers: Callable[[NDArray[np.uint8]], DecodedBlocks],
    rows: ReadRows,
    n_rows: int,
    n_columns: int,
) -> CpuPacked:
    """Repack rows of storage bytes into the CPU layout.

    Parameters
    ----------
    form : CodecSpec
        Decode formula of the format.
    integers : callable
        Unpacks storage bytes of rows to `DecodedBlocks`.
    rows : callable
        ``rows(start, stop)`` returns the storage bytes of rows, uint8 (rows, row bytes).
    n_rows : int
        Number of rows.
    n_columns : int
        Number of columns, a multiple of the form's block.

    Raises
    ------
    UsageError
        If a number is out of range of its type in the layout.
    """
    packed = packed_form(form)
    while True:
        try:
            return _pack(packed, integers, rows, n_rows, n_columns)
        except Misfit as misfit:
            if misfit.field == "d_type":
                packed = replace(packed, d_type="f32")
            elif packed.scales in ("i6", "i8"):
                packed = replace(packed, scales="i8" if packed.scales == "i6" else "u8")
            else:
                raise UsageError(f"weights cannot be packed: {misfit}") from None


class Misfit(ValueError):
    """Raised for a number out of range of its type in the layout; packing retries a wider type."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


def _pack(
    form: CpuLayout,
    integers: Callable[[NDArray[np.uint8]], DecodedBlocks],
    rows: ReadRows,
    n_rows: int,
    n_columns: int,
) -> CpuPacked:
    """Pack rows of `n_columns` columns."""
    empty = CpuPacked(form, n_rows, -(-n_columns // form.block), np.zeros(0, np.uint8))
    packed = replace(empty, data=huge_pages.zeros(empty.n_groups * empty.group_bytes))
    out = address_of(packed.data)
    pairs = True if form.bits == PAIRS else None  # few formats need the code for pairs
    fields = np.array((*FIELDS.get(form.bits, ()), (0,) * 5), np.int64)
    sizes = form.block_bytes, form.d_bytes, form.segment_bytes, form.codes_at

    def read_and_pack(start: int, stop: int) -> None:
        part = integers(rows(start, stop))
        first, n_groups = start // ROWS, -(-stop // ROWS) - start // ROWS
        codes = _padded(part.codes, packed.n_columns)
        parallel_for(
            _pack_codes, n_groups, 2.0 * codes.size,
            address_of(codes), codes.shape[1] // 4, out + first * packed.group_bytes,
            packed.group_bytes, form.bits, address_of(fields), pairs, packed.n_blocks,
            form.block // form.segment, form.segment // form.unit, form.unit // 4, sizes,
        )  # fmt: skip
        _pack_all_numbers(packed, part, first, n_groups)

    step = ROWS * max(1, CHUNK // (ROWS * packed.n_columns))
    parallel_chunks(read_and_pack, n_rows, step, ROWS)
    return packed


def _pack_all_numbers(packed: CpuPacked, part: DecodedBlocks, first: int, n_groups: int) -> None:
    """Write floats, integer scales and mins to row groups from `first` on."""
    form, out = packed.form, address_of(packed.data) + first * packed.group_bytes
    at, n = 0, form.block // form.d_block
    runs = [(floats, n, n) for floats in _floats(form, part)]
    n, n_run = form.block // form.sub_block, form.segment_scales
    runs += [(integers, n, n_run) for integers in _scales_and_mins(form, part)]
    for numbers, n, n_run in runs:
        size = numbers.itemsize
        stored = _padded(numbers, numbers.shape[1])
        parallel_for(
            _pack_numbers, n_groups, 4.0 * stored.size,
            address_of(stored), stored.shape[1] * size // 4, size, out, packed.n_blocks,
            form.block_bytes, at, n, n_run, form.segment_bytes,
        )  # fmt: skip
        at += n_run * ROWS * size


def _padded(array: NDArray[Any], n_columns: int) -> NDArray[Any]:
    """Return the array C-contiguous, with zeros up to whole row groups and 64 bytes of a row."""
    step = 64 // array.itemsize
    shape = -(-len(array) // ROWS) * ROWS, -(-n_columns // step) * step
    if array.shape == shape:
        return np.ascontiguousarray(array)
    result = np.zeros(shape, array.dtype)
    result[: len(array), : array.shape[1]] = array
    return result


def _floats(form: CpuLayout, part: DecodedBlocks) -> list[NDArray[Any]]:
    """Convert `d` and `m` to the type of the layout."""
    floats = [stored_floats(form.d_type, part.d, base=False)]
    if form.base != "none":
        assert part.m is not None
        floats.append(stored_floats(form.d_type, part.m, base=True))
    return floats


def _scales_and_mins(form: CpuLayout, part: DecodedBlocks) -> list[NDArray[Any]]:
    """Convert the integer scales and mins to the type of the layout."""
    if form.scales == "none":
        return []
    assert part.scales is not None
    low, high = SCALE_RANGE[form.scales]
    if part.scales.size and not low <= part.scales.min() <= part.scales.max() <= high:
        raise Misfit("scales", f"integer scales must lie in {low}..{high}")
    scales = part.scales.astype(np.uint8)
    if form.base != "min":
        return [scales]
    assert part.mins is not None
    if form.scales != "u4":
        return [scales, part.mins]
    if part.mins.size and part.mins.max() > 15:
        raise Misfit("scales", "mins must lie in 0..15")
    return [scales | (part.mins << np.uint8(4))]


def stored_floats(d_type: str, numbers: NDArray[np.float32], base: bool) -> NDArray[Any]:
    """Convert floats to the stored type, or raise `Misfit` if that is inexact."""
    with np.errstate(all="ignore"):
        if d_type == "f32":
            return numbers
        if d_type == "f16":
            return _halves(numbers)
        if d_type == "e8m0":
            stored: NDArray[Any] = np.clip(np.frexp(numbers)[1] + 127, 0, 255).astype(np.uint8)
            back = np.ldexp(np.float32(1), stored.astype(np.int32) - 128)
        elif d_type == "e4m3":
            # float16 has one exponent bit and seven mantissa bits more
            halves = (numbers / np.float32(128)).astype(np.float16).view(np.uint16)
            stored = ((halves >> np.uint16(7)) & np.uint16(127)).astype(np.uint8)
            wide_bits = stored.astype(np.uint16) << np.uint16(7)
            back = wide_bits.view(np.float16).astype(np.float32) * np.float32(128)
        else:
            steps = np.float32(100) * (numbers + 1) if base else np.float32(1000) * numbers
            stored = np.clip(np.rint(steps), 0, 255).astype(np.uint8)
            wide = stored.astype(np.float32)
            back = wide / np.float32(100) - 1 if base else wide / np.float32(1000)
    if not np.array_equal(back, numbers, equal_nan=True):
        raise _inexact(d_type)
    return stored


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Convert floats to float16 bits, or raise `Misfit`."""
    halves, changes = np.empty(numbers.shape, np.uint16), np.zeros(1, np.int64)
    numbers = np.ascontiguousarray(numbers)
    addresses = address_of(numbers), address_of(halves), address_of(changes)
    parallel_for(_narrow, numbers.size, 2.0 * numbers.size, *addresses)
    if changes[0]:
        raise _inexact("f16")
    return halves


def _inexact(d_type: str) -> Misfit:
    return Misfit("d_type", f"d or m of a block is not exact in {d_type}")


@jit.kernel(unroll=False)
def _narrow(numbers, halves, changes, start, stop):
    """Write float32 as float16 bits; set the int64 at `changes` to 1 if a number changes."""
    for i in range(start, stop):
        number, at = read_f32(numbers + 4 * i), halves + 2 * i
        write_f16(at, number)
        if number != number:  # the processor would change the payload
            bits = read_i32(numbers + 4 * i)
            payload = (bits >> 13) & 0x3FF
            write_u16(at, ((bits >> 16) & 0x8000) | 0x7C00 | payload | (payload == 0))
        elif read_f16(at) != number:
            write_i64(changes, 1)


@jit.kernel(unroll=False)
def _pack_numbers(
    numbers, n_words, size, out, n_blocks, block_bytes, at, n, n_run, step, start, stop
):  # fmt: skip
    """Pack numbers of `size` bytes, rows of `n_words` words, into row groups [start, stop).

    Run i of `n_run` of the `n` numbers per block begins at byte ``at + i * step`` of the block.
    """
    lanes = allocate(64 * n_words)
    per_word, run = 4 // size, ROWS * size
    for group in range(start, stop):
        _transpose(numbers, n_words, group * ROWS, lanes)
        to = out + group * n_blocks * block_bytes + at
        for b in range(n_blocks):
            for i in range(n):
                k = (b * n + i) // per_word
                if k >= n_words:
                    break
                shift = (b * n + i) % per_word * 8 * size
                word = simd.load_i32(lanes + 64 * k)
                word = simd.shr(word, simd.splat_i32(np.int32(shift)))
                place = to + b * block_bytes + i // n_run * step + i % n_run * run
                if size == 4:
                    simd.store_i32(place, word)
                elif size == 2:
                    simd_int8.store_halves(place, word)
                else:
                    simd_int8.store_narrow(place, word)
    release(lanes)


@jit.device_function
def _transpose(words, n_words, first, lanes):
    """Copy 16 rows of words, from row `first` on, to (words, 16)."""
    words += first * n_words * 4
    for k in range(0, n_words, 16):
        register_tiles.transpose(np.int32(0), words + 4 * k, 4 * n_words, lanes + 64 * k)


@jit.kernel(unroll=False)
def _pack_codes(
    codes, n_words, out, group_bytes, bits, fields, pairs, n_blocks, segments, units,
    vectors, sizes, start, stop,
):  # fmt: skip
    """Pack the codes of row groups [start, stop), 4 columns at a time; `sizes` are in bytes.

    The words of `out` are zero before.
    """
    block, floats, segment, scales = sizes
    per_word = 0 if bits in (3, 5, 6) else 8 // bits
    lanes = allocate(64 * n_words)
    for group in range(start, stop):
        _transpose(codes, n_words, group * ROWS, lanes)
        v = lanes
        for b in range(n_blocks):
            for i in range(segments):
                to = out + group * group_bytes + b * block + floats + i * segment + scales
                for _ in range(units):
                    if pairs is not None:
                        _pack_pairs(v, to)
                    elif per_word:
                        _pack_planes(v, to, bits, per_word)
                    else:
                        _pack_fields(v, to, fields)
                    v += 64 * vectors
                    to += bits * 64
    release(lanes)


@jit.device_function
def _pack_planes(v, to, bits, per_word):
    """Pack as `_pack_fields`, for widths of 1, 2, 4 and 8 bits that fill words evenly."""
    for _ in range(bits):
        found = simd.splat_i32(np.int32(0))
        for i in range(per_word):
            word = simd.load_i32(v)
            found = simd.or_(found, simd.shl(word, simd.splat_i32(np.int32(bits * i))))
            v += 64
        simd.store_i32(to, found)
        to += 64


@jit.device_function
def _pack_fields(v, to, fields):
    """Pack the 8 code vectors of a unit, 4 codes per uint32, by `FIELDS`, which a row of 0 ends."""
    while read_word(fields, 2) != 0:
        down, up = np.int32(read_word(fields, 1)), np.int32(read_word(fields, 4))
        mask = np.int32(0x01010101 * ((1 << read_word(fields, 2)) - 1))
        vector = simd.load_i32(v + 64 * read_word(fields, 0))
        bits = simd.and_(simd.shr(vector, simd.splat_i32(down)), simd.splat_i32(mask))
        place = to + 64 * read_word(fields, 3)
        packed = simd.or_(simd.load_i32(place), simd.shl(bits, simd.splat_i32(up)))
        simd.store_i32(place, packed)
        fields += 40


@jit.device_function
def _pack_pairs(v, to):
    """Pack the 16 code vectors of a unit as pair codes."""
    ones, eleven = simd.splat_i32(np.int32(0x01010101)), simd.splat_i32(np.int32(11))
    last = simd.add(simd.load_i32(v + 64 * 14), simd.mul(simd.load_i32(v + 64 * 15), eleven))
    for w in range(7):
        pair = simd.add(
            simd.load_i32(v + 128 * w), simd.mul(simd.load_i32(v + 128 * w + 64), eleven)
        )
        bit = simd.and_(simd.shr(last, simd.splat_i32(np.int32(w))), ones)
        simd.store_i32(to + 64 * w, simd.or_(pair, simd.shl(bit, simd.splat_i32(np.int32(7)))))
