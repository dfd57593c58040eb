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
from nbflow_kernels.cpu.simd_memory import read_f16, read_i32, write_f16
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
    words = packed.data.view(np.uint32).reshape(packed.n_groups, packed.group_bytes // 4)
    blocks = words.reshape(packed.n_groups, packed.n_blocks, form.block_bytes // 4)
    pairs = True if form.bits == PAIRS else None  # few formats need the code for pairs
    fields = np.array(FIELDS.get(form.bits, ((0,) * 5,)), np.int64)
    sizes = np.array((form.block_bytes, form.d_bytes, form.segment_bytes, form.codes_at)) // 4

    def read_and_pack(start: int, stop: int) -> None:
        part = integers(rows(start, stop))
        groups = slice(start // ROWS, -(-stop // ROWS))
        codes = _padded(part.codes, packed.n_columns)
        parallel_for(
            _pack_codes, groups.stop - groups.start, 2.0 * codes.size,
            codes.view(np.int32), words[groups], form.bits, fields, pairs, packed.n_blocks,
            form.block // form.segment, form.segment // form.unit, form.unit // 4, sizes,
        )  # fmt: skip
        _pack_all_numbers(form, part, blocks[groups])

    step = ROWS * max(1, CHUNK // (ROWS * packed.n_columns))
    parallel_chunks(read_and_pack, n_rows, step, ROWS)
    return packed


def _pack_all_numbers(form: CpuLayout, part: DecodedBlocks, blocks: NDArray[np.uint32]) -> None:
    """Write floats, integer scales and mins to blocks (groups, blocks, words), which are zero."""
    at, n = 0, form.block // form.d_block
    runs = [(floats, n, n) for floats in _floats(form, part)]
    n, n_run = form.block // form.sub_block, form.segment_scales
    runs += [(integers, n, n_run) for integers in _scales_and_mins(form, part)]
    for numbers, n, n_run in runs:
        size = numbers.itemsize
        stored = _padded(numbers, -(-numbers.shape[1] * size // 4) * 4 // size).view(np.int32)
        parallel_for(
            _pack_numbers, len(blocks), 4.0 * stored.size,
            stored, size, blocks, at, n, n_run, form.segment_bytes // 4,
        )  # fmt: skip
        at += n_run * ROWS * size // 4


def _padded(array: NDArray[Any], n_columns: int) -> NDArray[Any]:
    """Return the array C-contiguous, zero-padded to the right."""
    if array.shape[1] == n_columns:
        return np.ascontiguousarray(array)
    result = np.zeros((len(array), n_columns), array.dtype)
    result[:, : array.shape[1]] = array
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
    halves = np.empty(numbers.shape, np.uint16)
    if _narrow(np.ascontiguousarray(numbers).reshape(-1), halves.reshape(-1)):
        raise _inexact("f16")
    return halves


def _inexact(d_type: str) -> Misfit:
    return Misfit("d_type", f"d or m of a block is not exact in {d_type}")


@jit.kernel(unroll=False)
def _narrow(numbers, halves):
    """Write float32 as float16 bits; return whether a number changes."""
    changed = False
    for i in range(len(numbers)):
        at = simd.address(halves) + 2 * i
        write_f16(at, numbers[i])
        if numbers[i] != numbers[i]:  # the processor would change the payload
            bits = read_i32(simd.address(numbers) + 4 * i)
            halves[i] = ((bits >> 16) & 0x8000) | 0x7C00 | max((bits >> 13) & 0x3FF, 1)
        elif read_f16(at) != numbers[i]:
            changed = True
    return changed


@jit.kernel(unroll=False)
def _pack_numbers(numbers, size, out, at, n, n_run, step, start, stop):
    """Pack numbers of `size` bytes, rows of words, in row groups [start, stop).

    Run i of `n_run` of the `n` numbers per block begins at word ``at + i * step`` of the block; the
    words of `out`, (groups, blocks, words), are zero before.
    """
    lanes = np.empty((numbers.shape[1], ROWS), np.int32)
    per_word, words = 4 // size, ROWS * size // 4  # words per number of all lanes
    for group in range(start, stop):
        _transpose(numbers, group * ROWS, lanes)
        for b in range(out.shape[1]):
            for i in range(n):
                k = (b * n + i) // per_word
                if k >= len(lanes):
                    break
                shift = (b * n + i) % per_word * 8 * size
                to = at + i // n_run * step + i % n_run * words
                if size == 4:
                    for lane in range(ROWS):
                        out[group, b, to + lane] = lanes[k, lane] & 0xFFFFFFFF
                elif size == 2:
                    for j in range(8):
                        low = (lanes[k, 2 * j] >> shift) & 0xFFFF
                        high = (lanes[k, 2 * j + 1] >> shift) & 0xFFFF
                        out[group, b, to + j] = low | high << 16
                else:
                    word = simd.load_i32(simd.address(lanes[k]))
                    word = simd.shr(word, simd.splat_i32(np.int32(shift)))
                    simd_int8.store_narrow(simd.address(out[group, b]) + 4 * to, word)


@jit.device_function
def _transpose(words, first, lanes):
    """Copy 16 rows of words, from row `first` on, to (words, 16); rows after the last are 0."""
    count = min(ROWS, len(words) - first)
    n = words.shape[1]
    done = n // 16 * 16 if count == ROWS else 0
    for k in range(0, done, 16):
        at = simd.address(words) + first * words.strides[0] + 4 * k
        register_tiles.transpose(words, at, words.strides[0], simd.address(lanes[k]))
    for k in range(done, n):
        for lane in range(ROWS):
            lanes[k, lane] = words[first + lane, k] if lane < count else 0


@jit.kernel(unroll=False)
def _pack_codes(
    codes, out, bits, fields, pairs, n_blocks, segments, units, vectors, sizes, start, stop
):  # fmt: skip
    """Pack the codes of row groups [start, stop), 4 columns at a time; `sizes` are in words.

    The words of `out` are zero before.
    """
    block, floats, segment, scales = sizes
    per_word = 0 if bits in (3, 5, 6) else 8 // bits
    lanes = np.empty((codes.shape[1], ROWS), np.int32)
    for group in range(start, stop):
        _transpose(codes, group * ROWS, lanes)
        words, v = out[group], np.int64(0)  # of a literal, all below would be compiled twice
        for b in range(n_blocks):
            for i in range(segments):
                at = b * block + floats + i * segment + scales
                for _ in range(units):
                    if pairs is not None:
                        _pack_pairs(lanes, v, words, at)
                    elif per_word:
                        _pack_planes(lanes, v, words, at, bits, per_word)
                    else:
                        _pack_fields(lanes, v, words, at, fields)
                    v += vectors
                    at += bits * ROWS


@jit.device_function
def _pack_planes(lanes, v, words, at, bits, per_word):
    """Pack as `_pack_fields`, for widths of 1, 2, 4 and 8 bits that fill words evenly."""
    for _ in range(bits):
        found = simd.splat_i32(np.int32(0))
        for i in range(per_word):
            word = simd.load_i32(simd.address(lanes[v]))
            found = simd.or_(found, simd.shl(word, simd.splat_i32(np.int32(bits * i))))
            v += 1
        simd.store_i32(simd.address(words) + 4 * at, found)
        at += ROWS


@jit.device_function
def _pack_fields(lanes, v, words, at, fields):
    """Pack the 8 code vectors of a unit, 4 codes per uint32, by `FIELDS`."""
    for i in range(len(fields)):
        down, up = np.int32(fields[i, 1]), np.int32(fields[i, 4])
        mask = np.int32(0x01010101) * np.int32((1 << fields[i, 2]) - 1)
        vector = simd.load_i32(simd.address(lanes[v + fields[i, 0]]))
        bits = simd.and_(simd.shr(vector, simd.splat_i32(down)), simd.splat_i32(mask))
        to = simd.address(words) + 4 * (at + fields[i, 3] * ROWS)
        packed = simd.or_(simd.load_i32(to), simd.shl(bits, simd.splat_i32(up)))
        simd.store_i32(to, packed)


@jit.device_function
def _pack_pairs(lanes, v, words, at):
    """Pack the 16 code vectors of a unit as pair codes."""
    for w in range(7):
        x = v + 2 * w
        for lane in range(ROWS):
            pair = lanes[x, lane] + 11 * lanes[x + 1, lane]
            last = lanes[v + 14, lane] + 11 * lanes[v + 15, lane]
            bit = (last >> w) & 0x01010101
            words[at + lane] = pair | bit << 7
        at += ROWS
