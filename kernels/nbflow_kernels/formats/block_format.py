"""Block formats that are described by their integer form: one class for all of them.

A format module brings the layout twice, as scalar decoders for kernels and as NumPy code, and the
this module makes a `QuantFormat` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.bit_fields import BlockFields
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks
from nbflow_kernels.formats.codec_spec import weights as decoded
from nbflow_kernels.formats.registry import Bytes, Floats, Halves, QuantFormat

CHUNK = 1 << 22  # weights decoded or encoded at once: bounds the temporary arrays to some 50 MB
DECODE_COST = 8.0  # operations a weight costs, for the choice of thread count

Scales = NDArray[np.int16]


@jit.device_function(inline="always")
def decode_rows(code, scale, block, n_scales, block_bytes, data, table, codes, scales, start, stop):
    """Write codes and scales of rows [start, stop).

    ``code(row, at, i, table)`` decodes weight `i` of the block at byte `at`, ``scale(row, at, s)``
    the scale of its sub-block `s`.
    """
    for r in range(start, stop):
        row, out, out_scales = data[r], codes[r], scales[r]
        for b in range(data.shape[1] // block_bytes):
            at = b * block_bytes
            for group in range(0, block, 8):
                for j in range(8):  # unrolled: what a group of 8 has in common is computed once
                    out[b * block + group + j] = code(row, at, group + j, table)
            for s in range(n_scales):
                out_scales[b * n_scales + s] = scale(row, at, s)


@jit.device_function(inline="always")
def no_scale(row, at, s):
    """Return the scale of a format without integer scales."""
    return 1


@dataclass(frozen=True, eq=False, repr=False)
class BlockFormat(QuantFormat):
    """A block format made of its integer form; see the fields."""

    name: str
    block_size: int
    block_bytes: int
    form: CodecSpec
    """The format's formula."""
    unpack: Callable[[Bytes], tuple[Bytes, Scales | None]]
    """Blocks (n, block_bytes) to codes (n, block_size) and integer scales (n, sub-blocks), NumPy;
    scales are None where the form has none."""
    steps: Callable[[Bytes], Floats]
    """Blocks (n, block_bytes) to `d`, float32 (n, block_size / form.block)."""
    kernel: Callable[..., None]
    """Kernel ``(data, table, codes, scales, start, stop)`` through the scalar decoders."""
    code: Callable[..., Any]
    """Scalar decoder ``(row, at, i, table)`` of code i in the block at byte `at`, which the kernel
    is made of and CUDA kernels share."""
    scale: Callable[..., Any]
    """The same ``(row, at, s)`` of the scale of sub-block s."""
    table: NDArray[Any]
    """What the scalar decoder looks up, e.g. a grid."""
    fields: BlockFields
    """The numbers that encoders on CUDA devices choose for a block, and how they make its bytes."""
    d_at: int = 0
    """Byte of a float16 `d` in the block."""
    pack_codes: Callable[[Bytes, Halves], Bytes] | None = None
    """Codes and d of rows to rows of bytes, where `fields` do not take codes."""
    d_bits: Callable[..., Any] | None = None
    """Scalar decoder ``(row, at)`` of its bits, where they are not in one place."""

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return self.form

    def integers(self, data: Bytes) -> DecodedBlocks:
        """Return rows (rows, row bytes) in the integer form, through the scalar decoders."""
        form, n_rows = self.form, len(data)
        n_blocks = data.shape[1] // self.block_bytes
        width = n_blocks * self.block_size
        codes = np.empty((n_rows, width), np.uint8)
        scales = np.empty((n_rows, width // form.sub_block if form.scales else 0), np.int16)
        rows = np.ascontiguousarray(data)
        parallel_for(self.kernel, n_rows, DECODE_COST * codes.size, rows, self.table, codes, scales)
        d = self.steps(rows.reshape(-1, self.block_bytes)).reshape(n_rows, width // form.block)
        return DecodedBlocks(codes, d, scales=scales if form.scales else None)

    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Return the weights (n, block_size) of blocks: the integer form's formula."""
        codes, scales = self.unpack(blocks)
        d = self.steps(blocks).reshape(len(blocks), -1)
        with np.errstate(invalid="ignore", over="ignore"):  # bytes from a file may hold inf
            return decoded(self.form, DecodedBlocks(codes, d, scales=scales))

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        form = self.form
        values = value_table(form)
        step = max(1, CHUNK // max(out.shape[1], 1))
        for row in range(0, len(data), step):
            rows = self.integers(data[row : row + step])
            scales = rows.scales if rows.scales is not None else np.empty((0, 0), np.int16)
            parallel_for(
                _apply, len(rows.codes), 2.0 * rows.codes.size, rows.codes, rows.d, scales, values,
                form.block, form.sub_block, form.factor, out[row : row + step],
            )  # fmt: skip


def value_table(form: CodecSpec) -> Floats:
    """Return value(code) for all codes of a form."""
    if form.values is not None:
        return np.array(form.values, np.float32)
    return np.arange(-form.zero, 2**form.code_bits - form.zero, dtype=np.float32)


def half_steps(at: int) -> Callable[[Bytes], Floats]:
    """Return the function that reads the float16 scale at byte `at` of blocks (n, bytes)."""

    def steps(blocks: Bytes) -> Floats:
        stored = np.ascontiguousarray(blocks[:, at : at + 2])
        return stored.view("<f2").astype(np.float32)

    return steps


@jit.kernel
def _apply(codes, d, scales, values, block, sub_block, factor, out, start, stop):
    """Write d * factor * scale * value(code); every product but the last is exact."""
    for row in range(start, stop):
        for s in range((out.shape[1] + sub_block - 1) // sub_block):
            first = s * sub_block
            step = d[row, first // block] * np.float32(factor)
            if len(scales):
                step *= np.float32(scales[row, s])
            for column in range(first, min(first + sub_block, out.shape[1])):
                out[row, column] = step * values[codes[row, column]]
