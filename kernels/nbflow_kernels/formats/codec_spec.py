"""What a weight format is, as data: the bytes of a block, and the formula of its weights.

`FieldTable` says where the bits of each number lie.  `CodecSpec` says what the numbers mean.  All
block formats decode to one formula,

    weight = d * factor * scale * value(code) + base,

with an integer `code` per weight, an integer `scale` per sub-block, and floats `d` (and what `base`
is made of) per block.  The layouts for computing are made from this form, so a new format needs no
kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

PAIR_RADIX = 11
"""Levels of pairs that the layouts for computing keep as pairs; others become whole bits."""


@dataclass(frozen=True)
class Plane:
    """Some bits of each of a run of numbers.

    Bits `shift` .. ``shift + bits - 1`` of number ``first + i`` lie in byte
    ``at + i // (stride * per_group) * step + i % stride`` of the block, from bit
    ``bit + pitch * (i // stride % per_group)`` on; bits from 8 on are in the bytes behind it.
    """

    at: int
    """First byte."""
    bits: int
    """Bits of a number, 1 to 16."""
    shift: int = 0
    """Lowest bit of the number that lies here."""
    stride: int = 1
    """Neighbouring numbers whose bits have the same position in neighbouring bytes; a power of
    two."""
    bit: int = 0
    """Bit of the byte at which the first number's bits begin."""
    per_group: int = 0
    """Numbers of a byte, or of a little-endian word of 2 or 4 bytes; a power of two.  0: as many as
    fit in a byte."""
    first: int = 0
    """The first number that has bits here."""
    count: int = 0
    """Numbers that have bits here; 0: all from `first` on."""
    step: int = 0
    """Bytes from one group of ``stride * per_group`` numbers to the next; 0: no gaps."""
    pitch: int = 0
    """Bits from one number of a byte or word to the next; 0: no gaps."""

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
        """Bytes that the numbers of a group share: 1, 2 or 4."""
        n_bits = self.bit + self.pitch * (self.per_group - 1) + self.bits
        return 1 << max(0, (n_bits - 1).bit_length() - 3)

    def span(self, n: int) -> int:
        """Return the numbers that have bits here, of a field of `n`."""
        return self.count or n - self.first

    def n_groups(self, n: int) -> int:
        """Return the groups of numbers, of a field of `n`."""
        return -(-self.span(n) // (self.stride * self.per_group))

    def n_bytes(self, n: int) -> int:
        """Return the bytes from the first to the last of the plane, of a field of `n` numbers."""
        return (self.n_groups(n) - 1) * self.step + self.stride + self.word_bytes - 1

    def positions(self, n: int) -> NDArray[np.int64]:
        """Return the bit of the block at which each number's bits begin, of a field of `n`."""
        i = np.arange(self.span(n))
        byte = self.at + i // (self.stride * self.per_group) * self.step + i % self.stride
        return 8 * byte + self.bit + self.pitch * (i // self.stride % self.per_group)


@dataclass(frozen=True)
class Field:
    """Numbers of one kind in a block: codes, scales, minima, or floats as their bits."""

    name: str
    """"code", "scale", "min", "base", "d", "dmin"; on grids "point" and "sign"."""
    n: int
    planes: tuple[Plane, ...]
    signed: bool = False
    """Whether they are stored as two's complement; a number counts from the lowest one."""
    radix: int = 0
    """Not 0: numbers are pairs' halves 0 .. radix - 1; planes hold ``x + radix * y``."""
    factor: int = 1
    """An integer scale is ``factor * number + offset``."""
    offset: int = 0

    @property
    def n_stored(self) -> int:
        """Stored numbers: half of the codes where these are pairs."""
        return self.n // 2 if self.radix else self.n

    @property
    def bits(self) -> int:
        """Bits of a stored number."""
        return max(plane.shift + plane.bits for plane in self.planes)

    @property
    def n_values(self) -> int:
        """Values of a number."""
        return self.radix or 1 << self.bits

    @property
    def flip(self) -> int:
        """Bits of a stored number that are inverted."""
        return 1 << self.bits - 1 if self.signed else 0

    def positions(self) -> NDArray[np.int64]:
        """Return where the bits of each stored number lie, (n_stored, bits), as bits of a block."""
        found = np.full((self.n_stored, self.bits), -1, np.int64)
        for plane in self.planes:
            rows = slice(plane.first, plane.first + plane.span(self.n_stored))
            begin = plane.positions(self.n_stored)
            for bit in range(plane.bits):
                found[rows, plane.shift + bit] = begin + bit
        return found


@dataclass(frozen=True)
class FieldTable:
    """All bytes of a block, by field: the one place that says where a format's bits lie.

    `nbflow_kernels.formats.bit_fields` derives from it packing and unpacking, the decoders of CPU
    and CUDA kernels, the map of bits of CUDA encoders, and the table of bytes of the format's
    docstring; the key/value cache takes its rows from it.

    Raises
    ------
    UsageError
        If a bit of a block belongs to two numbers, or to none.
    """

    block_size: int
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        bits = np.concatenate([field.positions().ravel() for field in self.fields])
        n_bits = sum(p.bits * p.span(f.n_stored) for f in self.fields for p in f.planes)
        once = n_bits == len(bits)  # a bit of a number lies in one plane
        if not once or not np.array_equal(np.sort(bits), np.arange(8 * self.block_bytes)):
            raise UsageError(f"the fields of a block must cover each of its bits once: {self}")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return max(p.at + p.n_bytes(f.n_stored) for f in self.fields for p in f.planes)

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def __contains__(self, name: str) -> bool:
        return any(field.name == name for field in self.fields)

    def at(self, name: str) -> int:
        """Return the first byte of a field."""
        return min(plane.at for plane in self[name].planes)


def float16(name: str, at: int) -> Field:
    """Return the field of one float16."""
    return Field(name, 1, (Plane(at, 16),))


@dataclass(frozen=True)
class CodecSpec:
    """The part of the formula that is the same for all blocks of a format."""

    block: int
    """Weights that share `d`."""
    sub_block: int
    """Weights that share `scale` (and `min`); `block` where there is only one scale."""
    code_bits: int
    """Bits of a code, 1 to 8; codes are 0 .. 2**code_bits - 1 (or fewer)."""
    zero: int = 0
    """Without `values`: value(code) = code - zero."""
    values: tuple[int, ...] | None = None
    """With it: value(code) = values[code], each -128..127, 2**code_bits of them."""
    factor: float = 1.0
    """A power of two; ``d * factor * scale`` is exact in float32."""
    scales: bool = False
    """Whether there are integer scales (else 1), -128..255."""
    base: str = "none"
    """"none": base = 0; "d": base = `m` itself; "min": base = -m * min, with an integer min 0..255
    per sub-block."""
    pairs: bool = False
    """Whether codes are 0..10 and stored as c = x + 11 * y, so that two take 7 bits."""
    scale_bits: int = 8
    """4, if scales and mins are 0..15 and stored in a byte together; else 8."""
    d_type: str = "f16"
    """How `d` and `m` are stored: "f16"; "f32"; "e8m0": a power of two, 2**-128 to 2**127; "e4m3":
    half of an unsigned float of 4 bits of exponent (bias 7) and 3 of mantissa; "u8": d = u / 1000
    and m = v / 100 - 1 in float32."""


@dataclass(frozen=True)
class DecodedBlocks:
    """Rows of weights in that form; K is the padded number of columns."""

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
    """Return the weights (rows, K), rounded once to float32: the formula, as it stands above."""
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
