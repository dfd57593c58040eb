"""GGML's IQ2 formats: the magnitudes of 8 weights are one point of a grid.

A magnitude is 8, 25 or 43; the grids (codebooks) are in `iq_grids`.  256 weights share d; a group
is 8 weights.

``iq2_xxs``: 256 weights in 66 bytes, (2 + 64) * 8 / 256 = 2.0625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     8 bytes per 32 weights: 4 bytes with the points of the 4 groups, and a 32-bit
               integer: signs of group l in bits 7l .. 7l + 6, scale in bits 28..31
======  =====  ==================================================================================

Only 7 signs of 8 are stored: the eighth follows from even parity.

``iq2_xs``: 256 weights in 74 bytes, (2 + 64 + 8) * 8 / 256 = 2.3125 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     one 16-bit integer per group: point in bits 0..8, 7 signs in bits 9..15
66      8      scales: weights 32r .. 32r + 15 in the low nibble of byte r, the next 16 in the high
======  =====  ==================================================================================

``iq2_s``: 256 weights in 82 bytes, (2 + 32 + 32 + 8 + 8) * 8 / 256 = 2.5625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       32     low 8 bits of the points, one byte per group
34      32     signs, one byte per group: weight j in bit j
66      8      bits 8, 9 of the points: group 4r + j in bits 2j, 2j + 1 of byte r
74      8      scales: weights 32r .. 32r + 15 in the low nibble of byte r, the next 16 in the high
======  =====  ==================================================================================

weight = d * (2 * scale + 1) / 8 * (+-magnitude), scale 0..15.

Source: GGML, ggml-common.h (block_iq2_xxs to block_iq2_s, ksigns_iq2xs) and ggml-quants.c
(dequantize_row_iq2_xxs to dequantize_row_iq2_s).
"""

from __future__ import annotations

from dataclasses import replace

from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.iq_grids import GRID_IQ2_S, GRID_IQ2_XS, GRID_IQ2_XXS, GridFormat

# code = magnitude | sign << 2; magnitude code 3 does not occur
VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
MAGNITUDES = (8 / 8, 25 / 8, 43 / 8)


def _scale(n: int, *planes: Plane) -> Field:
    return Field("scale", n, planes, factor=2, offset=1)


IQ2_XXS = GridFormat(
    "iq2_xxs",
    FieldTable(
        256,
        (
            Field("point", 32, (Plane(2, 8, stride=4, step=8),)),
            Field("sign", 32, (Plane(6, 7, per_group=4, step=8),)),
            _scale(8, Plane(9, 4, bit=4, step=8)),
            float16("d", 0),
        ),
    ),
    CodecSpec(block=256, sub_block=32, code_bits=3, values=VALUES, factor=0.125, scales=True),
    GRID_IQ2_XXS,
)

IQ2_XS = GridFormat(
    "iq2_xs",
    FieldTable(
        256,
        (
            Field("point", 32, (Plane(2, 9, step=2),)),
            Field("sign", 32, (Plane(3, 7, bit=1, step=2),)),
            _scale(16, Plane(66, 4)),
            float16("d", 0),
        ),
    ),
    replace(IQ2_XXS.form, sub_block=16),
    GRID_IQ2_XS,
)

IQ2_S = GridFormat(
    "iq2_s",
    FieldTable(
        256,
        (
            Field("point", 32, (Plane(2, 8), Plane(66, 2, shift=8))),
            Field("sign", 32, (Plane(34, 8),)),
            _scale(16, Plane(74, 4)),
            float16("d", 0),
        ),
    ),
    replace(IQ2_XXS.form, sub_block=16),
    GRID_IQ2_S,
)
