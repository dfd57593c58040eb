"""Affine block formats: ``weight = base + scale * (code - zero)``, one base and scale per block.

``zero`` is a constant of the format: 0 if blocks store a base, else the code of weight 0.

Decoding rounds once, to float32.  With float16 parameters the product has at most 11 + 8 bits, so
fused and unfused float32 evaluation agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

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
"""One float16 scale, which may be negative; no base."""
U8_PAIR = 2
"""Scale u / 1000 and base v / 100 - 1, with uint8 u and v."""

RANGE, MIDRISE, ABSMAX, GGML_EXTREME, GGML_RANGE, GGML_ABSMAX = range(6)
"""Rules by which published quantizers choose base and scale.

Inferflow: `RANGE` sets base = min and scale = range / divisor; `MIDRISE` decodes to the middles of
`n_codes` equal intervals of the range; `ABSMAX` sets scale = max|x| / divisor.  A scale below 1e-5
gives codes 0.  GGML: `GGML_EXTREME` gives the weight of largest magnitude code 0; `GGML_RANGE` and
`GGML_ABSMAX` are as above, but only a scale of 0 gives codes 0."""


@dataclass(frozen=True, eq=False, repr=False)
class AffineFormat(FieldFormat):
    """Affine block format with the fields "code", "scale" and optionally "base".

    Scale and base are float16, or one byte each.
    """

    rule: int
    """Rule of the published quantizer for base and scale: `RANGE`, `MIDRISE`, ..."""
    divisor: float
    """Published scale = block range (or largest magnitude) / divisor."""
    zero: int = 0
    """Code of weight 0, in formats without a base."""
    float_fields: ClassVar[tuple[str, str]] = ("scale", "base")

    @property
    def n_codes(self) -> int:
        """Number of codes: 0 .. n_codes - 1 are valid."""
        return self.fields["code"].n_values

    @cached_property
    def parameters(self) -> int:
        """Storage of base and scale: `F16_PAIR`, `F16_SCALE` or `U8_PAIR`."""
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
        """Pack codes and stored parameters (n, 2: base, scale) into blocks (n, block_bytes)."""
        numbers = {"code": codes, "base": parameters[:, :1], "scale": parameters[:, 1:]}
        return pack_blocks(self.fields, numbers)

    def stored_parameters(self, blocks: Bytes) -> NDArray[np.uint16]:
        """Return the raw bits of base and scale (n, 2) of blocks."""
        result = np.zeros((len(blocks), 2), np.uint16)
        for i, name in enumerate(("base", "scale")):
            if name in self.fields:
                result[:, i] = unpack_field(self.fields[name], blocks)[:, 0]
        return result

    def base_and_scale(self, blocks: Bytes) -> tuple[Floats, Floats]:
        """Return base and scale of blocks (n, block_bytes), float32 (n,) each.

        A missing base is -0, the additive identity for all floats including 0 and -0.
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
        dequantize_affine(self, data, out)


def dequantize_affine(format: FieldFormat, data: Bytes, out: Floats) -> None:
    """Write base + scale * (code - zero), rounded once, of rows; see `QuantFormat`."""
    step = max(1, CHUNK // max(out.shape[1], 1))
    for row in range(0, len(data), step):
        rows = format.integers(data[row : row + step])
        base = np.full_like(rows.d, -0.0) if rows.m is None else rows.m
        parallel_for(
            _apply, len(rows.codes), 2.0 * rows.codes.size, rows.codes, base, rows.d,
            format.integer_form.zero, out[row : row + step],
        )  # fmt: skip


@jit.kernel
def _apply(codes, base, scale, zero, out, start, stop):
    """Write base + scale * (code - zero), rounded once, for rows of codes."""
    block = codes.shape[1] // base.shape[1]
    for row in range(start, stop):
        for column in range(out.shape[1]):
            b = column // block
            # float64 holds product and sum exactly enough for a single rounding
            step = np.int64(codes[row, column]) - zero
            wide = np.float64(base[row, b]) + np.float64(scale[row, b]) * step
            out[row, column] = np.float32(wide)
