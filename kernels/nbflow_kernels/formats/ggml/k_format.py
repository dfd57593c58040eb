"""K-quants: super-blocks of 256 weights whose sub-blocks have integer scales.

======  =========  ======================  =======================  ===============
format  sub-block  code                    scale, minimum           bits per weight
======  =========  ======================  =======================  ===============
q2_k    16         0 .. 3                  0 .. 15, 0 .. 15         2.625
q3_k    16         -4 .. 3                 -32 .. 31                3.4375
q4_k    32         0 .. 15                 0 .. 63, 0 .. 63         4.5
q5_k    32         0 .. 31                 0 .. 63, 0 .. 63         5.5
q6_k    16         -32 .. 31               -128 .. 127              6.5625
======  =========  ======================  =======================  ===============

weight = d * scale * code - dmin * minimum, with float16 `d` and `dmin` per super-block.  Both may
be negative.  Products are exact in float32, so a weight is rounded once.

Source: GGML, ggml-common.h and ggml-quants.c; the layout tables are in the formats' files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

SUPER = 256  # weights of a super-block
CHUNK = 1 << 22  # weights decoded at once: bounds the temporary arrays to some 30 MB


@dataclass(frozen=True, eq=False, repr=False)
class KQuantFormat(QuantFormat):
    """One K-quant; see the fields."""

    name: str
    block_bytes: int
    form: CodecSpec
    """What the kernels are told."""
    scale_top: int
    """Scales are 0 .. scale_top with minima, else -scale_top .. scale_top - 1."""
    d_at: int
    """Byte of `d` in the super-block; `dmin` follows it where there are minima."""
    unpack: Callable[[Bytes], tuple[Bytes, NDArray[np.int16], Bytes]]
    """Blocks (n, block_bytes) to codes (n, 256), scales and minima (n, sub-blocks), in NumPy."""
    integers_kernel: Callable[..., None]
    """Kernel ``(data, codes, scales, mins, start, stop)``: rows, through the scalar decoder."""
    code: Callable[..., Any]
    """Scalar decoder ``(row, at, i)`` of code i in the block at byte `at`, which the kernel is made
    of and CUDA kernels share; `scale` and `minimum` are those of sub-block i."""
    scale: Callable[..., Any]
    minimum: Callable[..., Any]
    pack_kernel: Callable[..., None]
    """Kernel ``(codes, scales, mins, params, data, start, stop)``: super-blocks to bytes."""
    block_size: int = SUPER

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return self.form

    @property
    def has_mins(self) -> bool:
        """Whether sub-blocks have minima."""
        return self.form.base == "min"

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a super-block."""
        return SUPER // self.form.sub_block

    def integers(self, data: Bytes) -> DecodedBlocks:
        """Return rows as integers; see `QuantFormat.integers`."""
        n_rows = len(data)
        blocks = data.shape[1] // self.block_bytes
        codes = np.empty((n_rows, blocks * SUPER), np.uint8)
        scales = np.empty((n_rows, blocks * self.sub_blocks), np.int16)
        mins = np.empty((n_rows, blocks * self.sub_blocks if self.has_mins else 0), np.uint8)
        parallel_for(self.integers_kernel, n_rows, 4.0 * codes.size, data, codes, scales, mins)
        d, dmin = self._params(data.reshape(-1, self.block_bytes))
        return DecodedBlocks(
            codes,
            d.reshape(n_rows, -1),
            dmin.reshape(n_rows, -1) if self.has_mins else None,
            scales,
            mins if self.has_mins else None,
        )

    def _params(self, blocks: Bytes) -> tuple[Floats, Floats]:
        """Return `d` and `dmin` (n,) of blocks (n, block_bytes); without minima, twice `d`."""
        at = (self.d_at, self.d_at + 2 if self.has_mins else self.d_at)
        d, dmin = (
            np.ascontiguousarray(blocks[:, i : i + 2]).view("<f2")[:, 0].astype(np.float32)
            for i in at
        )
        return d, dmin

    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Return the weights of blocks (n, block_bytes) as float32 (n, 256), in NumPy."""
        codes, scales, mins = self.unpack(blocks)
        d, dmin = (v[:, None] for v in self._params(blocks))
        with np.errstate(invalid="ignore", over="ignore"):  # bytes from a file may hold inf
            step = np.repeat(d * scales.astype(np.float32), self.form.sub_block, axis=1)
            values: Floats = step * (codes.astype(np.float32) - np.float32(self.form.zero))
            if self.has_mins:
                values -= np.repeat(dmin * mins.astype(np.float32), self.form.sub_block, axis=1)
        return values

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        step = max(1, CHUNK // max(out.shape[1], 1))
        for row in range(0, len(data), step):
            rows = self.integers(data[row : row + step])
            assert rows.scales is not None
            m, mins = rows.m, rows.mins
            if m is None or mins is None:
                m, mins = rows.d, np.empty((len(rows.codes), 0), np.uint8)
            parallel_for(
                _apply, len(rows.codes), 4.0 * rows.codes.size, rows.codes, rows.d, m, rows.scales,
                mins, self.form.zero, out[row : row + step],
            )  # fmt: skip


@jit.kernel(strict=True)
def _apply(codes, d, m, scales, mins, zero, out, start, stop):
    """Write d * scale * (code - zero) - m * min for rows of integers."""
    columns = out.shape[1]
    size = codes.shape[1] // scales.shape[1]
    sub_blocks = SUPER // size
    for row in range(start, stop):
        for j in range(-(-columns // size)):
            step = d[row, j // sub_blocks] * np.float32(scales[row, j])
            if mins.shape[1]:
                base = m[row, j // sub_blocks] * np.float32(mins[row, j])
                for i in range(j * size, min(j * size + size, columns)):
                    out[row, i] = step * np.float32(codes[row, i]) - base
            else:
                for i in range(j * size, min(j * size + size, columns)):
                    out[row, i] = step * np.float32(np.int32(codes[row, i]) - zero)


@jit.device_function(inline="always")
def decode_rows(
    code, scale, minimum, sub_block, block_bytes, data, codes, scales, mins, start, stop
):
    """Write the integers of rows [start, stop).

    ``code(row, at, i)``, ``scale(row, at, j)`` and ``minimum(row, at, j)`` decode one of the block
    at byte `at`.
    """
    for r in range(start, stop):
        row = data[r]
        for b in range(data.shape[1] // block_bytes):
            at, first = b * block_bytes, b * (256 // sub_block)
            for j in range(256 // sub_block):
                scales[r, first + j] = scale(row, at, j)
                if mins.shape[1]:
                    mins[r, first + j] = minimum(row, at, j)
            for i in range(256):
                codes[r, b * 256 + i] = code(row, at, i)


@jit.device_function(inline="always")
def no_minimum(row, at, j):
    """Return the minimum of a format without minima."""
    return 0


@jit.device_function(inline="always")
def put_params(params, count, at, block):
    """Write the first `count` float16 of a super-block's (d, dmin) to its bytes."""
    for k in range(count):
        block[at + 2 * k] = params[k] & 255
        block[at + 2 * k + 1] = params[k] >> 8


@jit.device_function(inline="always")
def quarter(row, at, i):
    """Return 2-bit value `i` of 256 at byte `at`: of each 128, bits 0-1 hold the first 32, ..."""
    return (row[at + (i >> 7 << 5) + (i & 31)] >> (i >> 5 << 1 & 6)) & 3


@jit.device_function(inline="always")
def put_quarters(codes, block, at, shift):
    """Write bits `shift` and `shift` + 1 of 256 codes so that `quarter` finds them."""
    for half in range(2):
        for i in range(32):
            c = half * 128 + i
            block[at + half * 32 + i] = (
                ((codes[c] >> shift) & 3)
                | (((codes[c + 32] >> shift) & 3) << 2)
                | (((codes[c + 64] >> shift) & 3) << 4)
                | (((codes[c + 96] >> shift) & 3) << 6)
            )


def unpack_quarters(data: Bytes) -> Bytes:
    """Return the 2-bit values (n, 256) of bytes (n, 64)."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    halves = data.reshape(-1, 2, 1, 32)
    return ((halves >> shifts) & np.uint8(3)).reshape(-1, SUPER)
