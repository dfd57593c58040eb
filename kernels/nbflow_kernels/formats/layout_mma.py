"""MMA layout of packed weights on CUDA: units of 16 rows and 256 columns in fragment order.

A *row tile* is 16 rows, the M of a tensor-core MMA.  Row tiles, and the units of a row tile, are
contiguous.  A unit consists of

============  =====================================================================================
floats        `d` (and `d` of the mins) of each of the 16 rows as float16, if one per unit
chunks        two of 128 columns, each with
 scales       the numbers of the chunk's sub-blocks, row by row, in a form of `SCALES`
 codes        32-bit words of the 32 lanes of a warp
============  =====================================================================================

Lane ``4 * g + t`` holds rows g and g + 8 of the A fragment: *slot* ``2 * step + j`` of a tile of 64
columns is the pair of columns ``16 * step + 8 * j + 2 * t + (0, 1)``, one in each 16-bit half of a
word.  A bit field of up to 10 bits at the low end of a half is a subnormal float16,
code * 2**(position - 24): one mask decodes two weights, and the power of two is folded into the
activations.  `FIELDS` maps code bits to words.

A chunk stores its words in vectors of four (16 bytes per lane), then of two and one for the rest,
so that all loads of a warp are coalesced.

Rows are padded to 16 and columns to 128, with zero weights.  A weight takes its storage bits, plus
at most 0.125 bits for widening scales of 4 or 6 bits to bytes.  Codes of grid formats (``iq1``,
``iq2``, ``iq3``) take 3 or 4 bits, ternary ones 2.

Repacking is lossless: d and integer scales stay separate and are multiplied in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks
from nbflow_kernels.formats.layout_cpu import Misfit, stored_floats
from nbflow_kernels.formats.registry import QuantFormat

ROWS, UNIT, CHUNK, TILE = 16, 256, 128, 64
CHUNK_OF_WEIGHTS = 1 << 22  # weights packed at once: bounds the temporary arrays

Field = tuple[int, int, int, int, int, int]
"""Half of the rows, slot, first bit of the code, width, word, bit offset in its 16-bit halves."""

# Code kinds: the decoding from code to value
BITS, PAIRS, TABLE8, TABLE16, E2M1 = range(5)
SCALES = {
    name: i
    for i, name in enumerate(
        ("half", "half_min", "float", "float_min", "byte", "byte_min", "nibble_min", "e8m0",
         "e4m3", "u8_pair", "unit")
    )
}  # fmt: skip
"""Storage forms of a sub-block's scales; ``unit``: none, only the unit has a `d`."""
ENTRY_BYTES = (2, 4, 4, 8, 1, 2, 1, 1, 1, 2, 0)
UNIT_FLOAT_BYTES = (0, 0, 0, 0, 2, 4, 4, 0, 0, 0, 2)


def _rows_apart(bits: int, words: int) -> tuple[Field, ...]:
    """Return the bit fields of widths 1, 2 and 4: rows g first (low bytes or words), then g + 8."""
    per_word = 16 // bits
    fields = []
    for half in range(2):
        for slot in range(8):
            if bits == 4:  # slots 2w and 2w + 1 of both halves in word w
                word, place = slot // 2, 4 * (slot % 2) + 8 * half
            else:
                word, place = divmod(8 * half + slot, per_word)
                place *= bits
            fields.append((half, slot, 0, bits, word, place))
    assert max(f[4] for f in fields) < words
    return tuple(fields)


def _three() -> tuple[Field, ...]:
    fields: list[Field] = [(half, s, 0, 3, half, 3 * s) for half in range(2) for s in range(5)]
    fields += [(0, 5 + i, 0, 3, 2, 3 * i) for i in range(3)]
    fields += [(1, 5 + i, 0, 3, 2, 9 + 3 * i) for i in range(2)]
    return (*fields, *((1, 7, i, 1, i, 15) for i in range(3)))


def _five() -> tuple[Field, ...]:
    fields: list[Field] = [
        (half, 3 * w + i, 0, 5, 2 * half + w, 5 * i)
        for half in range(2)
        for w in range(2)
        for i in range(3)
    ]
    fields += [(0, 6, 0, 5, 4, 0), (0, 7, 0, 5, 4, 5), (1, 6, 0, 5, 4, 10)]
    return (*fields, *((1, 7, i, 1, i, 15) for i in range(5)))


def _six() -> tuple[Field, ...]:
    fields: list[Field] = []
    for half in range(2):
        first = 3 * half
        fields += [(half, 2 * w + i, 0, 6, first + w, 6 * i) for w in range(3) for i in range(2)]
        fields += [(half, 6, 2, 4, first, 12), (half, 7, 2, 4, first + 1, 12)]
        fields += [(half, 6, 0, 2, first + 2, 12), (half, 7, 0, 2, first + 2, 14)]
    return tuple(fields)


def _e2m1() -> tuple[Field, ...]:
    """Return the bit fields of E2M1 codes: after a left shift, sign at bit 15, the rest at 9."""
    places = {(0, 0): (15, 9), (0, 1): (12, 6), (1, 0): (14, 3), (1, 1): (13, 0)}
    return tuple(
        (half, 2 * word + j, first, n, word, place)
        for (half, j), (sign, rest) in places.items()
        for word in range(4)
        for first, n, place in ((3, 1, sign), (0, 3, rest))
    )


FIELDS: dict[int, tuple[Field, ...]] = {
    1: _rows_apart(1, 1),
    2: _rows_apart(2, 2),
    3: _three(),
    4: _rows_apart(4, 4),
    5: _five(),
    6: _six(),
}
"""Bit fields of a tile by code width; `decode_mma.cuh` extracts them."""
E2M1_FIELDS = _e2m1()
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
POSITIONS = {
    1: tuple(range(8)),
    2: (0, 2, 4, 6) * 2,
    3: (0, 3, 6, 0, 3, 0, 3, 6),
    4: (0, 4) * 4,
    5: (0, 5, 0, 0, 5, 0, 0, 5),
    6: (0,) * 6 + (4, 4),
    7: (0, 14) * 4,
    8: (0,) * 8,
}
"""Bit position of each slot's code after masking; 7 (pair codes): x * 2**-24 and y * 2**-10."""


@dataclass(frozen=True)
class MmaLayout:
    """Compile-time parameters of the CUDA kernels; formats with equal ones share kernels."""

    kind: int
    """`BITS`, `PAIRS` (x + 11 * y in 7 bits), `TABLE8` or `TABLE16` (codebook lookup), or `E2M1`
    (4-bit floats, twice their value)."""
    bits: int
    """Bits per code, 1 to 6 or 8; 3 and 4 with codebooks; 7 per pair code."""
    sub_block: int
    """Columns that share a scale: 16, 32, 64 or 128."""
    scales: str
    """Key of `SCALES`."""
    zero: float
    """value = code - zero; codebooks store value + zero, 0 to 255."""
    scale_zero: int
    """Offset of stored integer scales: stored = scale + scale_zero."""
    factor: float
    """Power of two: weight = factor * scale * value + base."""
    values: tuple[int, ...]
    """Codebook of 8 or 16 integers, or empty."""

    @property
    def integer_sums(self) -> bool:
        """True if integer dot products need at most the tensor-core correction for mins or zeros.

        See `decode_mma.cuh`.
        """
        has_min = self.scales in ("half_min", "float_min", "byte_min", "nibble_min", "u8_pair")
        if self.zero:  # multiplied by activation sums in a separate MMA
            return self.scales in ("half", "byte")
        return not has_min or self.scales in ("half_min", "byte_min", "nibble_min")

    @property
    def chunk_words(self) -> int:
        """32-bit words per lane and chunk."""
        return 7 if self.kind == PAIRS else 2 * self.bits

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales per chunk."""
        return ROWS * ENTRY_BYTES[SCALES[self.scales]] * (CHUNK // self.sub_block)

    @property
    def float_bytes(self) -> int:
        """Bytes of floats per unit."""
        return ROWS * UNIT_FLOAT_BYTES[SCALES[self.scales]]

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk."""
        return self.scale_bytes + 128 * self.chunk_words

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of whole units, scales included."""
        return 8 * (self.float_bytes + 2 * self.chunk_bytes) / (ROWS * UNIT)

    def tile_bytes(self, n_columns: int) -> int:
        """Return the bytes of a row tile of `n_columns` columns."""
        n_chunks = -(-n_columns // CHUNK)
        return -(-n_chunks // 2) * self.float_bytes + n_chunks * self.chunk_bytes

    def defines(self) -> dict[str, str | int]:
        """Return the macros of `decode_mma.cuh` for this layout."""
        positions = POSITIONS[self.bits] if self.kind in (BITS, PAIRS) else (0,) * 8
        found: dict[str, str | int] = {
            "KIND": self.kind,
            "BITS": self.bits,
            "SUB_BLOCK": self.sub_block,
            "SCALES": SCALES[self.scales],
            "ZERO": f"{self.zero!r}f",
            "SCALE_ZERO": self.scale_zero,
            "FACTOR": f"{self.factor!r}f",
            "POSITIONS": f"0x{sum(p << 4 * i for i, p in enumerate(positions)):08x}u",
        }
        table = np.array(self.values or (0,), np.int64) + (int(self.zero) if self.values else 0)
        for i, word in enumerate(np.resize(table.astype(np.uint8), 16).view("<u4")):
            found[f"TABLE_{i}"] = f"0x{word:08x}u"
        return found


@cache
def unit_form(form: CodecSpec) -> MmaLayout:
    """Return the MMA layout of an integer form.

    Raises
    ------
    UsageError
        If the sub-block size is not a multiple of 16 columns.
    """
    if form.sub_block % 16 or form.block % form.sub_block:
        raise UsageError(
            "the CUDA layout needs sub-blocks of a multiple of 16 columns and blocks of whole "
            f"sub-blocks, got {form.sub_block} and {form.block}"
        )
    kind, bits, zero, step, values = _codes(form)
    scales, scale_zero = _scales(form)
    sub_block = next(n for n in (CHUNK, 64, 32, 16) if form.sub_block % n == 0)
    # decode_mma.cuh reads e8m0 and e4m3 as bits of floats, which differ by these factors
    unit = {"e8m0": 0.5, "e4m3": 128.0}.get(scales, 1.0)
    factor = unit * step * (1.0 if scales.startswith("float") else form.factor)
    return MmaLayout(kind, bits, sub_block, scales, zero, scale_zero, factor, values)


def _codes(form: CodecSpec) -> tuple[int, int, float, float, tuple[int, ...]]:
    """Return kind, bits, zero, step between values, and codebook of an integer form."""
    bits = 8 if form.code_bits == 7 else form.code_bits
    if form.pairs:
        return PAIRS, 7, float(form.zero), 1.0, ()
    if form.values is None:
        return BITS, bits, float(form.zero), 1.0, ()
    if bits == 1:  # two values are always affine in the code
        low, high = form.values
        step = float(high - low)
        if step > 0 and step == 2.0 ** round(np.log2(step)):
            return BITS, 1, -low / step, step, ()
    if bits > 4:
        raise UsageError(f"values are looked up for codes of up to 4 bits, got {bits}")
    if bits == 4 and tuple(form.values) == E2M1_VALUES:
        return E2M1, 4, 0.0, 1.0, ()
    size = 8 if bits <= 3 else 16
    table = tuple(int(v) for v in np.resize(form.values, size))
    zero = float(-min(table))  # stored values are nonnegative and as small as possible
    return (TABLE8, 3, zero, 1.0, table) if size == 8 else (TABLE16, 4, zero, 1.0, table)


def _scales(form: CodecSpec) -> tuple[str, int]:
    """Return the storage form of the scales, and the offset of integer ones."""
    shared = form.d_type == "f16" and form.block == UNIT
    if form.scales and shared and form.base != "d":
        if form.base == "min":
            return ("nibble_min" if form.scale_bits == 4 else "byte_min"), 0
        return "byte", 128
    plain = not form.scales and form.base != "min"
    if plain and shared and form.base == "none":
        return "unit", 0
    if plain and form.d_type == "f16":
        return ("half" if form.base == "none" else "half_min"), 0
    if plain and form.d_type in ("e8m0", "e4m3") and form.base == "none":
        return form.d_type, 0
    if plain and form.d_type == "u8" and form.base == "d":
        return "u8_pair", 0
    return ("float" if form.base == "none" else "float_min"), 0


@dataclass(frozen=True, eq=False)
class MmaPacked:
    """Matrix of weights in the MMA layout, packed on the host and copied to a device."""

    form: MmaLayout
    n_rows: int
    n_columns: int
    data: Any
    """Flat bytes."""

    @property
    def n_tiles(self) -> int:
        """Number of row tiles."""
        return -(-self.n_rows // ROWS)

    @property
    def nbytes(self) -> int:
        """Size in bytes, padding included."""
        return int(self.data.nbytes)

    def matrix(self, index: int, n_rows: int) -> MmaPacked:
        """Return matrix `index` of concatenated matrices of `n_rows` rows each."""
        size = -(-n_rows // ROWS) * self.form.tile_bytes(self.n_columns)
        part = self.data[index * size : (index + 1) * size]
        return replace(self, n_rows=n_rows, data=part)


def pack(format: QuantFormat, data: NDArray[np.uint8], n_columns: int) -> MmaPacked:
    """Repack rows of storage bytes into the MMA layout, in host memory.

    Parameters
    ----------
    format : QuantFormat
        Format with an integer form.
    data : array of uint8, shape (rows, row bytes)
        The storage bytes.
    n_columns : int
        Columns without padding, at most those of `data`.

    Raises
    ------
    UsageError
        If the format has no integer form.
    """
    form = unit_form(format.integer_form)
    try:
        return _pack(form, format, data, n_columns)
    except Misfit:  # a number out of range of its type: store the scales as float32
        floats = "float" if format.integer_form.base == "none" else "float_min"
        given = format.integer_form
        step = form.factor / given.factor / {"e8m0": 0.5, "e4m3": 128.0}.get(form.scales, 1.0)
        if not form.scales.startswith("float"):
            form = MmaLayout(
                form.kind, form.bits, form.sub_block, floats, form.zero, 0,
                step, form.values,
            )  # fmt: skip
        return _pack(form, format, data, n_columns)


def whole_tiles(data: NDArray[np.uint8], n_rows: int) -> NDArray[np.uint8]:
    """Zero-pad concatenated matrices of `n_rows` rows each to whole row tiles."""
    matrices = data.reshape(-1, n_rows, data.shape[1])
    full = np.zeros((len(matrices), -(-n_rows // ROWS) * ROWS, data.shape[1]), np.uint8)
    full[:, :n_rows] = matrices
    return full.reshape(-1, data.shape[1])


def _pack(
    form: MmaLayout, format: QuantFormat, data: NDArray[np.uint8], n_columns: int
) -> MmaPacked:
    n_rows, n_chunks = len(data), -(-n_columns // CHUNK)
    n_tiles, tile_bytes = -(-n_rows // ROWS), form.tile_bytes(n_columns)
    out = np.zeros((n_tiles, tile_bytes), np.uint8)
    step = ROWS * max(1, CHUNK_OF_WEIGHTS // (ROWS * max(n_columns, 1)))
    for row in range(0, n_rows, step):
        part = format.integers(data[row : row + step])
        tiles = out[row // ROWS : row // ROWS + -(-len(part.codes) // ROWS)]
        numbers = _entries(form, format.integer_form, part)
        scales = _rows(numbers, len(tiles), n_chunks, CHUNK // form.sub_block)
        floats = _rows(_unit_floats(form, part), len(tiles), -(-n_chunks // 2), 1)
        codes = _chunks(form, _padded(part.codes, ROWS * len(tiles), CHUNK * n_chunks))
        at = 0
        for chunk in range(n_chunks):
            pieces = [scales[:, chunk], codes[:, chunk]]
            for piece in pieces if chunk % 2 else [floats[:, chunk // 2], *pieces]:
                tiles[:, at : at + piece.shape[1]] = piece
                at += piece.shape[1]
    return MmaPacked(form, n_rows, n_columns, out.reshape(-1))


def _padded(array: NDArray[Any], n_rows: int, n_columns: int) -> NDArray[Any]:
    """Return the array cut to `n_columns` and zero-padded to the right and below."""
    result = np.zeros((n_rows, n_columns), array.dtype)
    kept = array[:, :n_columns]
    result[: kept.shape[0], : kept.shape[1]] = kept
    return result


# ---- codes ---------------------------------------------------------------------------------------


def _chunks(form: MmaLayout, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes (rows, columns) into the bytes of chunks (row tiles, chunks, chunk bytes)."""
    n_tiles, n_chunks = codes.shape[0] // ROWS, codes.shape[1] // CHUNK
    # (tile, half, g, chunk, tile of 64, step, j, t, e) -> half, slot, (tile, chunk, 64, g, t, e)
    split = codes.reshape(n_tiles, 2, 8, n_chunks, 2, 4, 2, 4, 2)
    slots = np.ascontiguousarray(split.transpose(1, 5, 6, 0, 3, 4, 2, 7, 8))
    slots = slots.reshape(2, 8, n_tiles, n_chunks, 2, 32, 2)
    if form.kind == PAIRS:
        words = _pair_words(slots)
    else:
        tiles = {
            TABLE8: _table8_words, TABLE16: _table16_words, E2M1: _e2m1_words,
            BITS: _byte_words if form.bits == 8 else _field_words,
        }[form.kind](slots, form.bits)  # fmt: skip
        # (word, tile, chunk, tile of 64, lane) -> (tile, chunk, lane, words)
        words = tiles.transpose(1, 2, 4, 3, 0).reshape(n_tiles, n_chunks, 32, -1)
    return _planes(np.ascontiguousarray(words))


def _planes(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Store words (tiles, chunks, lanes, n) as vectors of four, then two, then one per lane."""
    n_tiles, n_chunks, _, n = words.shape
    parts, at = [], 0
    while at < n:
        width = next(w for w in (4, 2, 1) if at + w <= n)
        part = np.ascontiguousarray(words[..., at : at + width])
        parts.append(part.reshape(n_tiles, n_chunks, -1).view(np.uint8))
        at += width
    return np.concatenate(parts, axis=2)


def _field_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack codes by `FIELDS` into words (word, tiles, chunks, tile of 64, lane)."""
    return _words_of(FIELDS[bits], slots, bits)


def _e2m1_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack E2M1 codes by `E2M1_FIELDS`; see `_field_words`."""
    return _words_of(E2M1_FIELDS, slots, bits)


def _words_of(
    fields: tuple[Field, ...], slots: NDArray[np.uint8], n_words: int
) -> NDArray[np.uint32]:
    halves = np.zeros((n_words, *slots.shape[2:]), np.uint16)
    for half, slot, first, n, word, place in fields:
        part = (slots[half, slot] >> np.uint8(first)) & np.uint8((1 << n) - 1)
        halves[word] |= part.astype(np.uint16) << np.uint16(place)
    return halves.view("<u4")[..., 0]


def _byte_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack words of four bytes: slots 2w and 2w + 1 of rows g, then of rows g + 8."""
    pairs = slots.reshape(8, 2, *slots.shape[2:])  # (half and w, slot, ..., e)
    return np.ascontiguousarray(np.concatenate([pairs[:, 0], pairs[:, 1]], axis=-1)).view("<u4")[
        ..., 0
    ]


def _table16_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack words of eight nibbles: slots 2w and 2w + 1 of rows g, then of rows g + 8."""
    words = np.zeros((4, *slots.shape[2:-1]), np.uint32)
    for half in range(2):
        for slot in range(8):
            for e in range(2):
                place = 16 * half + 8 * (slot % 2) + 4 * e
                words[slot // 2] |= slots[half, slot, ..., e].astype(np.uint32) << np.uint32(place)
    return words


def _table8_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack two words of the codes' low two bits, and one word of their third bits.

    The nibbles of step s, in the order of `_table16_words`, are bits 0 and 1 of word s // 2 after a
    shift by 2 * (s % 2), and bit s of word 2.
    """
    nibbles = _table16_words(slots, bits)
    low, high = nibbles & np.uint32(0x33333333), (nibbles >> np.uint32(2)) & np.uint32(0x11111111)
    third = high[0] | high[1] << np.uint32(1) | high[2] << np.uint32(2) | high[3] << np.uint32(3)
    return np.stack([low[0] | low[1] << np.uint32(2), low[2] | low[3] << np.uint32(2), third])


def _pair_words(slots: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack seven words per chunk: 16 pair codes x + 11 * y of 7 bits in each half.

    x and y are slots 2s and 2s + 1 of pair 2s + half.  Word w holds pairs 2w and 2w + 1; the two
    top bits of the words hold pairs 14 (words 0 to 2, bit 6 in word 3) and 15 (words 4 to 6 and 3).
    """
    x, y = slots[:, 0::2], slots[:, 1::2]  # (half, step, tiles, chunks, tile of 64, lane, e)
    code = (x + np.uint8(11) * y).transpose(4, 1, 0, 2, 3, 5, 6)
    c = code.reshape(16, *code.shape[3:]).astype(np.uint16)
    halves = c[0:14:2] | c[1:14:2] << np.uint16(7)
    for i, first in ((14, 0), (15, 4)):
        for n in range(3):
            halves[first + n] |= ((c[i] >> np.uint16(2 * n)) & np.uint16(3)) << np.uint16(14)
    halves[3] |= (c[14] >> np.uint16(6)) << np.uint16(14) | (c[15] >> np.uint16(6)) << np.uint16(15)
    words = np.ascontiguousarray(halves).view("<u4")[..., 0]
    return words.transpose(1, 2, 3, 0)


# ---- scales --------------------------------------------------------------------------------------


def _rows(numbers: NDArray[Any], n_tiles: int, n_parts: int, each: int) -> NDArray[np.uint8]:
    """Regroup numbers (rows, n_parts * each, ...) to bytes (row tiles, n_parts, 16 * row bytes)."""
    width = numbers.shape[2] * numbers.itemsize
    flat = np.ascontiguousarray(numbers).view(np.uint8).reshape(*numbers.shape[:2], width)
    full = np.zeros((ROWS * n_tiles, n_parts * each, width), np.uint8)
    full[: len(flat), : flat.shape[1]] = flat[:, : full.shape[1]]
    rows = full.reshape(n_tiles, ROWS, n_parts, each * width).transpose(0, 2, 1, 3)
    return rows.reshape(n_tiles, n_parts, ROWS * each * width)


def _unit_floats(form: MmaLayout, part: DecodedBlocks) -> NDArray[np.float16]:
    """Return the floats stored once per unit and row, (rows, units, 1 or 2)."""
    floats = [part.d] if part.m is None else [part.d, part.m]
    if not form.float_bytes:
        return np.zeros((len(part.d), 0, 0), np.float16)
    return np.stack([stored_floats("f16", f, base=False) for f in floats], axis=2)


def _entries(form: MmaLayout, given: CodecSpec, part: DecodedBlocks) -> NDArray[Any]:
    """Return the scales of sub-blocks as stored, (rows, sub-blocks, numbers)."""
    if form.scales == "unit":
        return np.zeros((len(part.d), 0, 0), np.uint8)
    per_d, per_s = given.block // form.sub_block, given.sub_block // form.sub_block
    d = np.repeat(part.d, per_d, axis=1)
    if form.scales in ("byte", "byte_min", "nibble_min"):
        return np.repeat(_integer_entries(form, part), per_s, axis=1)
    if form.scales.startswith("float"):
        return np.stack(_float_entries(form, given, part, d, per_s), axis=2)
    kinds = {"half": "f16", "half_min": "f16", "u8_pair": "u8"}
    numbers = [stored_floats(kinds.get(form.scales, form.scales), d, base=False)]
    if part.m is not None:
        m = np.repeat(part.m, per_d, axis=1)
        numbers.append(stored_floats(kinds[form.scales], m, base=True))
    return np.stack(numbers, axis=2)


def _integer_entries(form: MmaLayout, part: DecodedBlocks) -> NDArray[np.uint8]:
    """Return integer scales and mins, (rows, sub-blocks, 1 or 2)."""
    assert part.scales is not None
    scales = part.scales + np.int16(form.scale_zero)
    top = 15 if form.scales == "nibble_min" else 255
    if scales.size and not 0 <= scales.min() <= scales.max() <= top:
        raise Misfit("scales", f"integer scales must lie in 0..{top}")
    stored = scales.astype(np.uint8)
    if form.scales == "byte":
        return stored[..., None]
    assert part.mins is not None
    if form.scales == "byte_min":
        return np.stack([stored, part.mins], axis=2)
    if part.mins.size and part.mins.max() > 15:
        raise Misfit("scales", "mins must lie in 0..15")
    return (stored | part.mins << np.uint8(4))[..., None]


def _float_entries(
    form: MmaLayout, given: CodecSpec, part: DecodedBlocks, d: NDArray[np.float32], per_s: int
) -> list[NDArray[np.float32]]:
    """Return scale and, if the format has one, base of each sub-block in float32."""
    scale = d * np.float32(given.factor)
    if part.scales is not None:
        scale = scale * np.repeat(part.scales, per_s, axis=1).astype(np.float32)
    if given.base == "none":
        return [scale]
    assert part.m is not None
    base = np.repeat(part.m, given.block // form.sub_block, axis=1)
    if part.mins is not None:
        base = -base * np.repeat(part.mins, per_s, axis=1).astype(np.float32)
    return [scale, base]
