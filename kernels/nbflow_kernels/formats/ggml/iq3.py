"""GGML's IQ3 formats: the magnitudes of 4 weights are one point of a grid.

The grids (codebooks) are in `iq_grids`.  256 weights share d, 32 a scale; a quad is 4 weights.

``iq3_xxs``: 256 weights in 98 bytes, (2 + 64 + 32) * 8 / 256 = 3.0625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     points, one byte per quad
66      32     one 32-bit integer per 32 weights: signs of weights 8l .. 8l + 6 of these in bits
               7l .. 7l + 6, scale in bits 28..31
======  =====  ==================================================================================

Only 7 signs of 8 are stored: the eighth follows from even parity.  Magnitudes are 4 12 20 28 36 44
52 62.

weight = d * (2 * scale + 1) / 4 * (+-magnitude), scale 0..15.

``iq3_s``: 256 weights in 110 bytes, (2 + 64 + 8 + 32 + 4) * 8 / 256 = 3.4375 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       64     low 8 bits of the points, one byte per quad
66      8      bit 8 of the points: quad 8r + j in bit j of byte r
74      32     signs: weight 8r + j in bit j of byte r
106     4      scales: weights 64r .. 64r + 31 in the low nibble of byte r, the next 32 in the high
======  =====  ==================================================================================

weight = d * (2 * scale + 1) * (+-magnitude), magnitude 1 3 5 7 9 11 13 15, scale 0..15.

Source: GGML, ggml-common.h (block_iq3_xxs, block_iq3_s) and ggml-quants.c (dequantize_row_iq3_xxs,
dequantize_row_iq3_s).
"""

from __future__ import annotations

from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.iq_grids import GRID_IQ3_S, GRID_IQ3_XXS, GridFormat

# code = magnitude | sign << 3
VALUES_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
VALUES_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
MAGNITUDES_XXS = tuple(v / 4 for v in VALUES_XXS[:8])
MAGNITUDES_S = tuple(float(v) for v in VALUES_S[:8])

IQ3_XXS = GridFormat(
    "iq3_xxs",
    FieldTable(
        256,
        (
            Field("point", 64, (Plane(2, 8),)),
            Field("sign", 32, (Plane(66, 7, per_group=4, step=4),)),
            Field("scale", 8, (Plane(69, 4, bit=4, step=4),), factor=2, offset=1),
            float16("d", 0),
        ),
    ),
    CodecSpec(block=256, sub_block=32, code_bits=4, values=VALUES_XXS, factor=0.25, scales=True),
    GRID_IQ3_XXS,
)

IQ3_S = GridFormat(
    "iq3_s",
    FieldTable(
        256,
        (
            Field("point", 64, (Plane(2, 8), Plane(66, 1, shift=8))),
            Field("sign", 32, (Plane(74, 8),)),
            Field("scale", 8, (Plane(106, 4),), factor=2, offset=1),
            float16("d", 0),
        ),
    ),
    CodecSpec(block=256, sub_block=32, code_bits=4, values=VALUES_S, scales=True),
    GRID_IQ3_S,
)
