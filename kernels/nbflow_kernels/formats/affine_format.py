"""Formats whose weight is ``base + scale * (code - zero)``, with one base and scale per block.

``zero`` belongs to the format: 0 if it stores a base, else the code of weight 0.

The decode formula is evaluated with one rounding to float32.  For float16 parameters the product
has at most 11 + 8 bits, so a fused and an unfused float32 evaluation agree.

"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.bit_fields import (
    codes_kernel,
    pack_field,
    scalar_decoder,
    unpack_field,
)
from nbflow_kernels.formats.codec_spec import PAIR_RADIX, CodecSpec, DecodedBlocks, FieldTable
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

CHUNK = 1 << 22  # weights decoded at once: bounds the temporary arrays to some 30 MB


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
class AffineFormat(QuantFormat):
    """One block format of the family; see the fields."""

    name: str
    fields: FieldTable
    """Fields "code", "scale" and, if any, "base": float16, or both a byte."""
    rule: int
    """Rule by which the published quantizer finds base and scale, one of those above."""
    divisor: float
    """The published scale is the block's range, or largest magnitude, divided by this."""
    zero: int = 0
    """Without a base: the code of weight 0."""
    block_size: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", self.fields.block_size)
        object.__setattr__(self, "block_bytes", self.fields.block_bytes)

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

    @cached_property
    def code(self) -> Callable[..., Any]:
        """Scalar decoder ``(row, at, i)`` of code i of the block at byte `at`; CUDA shares it."""
        return scalar_decoder(self.fields["code"])

    @cached_property
    def codes_kernel(self) -> Callable[..., None]:
        """Kernel ``(data, codes, start, stop)``: the codes of rows."""
        return codes_kernel(self.fields)

    def blocks(self, codes: Bytes, parameters: NDArray[np.uint16]) -> Bytes:
        """Return blocks (n, block_bytes) of codes and stored parameters (n, 2: base, scale)."""
        blocks = np.zeros((len(codes), self.block_bytes), np.uint8)
        pack_field(self.fields["code"], codes, blocks)
        for i, name in enumerate(("base", "scale")):
            if name in self.fields:
                pack_field(self.fields[name], parameters[:, i : i + 1], blocks)
        return blocks

    def unpack_codes(self, blocks: Bytes) -> Bytes:
        """Return the codes (n, block_size) of blocks, in NumPy."""
        return unpack_field(self.fields["code"], blocks).astype(np.uint8)

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

    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Return ``base + scale * (code - zero)`` (n, block_size), rounded once to float32."""
        base, scale = (v.astype(np.float64)[:, None] for v in self.base_and_scale(blocks))
        with np.errstate(invalid="ignore", over="ignore"):  # bytes from a file may hold inf
            steps = self.unpack_codes(blocks).astype(np.int16) - np.int16(self.zero)
            return (base + scale * steps).astype(np.float32)

    def codes_of_rows(self, data: Bytes) -> Bytes:
        """Return the codes (rows, blocks * block_size) of rows, through the scalar decoder."""
        n_blocks = data.shape[1] // self.block_bytes
        codes = np.empty((len(data), n_blocks * self.block_size), np.uint8)
        parallel_for(self.codes_kernel, len(data), 8.0 * codes.size, data, codes)
        return codes

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        step = max(1, CHUNK // max(out.shape[1], 1))
        for row in range(0, len(data), step):
            part = data[row : row + step]
            codes = self.codes_of_rows(part)
            base, scale = self.base_and_scale(part.reshape(-1, self.block_bytes))
            parallel_for(
                _apply, len(part), 2.0 * codes.size, codes, base.reshape(len(part), -1),
                scale.reshape(len(part), -1), self.zero, out[row : row + step],
            )  # fmt: skip

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

    def integers(self, data: Bytes) -> DecodedBlocks:
        """See `QuantFormat.integers`."""
        base, scale = self.base_and_scale(data.reshape(-1, self.block_bytes))
        m = None if self.parameters == F16_SCALE else base.reshape(len(data), -1)
        return DecodedBlocks(self.codes_of_rows(data), scale.reshape(len(data), -1), m)


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
