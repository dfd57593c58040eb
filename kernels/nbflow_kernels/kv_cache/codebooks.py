"""Codebook formats of the KV cache: Lloyd-Max levels of a Gaussian and a scale, in NumPy.

=======  ========  ===============================================================================
`lm4`    4.5 bits  16 levels: 32 codes of 4 bits behind a float16 scale, 18 bytes
`lm3`    3.5 bits  8 levels: the low 2 bits of 32 codes, then their high bits, 14 bytes
`lm2`    2.5 bits  4 levels: 32 codes of 2 bits, 10 bytes
=======  ========  ===============================================================================

Levels are those of least squared error for N(0, 1) (Max, IRE Trans. Inf. Theory 6, 1960, table I),
times `unit` and rounded to integers, which moves the error by less than 1 %.  A number is coded by
the level nearest to it in units of the root mean square of its block; the scale is then the factor
of least squares, ``<x, levels> / <levels, levels>``.  Rotated keys and values
(`nbflow_kernels.hadamard_transform`) are nearly Gaussian: this is TurboQuant without its sketch
(arXiv:2504.19874, algorithm 1), with a scale per block of 32 instead of one per vector.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
SCALE_BYTES = 2
LEAST_ENERGY = np.float32(1e-14)
"""Sum of squares below which a block is zero: its scale would round to 0 in float16."""


class Codebook(NamedTuple):
    """Levels of a codebook, symmetric about zero."""

    bits: int
    unit: int
    """Factor from standard deviations to levels."""
    positive: tuple[int, ...]
    """Positive levels, ascending."""

    @property
    def levels(self) -> NDArray[np.int32]:
        """Return the level of each code, ascending."""
        half = np.array(self.positive, np.int32)
        return np.concatenate([-half[::-1], half])

    @property
    def borders(self) -> NDArray[np.float32]:
        """Return the midpoints between levels, exact in float32."""
        return ((self.levels[1:] + self.levels[:-1]) / 2).astype(np.float32)

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block of 32 numbers."""
        return SCALE_BYTES + BLOCK_SIZE * self.bits // 8


CODEBOOKS = {
    "lm4": Codebook(4, 46, (6, 18, 30, 43, 58, 74, 95, 126)),
    "lm3": Codebook(3, 59, (14, 45, 79, 127)),
    "lm2": Codebook(2, 84, (38, 127)),
}
"""Name of a cache format to its codebook."""


def encode_codebook(x: NDArray[np.floating], name: str) -> NDArray[np.uint8]:
    """Return head vectors (..., D) as rows of bytes; the last block is padded by its last number.

    Sums are those of the kernels, float32 by halves: lanes i and i + 16, then i and i + 8, ...
    """
    book, D = CODEBOOKS[name], x.shape[-1]
    rows = np.asarray(x, np.float32)
    rows = np.concatenate([rows, rows[..., -1:].repeat(-D % BLOCK_SIZE, axis=-1)], axis=-1)
    blocks = rows.reshape(-1, BLOCK_SIZE)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        energy = _sum(blocks * blocks)
        finite, zero = np.isfinite(energy), energy < LEAST_ENERGY
        inverse = np.float32(book.unit) / np.sqrt(energy / np.float32(BLOCK_SIZE))
        inverse = np.where(finite & ~zero, inverse, np.float32(0))
        steps = np.where(finite[:, None], blocks * inverse[:, None], np.float32(0))
        codes = (steps[..., None] >= book.borders).sum(axis=-1, dtype=np.uint8)
        levels = book.levels[codes].astype(np.float32)
        scale = _sum(blocks * levels) / _sum(levels * levels)
        scale = np.where(zero, np.float32(0), np.where(finite, scale, np.float32(np.nan)))
        half = scale.astype(np.float16)
    out = np.concatenate([half.view(np.uint8).reshape(-1, 2), *_planes(codes, book.bits)], axis=1)
    return out.reshape(*x.shape[:-1], -1)


def decode_codebook(rows: NDArray[np.uint8], name: str) -> NDArray[np.float64]:
    """Return the numbers of rows of bytes (..., row), padding included: scale times level."""
    book = CODEBOOKS[name]
    blocks = np.ascontiguousarray(rows).reshape(-1, book.block_bytes)
    scale = blocks[:, :SCALE_BYTES].copy().view(np.float16).astype(np.float64)
    low_bits = 2 if book.bits == 3 else book.bits
    low_end = SCALE_BYTES + BLOCK_SIZE * low_bits // 8
    codes = _fields(blocks[:, SCALE_BYTES:low_end], low_bits)
    if book.bits > low_bits:
        codes = codes | _fields(blocks[:, low_end:], book.bits - low_bits) << low_bits
    with np.errstate(invalid="ignore"):  # signalling NaN
        values: NDArray[np.float64] = scale * book.levels[codes]
    return values.reshape(*rows.shape[:-1], -1)


def _sum(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return sums over the last axis by halves."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _planes(codes: NDArray[np.uint8], bits: int) -> list[NDArray[np.uint8]]:
    """Return the code bytes: fields of 4 or 2 bits, then a plane of high bits for 3."""
    if bits != 3:
        return [_pack(codes, bits)]
    return [_pack(codes & np.uint8(3), 2), _pack(codes >> np.uint8(2), 1)]


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack fields of `bits` bits into bytes, lowest first."""
    per_byte = 8 // bits
    fields = codes.reshape(len(codes), -1, per_byte).astype(np.uint16)
    shifts = bits * np.arange(per_byte, dtype=np.uint16)
    packed: NDArray[np.uint8] = (fields << shifts).sum(axis=-1).astype(np.uint8)
    return packed


def _fields(data: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Unpack fields of `bits` bits, lowest first."""
    shifts = bits * np.arange(8 // bits)
    fields = data[..., None].astype(np.int64) >> shifts & ((1 << bits) - 1)
    return fields.reshape(len(data), -1)
