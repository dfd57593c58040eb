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

Source: GGML, ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.block_format import CHUNK, FieldFormat
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.registry import Bytes, Floats

SUPER = 256  # weights of a super-block


@dataclass(frozen=True, eq=False, repr=False)
class KQuantFormat(FieldFormat):
    """K-quant format with the fields "code", "scale" and "d", and "min" and "dmin" for minima."""

    @cached_property
    def form(self) -> CodecSpec:
        """Decode formula; without minima, codes and scales are signed."""
        bits, scale = self.fields["code"].bits, self.fields["scale"]
        sub_block = SUPER // scale.n
        if "min" not in self.fields:
            scale_bits = 6 if scale.bits == 6 else 8
            zero = 1 << bits - 1
            return CodecSpec(SUPER, sub_block, bits, zero, scales=True, scale_bits=scale_bits)
        return CodecSpec(
            SUPER, sub_block, bits, scales=True, base="min", scale_bits=4 if scale.bits == 4 else 8
        )

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return self.form

    @property
    def has_mins(self) -> bool:
        """True if sub-blocks have minima."""
        return "min" in self.fields

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks per super-block."""
        return self.fields["scale"].n

    @property
    def scale_top(self) -> int:
        """Bound of scales: 0 .. scale_top with minima, else -scale_top .. scale_top - 1."""
        n_values = self.fields["scale"].n_values
        return n_values - 1 if self.has_mins else n_values // 2

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
