"""MMA layout of packed weights on CUDA: units of 16 rows and 256 columns in fragment order.

A *row tile* is 16 rows, the M of a tensor-core MMA.  Row tiles, and the units of a row tile, are
contiguous.  A unit consists of

============  =====================================================================================
floats        `d` (and `d` of the mins) of each of the 16 rows as float16, if one per unit; of a
              trellis `d`, and the bits of the stream before the second chunk
chunks        two of 128 columns, each with
 scales       the numbers of the chunk's sub-blocks, row by row, in a form of `SCALES`
 codes        32-bit words of the 32 lanes of a warp
============  =====================================================================================

Lane ``4 * g + t`` holds rows g and g + 8 of the A fragment: *slot* ``2 * step + j`` of a tile of 64
columns is the pair of columns ``16 * step + 8 * j + 2 * t + (0, 1)``, one in each 16-bit half of a
word.  A bit field of up to 10 bits at the low end of a half is a subnormal float16,
code * 2**(position - 24): one mask decodes two weights, and the power of two is folded into the
activations.  `layout_mma_codes.FIELDS` maps code bits to words.

Codes of a codebook of floats are indices of 4 bits, in the same fields; the codebook lies across
the lanes of a warp, which look values up by shuffles.  The stream of a trellis is stored as it is:
word ``4 * i + t`` of a row's chunk in lane ``4 * g + t``, and the four lanes read it together.

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
from nbflow_kernels.formats import layout_mma_codes, trellis_code
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks
from nbflow_kernels.formats.layout_cpu import Misfit, stored_floats
from nbflow_kernels.formats.layout_mma_codes import (
    BITS,
    E2M1,
    E2M1_VALUES,
    FLOATS,
    PAIRS,
    POSITIONS,
    TABLE8,
    TABLE16,
    TRELLIS,
)
from nbflow_kernels.formats.registry import QuantFormat

ROWS, CHUNK = layout_mma_codes.ROWS, layout_mma_codes.CHUNK
UNIT = 2 * CHUNK
CHUNK_OF_WEIGHTS = 1 << 22  # weights packed at once: bounds the temporary arrays

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


@dataclass(frozen=True)
class MmaLayout:
    """Compile-time parameters of the CUDA kernels; formats with equal ones share kernels."""

    kind: int
    """`BITS`, `PAIRS` (x + 11 * y in 7 bits), `TABLE8` or `TABLE16` (codebook lookup), `E2M1`
    (4-bit floats, twice their value), `FLOATS` (codebook of 16 floats) or `TRELLIS` (bits of a
    stream whose states index a codebook of 128)."""
    bits: int
    """Bits per code, 1 to 6 or 8; 3 and 4 with codebooks; 7 per pair code; 2 to 4 of a stream."""
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
    values: tuple[int, ...] | tuple[float, ...]
    """Codebook: 8 or 16 integers, 16 floats, the codes of a trellis' 128 indices, or empty."""

    @property
    def takes_int8(self) -> bool:
        """False for a codebook of floats: int8 products would be those of another codebook."""
        return self.kind != FLOATS

    @property
    def integer_sums(self) -> bool:
        """True if integer dot products need at most the tensor-core correction for mins or zeros.

        See `decode_mma.cuh`.
        """
        if not self.takes_int8:
            return False
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
        each = 4 if self.kind == TRELLIS else UNIT_FLOAT_BYTES[SCALES[self.scales]]
        return ROWS * each

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
        for i, word in enumerate(self._table().view("<u4")):
            found[f"TABLE_{i}"] = f"0x{word:08x}u"
        lanes = np.zeros(1, "<u4")
        if self.kind == FLOATS:
            lanes = np.array(self.values, "<f4").view("<u4")
        elif self.kind == TRELLIS:
            lanes = np.array(self.values, np.uint8).view("<u4")
        found["LANE_WORDS"] = ",".join(f"0x{word:08x}u" for word in lanes)
        return found

    def _table(self) -> NDArray[np.uint8]:
        """Return the 16 bytes of a table that is looked up by byte permutations."""
        if self.kind == TRELLIS:
            return trellis_code.flips()
        if self.kind in (TABLE8, TABLE16):
            return np.resize(np.array(self.values, np.int64) + int(self.zero), 16).astype(np.uint8)
        return np.zeros(16, np.uint8)


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


def _codes(
    form: CodecSpec,
) -> tuple[int, int, float, float, tuple[int, ...] | tuple[float, ...]]:
    """Return kind, bits, zero, step between values, and codebook of an integer form."""
    if form.trellis:
        levels = tuple(trellis_code.levels(form.trellis).tolist())
        return TRELLIS, form.trellis, 0.0, 1.0, levels  # decoded to code - zero
    bits = 8 if form.code_bits == 7 else form.code_bits
    if form.pairs:
        return PAIRS, 7, float(form.zero), 1.0, ()
    if form.values is None:
        return BITS, bits, float(form.zero), 1.0, ()
    if form.has_float_values:
        step = 2.0 ** np.floor(np.log2(np.abs(form.values).max()))  # the largest is in [1, 2)
        return FLOATS, 4, 0.0, float(step), tuple(float(v / step) for v in form.values)
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
    if form.has_float_values:
        return ("float" if form.base == "none" else "float_min"), 0
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
        part = format.stored_integers(data[row : row + step])
        tiles = out[row // ROWS : row // ROWS + -(-len(part.codes) // ROWS)]
        numbers = _entries(form, format.integer_form, part)
        scales = _rows(numbers, len(tiles), n_chunks, CHUNK // form.sub_block)
        floats = _rows(_unit_floats(form, part), len(tiles), -(-n_chunks // 2), 1)
        padded = _padded(part.codes, ROWS * len(tiles), CHUNK * n_chunks)
        codes = layout_mma_codes.chunk_bytes(form.kind, form.bits, padded)
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
    numbers = [stored_floats("f16", f, base=False) for f in floats]
    if form.kind == TRELLIS:
        numbers.append(_bits_before(part.codes, form.bits))
    return np.stack(numbers, axis=2)


def _bits_before(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint16]:
    """Return the bits of a unit's states from before its second chunk, (rows, units)."""
    n = trellis_code.STATE_BITS // bits - 1
    before = codes.reshape(len(codes), -1, UNIT)[:, :, CHUNK - n : CHUNK].astype(np.uint16)
    shifts = bits * np.arange(n, dtype=np.uint16)
    found: NDArray[np.uint16] = np.bitwise_or.reduce(before << shifts, axis=2)
    return found


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
