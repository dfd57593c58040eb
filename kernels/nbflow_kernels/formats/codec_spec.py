"""Declarative description of weight formats: the bit layout of a block and the decode formula.

`FieldTable` declares where the bits of each number lie, `CodecSpec` the formula

    weight = d * factor * scale * value(code) + base

with an integer `code` per weight, an integer `scale` per sub-block, and floats `d` and `m` (for
`base`) per block.  Both packed layouts, `layout_cpu` and `layout_mma`, are made from this form, so
a new format needs no kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

ReadRows = Callable[[int, int], NDArray[Any]]
"""``rows(start, stop)`` returns the storage bytes of rows [start, stop): (rows, row bytes).

They are used before the next call in the same thread; several threads call at once."""
PAIR_RADIX = 11
"""Radix of the pair codes that the packed layouts keep as pairs; other pair codes are split."""


@dataclass(frozen=True)
class Plane:
    """Bit plane of a field: a range of bits of consecutive numbers.

    Bits `shift` .. ``shift + bits - 1`` of number ``first + i`` are stored from bit
    ``bit + pitch * (i // stride % per_group)`` of byte
    ``at + i // (stride * per_group) * step + i % stride`` on; bits above 7 continue in the
    following bytes.

    Examples
    --------
    The 5.5-bit format q5h splits its 32 pair codes of 11 bits into four planes.  The highest one
    packs bit 10 of 8 codes into a byte, the lowest one bits 0-3 of 2 codes:

    >>> Plane(4, 1, shift=10).positions(32)[:3].tolist()  # bits 0, 1, 2 of byte 4
    [32, 33, 34]
    >>> Plane(32, 4).positions(32)[:3].tolist()  # bits 0 and 4 of byte 32, bit 0 of byte 33
    [256, 260, 264]
    """

    at: int
    """Offset of the first byte in the block."""
    bits: int
    """Bits per number, 1 to 16."""
    shift: int = 0
    """Lowest bit of the number that the plane stores."""
    stride: int = 1
    """Consecutive numbers at the same bit position of consecutive bytes; a power of two."""
    bit: int = 0
    """Bit offset of the first number in its byte."""
    per_group: int = 0
    """Numbers per byte, or per little-endian word of 2 or 4 bytes; a power of two.  0: as many as
    fit in a byte."""
    first: int = 0
    """Index of the first number with bits in the plane."""
    count: int = 0
    """Count of numbers with bits in the plane; 0: all from `first` on."""
    step: int = 0
    """Bytes between groups of ``stride * per_group`` numbers; 0: contiguous."""
    pitch: int = 0
    """Bits between numbers of a byte or word; 0: contiguous."""

    def __post_init__(self) -> None:
        pitch = self.pitch or self.bits
        fit = max(1, (8 - self.bit - self.bits) // pitch + 1)
        per_group = self.per_group or 1 << fit.bit_length() - 1
        object.__setattr__(self, "pitch", pitch)
        object.__setattr__(self, "per_group", per_group)
        object.__setattr__(self, "step", self.step or self.stride * self.word_bytes)
        if self.stride & self.stride - 1 or per_group & per_group - 1:
            raise UsageError(f"a plane's stride and numbers per group are powers of two: {self}")
        if self.word_bytes > 4 or (self.stride > 1 and self.word_bytes > 1):
            raise UsageError(f"a plane's words have up to 4 bytes, and with a stride one: {self}")

    @property
    def word_bytes(self) -> int:
        """Bytes of a word of `per_group` numbers: 1, 2 or 4."""
        n_bits = self.bit + self.pitch * (self.per_group - 1) + self.bits
        return 1 << max(0, (n_bits - 1).bit_length() - 3)

    def span(self, n: int) -> int:
        """Return the count of numbers in the plane, for a field of `n` numbers."""
        return self.count or n - self.first

    def n_groups(self, n: int) -> int:
        """Return the number of groups, for a field of `n` numbers."""
        return -(-self.span(n) // (self.stride * self.per_group))

    def n_bytes(self, n: int) -> int:
        """Return the extent in bytes, first to last, for a field of `n` numbers."""
        return (self.n_groups(n) - 1) * self.step + self.stride + self.word_bytes - 1

    def positions(self, n: int) -> NDArray[np.int64]:
        """Return the bit offset in the block of each number, for a field of `n` numbers."""
        i = np.arange(self.span(n))
        byte = self.at + i // (self.stride * self.per_group) * self.step + i % self.stride
        return 8 * byte + self.bit + self.pitch * (i // self.stride % self.per_group)


@dataclass(frozen=True)
class Field:
    """Array of numbers in a block: codes, integer scales, minima, or floats as raw bits.

    Examples
    --------
    The codes of the 5.5-bit format q5h: 64 weights of 45 levels, stored as 32 pair codes
    ``x + 45 * y`` of 11 bits.

    >>> planes = (Plane(4, 1, shift=10), Plane(8, 2, shift=8), Plane(16, 4, shift=4), Plane(32, 4))
    >>> code = Field("code", 64, planes, radix=45)
    >>> code.n_stored, code.bits, code.n_values
    (32, 11, 45)
    """

    name: str
    """"code", "scale", "min", "base", "d", "dmin"; on grids "point" and "sign"."""
    n: int
    """Count of numbers per block."""
    planes: tuple[Plane, ...]
    signed: bool = False
    """Store two's complement; unpacked numbers are unsigned, 0 for the lowest value."""
    radix: int = 0
    """Radix of pair codes: planes store ``x + radix * y`` of two numbers in 0 .. radix - 1; 0: no
    pairs."""
    factor: int = 1
    """Integer scale = ``factor * number + offset``."""
    offset: int = 0

    @property
    def n_stored(self) -> int:
        """Count of stored numbers: pair codes count once."""
        return self.n // 2 if self.radix else self.n

    @property
    def bits(self) -> int:
        """Bits per stored number."""
        return max(plane.shift + plane.bits for plane in self.planes)

    @property
    def n_values(self) -> int:
        """Count of distinct values of a number."""
        return self.radix or 1 << self.bits

    @property
    def flip(self) -> int:
        """XOR mask between stored and unpacked numbers: the sign bit of signed fields."""
        return 1 << self.bits - 1 if self.signed else 0

    def positions(self) -> NDArray[np.int64]:
        """Return the bit offsets (n_stored, bits) in the block of each stored number."""
        found = np.full((self.n_stored, self.bits), -1, np.int64)
        for plane in self.planes:
            rows = slice(plane.first, plane.first + plane.span(self.n_stored))
            begin = plane.positions(self.n_stored)
            for bit in range(plane.bits):
                found[rows, plane.shift + bit] = begin + bit
        return found


@dataclass(frozen=True)
class FieldTable:
    """Byte layout of a block: the single declaration of a format's bit packing.

    `nbflow_kernels.formats.bit_fields` derives from it packing, unpacking, the reads of CPU
    kernels, the bit map of the CUDA quantizers and the byte tables of docs/formats.md;
    `cuda_dequantize` the decoder on CUDA; the KV cache takes its row layout from it.

    Raises
    ------
    UsageError
        If a bit of the block belongs to two numbers, or to none.

    Examples
    --------
    The 5.5-bit format q5h: float16 base and scale, then 64 codes as 11-bit pair codes.

    >>> planes = (Plane(4, 1, shift=10), Plane(8, 2, shift=8), Plane(16, 4, shift=4), Plane(32, 4))
    >>> code = Field("code", 64, planes, radix=45)
    >>> table = FieldTable(64, (float16("base", 0), float16("scale", 2), code))
    >>> table.block_bytes, table.at("code")
    (48, 4)
    """

    block_size: int
    """Weights per block."""
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        bits = np.concatenate([field.positions().ravel() for field in self.fields])
        n_bits = sum(p.bits * p.span(f.n_stored) for f in self.fields for p in f.planes)
        once = n_bits == len(bits)  # a bit of a number lies in one plane
        if not once or not np.array_equal(np.sort(bits), np.arange(8 * self.block_bytes)):
            raise UsageError(f"the fields of a block must cover each of its bits once: {self}")

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return max(p.at + p.n_bytes(f.n_stored) for f in self.fields for p in f.planes)

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def __contains__(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)

    def at(self, name: str) -> int:
        """Return the offset of the first byte of a field."""
        return min(plane.at for plane in self[name].planes)


def float16(name: str, at: int) -> Field:
    """Return a field of one float16 at byte `at`."""
    return Field(name, 1, (Plane(at, 16),))


@dataclass(frozen=True)
class CodecSpec:
    """Constants of a format's decode formula."""

    block: int
    """Weights that share `d`."""
    sub_block: int
    """Weights that share `scale` and `min`; equals `block` without integer scales."""
    code_bits: int
    """Bits per code, 1 to 8; codes are at most 2**code_bits - 1."""
    zero: int = 0
    """value(code) = code - zero, without `values`."""
    values: tuple[int, ...] | tuple[float, ...] | None = None
    """Codebook: value(code) = values[code]; 2**code_bits integers in -128..127, or 16 floats."""
    factor: float = 1.0
    """Power of two; ``d * factor * scale`` is exact in float32."""
    scales: bool = False
    """Sub-blocks have integer scales, -128..255; without them scale = 1."""
    base: str = "none"
    """"none": base = 0; "d": base = m; "min": base = -m * min, with an integer min 0..255 per
    sub-block."""
    pairs: bool = False
    """Codes are 0..10 and stored as pair codes x + 11 * y, two weights in 7 bits."""
    scale_bits: int = 8
    """4 if scales and mins are 0..15 and share a byte, 6 if scales are -32..31 (without mins),
    else 8."""
    d_type: str = "f16"
    """Type of `d` and `m`: "f16"; "f32"; "e8m0", a power of two, 2**-128 to 2**127; "e4m3", half of
    an unsigned float with 4 exponent bits (bias 7) and 3 mantissa bits; "u8", d = u / 1000 and
    m = v / 100 - 1 in float32."""
    trellis: int = 0
    """Stored bits per weight of codes that are states of a bit stream (`trellis_code`), whose
    decoded codes have 8 bits; 0: codes are stored one by one."""

    @property
    def has_float_values(self) -> bool:
        """True if the codebook has floats, which int8 products cannot hold."""
        return has_floats(self.values)


def has_floats(values: tuple[int, ...] | tuple[float, ...] | None) -> bool:
    """Return whether a codebook has numbers that are not integers."""
    return values is not None and any(isinstance(value, float) for value in values)


@dataclass(frozen=True)
class DecodedBlocks:
    """Unpacked integers and floats of rows of weights; K is the padded number of columns."""

    codes: NDArray[np.uint8]
    """(rows, K)."""
    d: NDArray[np.float32]
    """(rows, K / block)."""
    m: NDArray[np.float32] | None = None
    """(rows, K / block); see `CodecSpec.base`."""
    scales: NDArray[np.int16] | None = None
    """(rows, K / sub_block)."""
    mins: NDArray[np.uint8] | None = None
    """(rows, K / sub_block)."""


def weights(form: CodecSpec, rows: DecodedBlocks) -> NDArray[np.float32]:
    """Evaluate the decode formula in float64; return weights (rows, K), rounded once to float32."""
    if form.values is None:
        value: Any = rows.codes.astype(np.float64) - form.zero
    else:
        value = np.array(form.values, np.float64)[rows.codes]
    step = np.repeat(rows.d.astype(np.float64), form.block // form.sub_block, axis=1) * form.factor
    if rows.scales is not None:
        step = step * rows.scales
    result = np.repeat(step, form.sub_block, axis=1) * value
    if rows.m is not None:
        base = np.repeat(rows.m.astype(np.float64), form.block // form.sub_block, axis=1)
        if rows.mins is not None:
            base = -base * rows.mins
        result = result + np.repeat(base, form.sub_block, axis=1)
    rounded: NDArray[np.float32] = result.astype(np.float32)
    return rounded
