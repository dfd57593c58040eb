"""Formats whose weight is ``base + scale * (code - zero)``, with one base and scale per block.

``zero`` belongs to the format: 0 if it stores a base, else the code of weight 0.

The decode formula is evaluated with one rounding to float32.  For float16 parameters the product
has at most 11 + 8 bits, so a fused and an unfused float32 evaluation agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.bit_fields import pack_blocks, unpack_field
from nbflow_kernels.formats.block_format import CHUNK, FieldFormat
from nbflow_kernels.formats.codec_spec import PAIR_RADIX, CodecSpec
from nbflow_kernels.formats.registry import Bytes, Floats

F16_PAIR = 0
"""Base and scale, float16 each."""
F16_SCALE = 1
"""A scale, float16, which may be negative, and no base."""
U8_PAIR = 2
"""Scale u / 1000 and base v / 100 - 1, uint8 each."""

RANGE, MIDRISE, ABSMAX, GGML_EXTREME, GGML_RANGE, GGML_ABSMAX = range(6)
"""Rules of published quantizers.  Inferflow's: `RANGE`, base = min and scale = range / divisor;
`MIDRISE`, the middles of `n_codes` equal parts of the range; `ABSMAX`, scale = max|x| / divisor.  A
scale below 1e-5 gives codes 0.  GGML's: `GGML_EXTREME`, the weight of largest magnitude gets code
0; `GGML_RANGE` and `GGML_ABSMAX` as above, where only a scale of 0 gives codes 0."""


@dataclass(frozen=True, eq=False, repr=False)
class AffineFormat(FieldFormat):
    """One block format of the family.

    Its fields are "code", "scale" and, if any, "base": float16, or both a byte.
    """

    rule: int
    """Rule by which the published quantizer finds base and scale, one of those above."""
    divisor: float
    """The published scale is the block's range, or largest magnitude, divided by this."""
    zero: int = 0
    """Without a base: the code of weight 0."""

    @property
    def n_codes(self) -> int:
        """Codes the decoder understands, 0 .. n_codes - 1."""
        return self.fields["code"].n_values

    @cached_property
    def parameters(self) -> int:
        """How base and scale are stored: F16_PAIR, F16_SCALE or U8_PAIR."""
        if "base" not in self.fields:
            return F16_SCALE
        return F16_PAIR if self.fields["scale"].bits == 16 else U8_PAIR

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return CodecSpec(
            block=self.block_size,
            sub_block=self.block_size,
            code_bits=(self.n_codes - 1).bit_length(),
            zero=self.zero,
            base="none" if self.parameters == F16_SCALE else "d",
            pairs=self.fields["code"].radix == PAIR_RADIX,
            d_type="u8" if self.parameters == U8_PAIR else "f16",
        )

    def blocks(self, codes: Bytes, parameters: NDArray[np.uint16]) -> Bytes:
        """Return blocks (n, block_bytes) of codes and stored parameters (n, 2: base, scale)."""
        numbers = {"code": codes, "base": parameters[:, :1], "scale": parameters[:, 1:]}
        return pack_blocks(self.fields, numbers)

    def stored_parameters(self, blocks: Bytes) -> NDArray[np.uint16]:
        """Return the stored base and scale (n, 2) of blocks, as the integers in the bytes."""
        result = np.zeros((len(blocks), 2), np.uint16)
        for i, name in enumerate(("base", "scale")):
            if name in self.fields:
                result[:, i] = unpack_field(self.fields[name], blocks)[:, 0]
        return result

    def base_and_scale(self, blocks: Bytes) -> tuple[Floats, Floats]:
        """Return the parameters of blocks (n, block_bytes) as float32 (n,) each.

        Without a stored base it is -0, which added to any number, 0 and -0 too, gives that number.
        """
        base, scale = self.stored_parameters(blocks).T
        if self.parameters == U8_PAIR:
            hundred, thousand = np.float32(100), np.float32(1000)
            return base.astype(np.float32) / hundred - 1, scale.astype(np.float32) / thousand
        scale_f32 = np.ascontiguousarray(scale).view(np.float16).astype(np.float32)
        if self.parameters == F16_SCALE:
            return np.full_like(scale_f32, -0.0), scale_f32
        return np.ascontiguousarray(base).view(np.float16).astype(np.float32), scale_f32

    def floats(self, blocks: Bytes) -> tuple[Floats, Floats | None]:
        """Return scale and base; see `FieldFormat.floats`."""
        base, scale = self.base_and_scale(blocks)
        return scale, None if self.parameters == F16_SCALE else base

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        step = max(1, CHUNK // max(out.shape[1], 1))
        for row in range(0, len(data), step):
            rows = self.integers(data[row : row + step])
            base = np.full_like(rows.d, -0.0) if rows.m is None else rows.m
            parallel_for(
                _apply, len(rows.codes), 2.0 * rows.codes.size, rows.codes, base, rows.d, self.zero,
                out[row : row + step],
            )  # fmt: skip


@jit.kernel
def _apply(codes, base, scale, zero, out, start, stop):
    """Write base + scale * (code - zero), rounded once, for rows of codes."""
    block = codes.shape[1] // base.shape[1]
    for row in range(start, stop):
        for column in range(out.shape[1]):
            b = column // block
            # float64 holds the product and the sum exactly enough to round once
            step = np.int64(codes[row, column]) - zero
            wide = np.float64(base[row, b]) + np.float64(scale[row, b]) * step
            out[row, column] = np.float32(wide)
