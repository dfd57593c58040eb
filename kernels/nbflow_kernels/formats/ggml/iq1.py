"""GGML's IQ1 formats: 8 ternary weights are one point of a grid (codebook of `iq_grids`).

All weights of a group of 8 are shifted by 1/8 or -1/8: in eighths, a weight is -7, 1 or 9, or it is
-9, -1 or 7.

``iq1_s``: 256 weights in 50 bytes, (2 + 32 + 16) * 8 / 256 = 1.5625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16
2       32     low 8 bits of the points, one byte per group
34      16     one 16-bit integer per 32 weights: bits 8..10 of the point of group l in bits
               3l .. 3l + 2, scale in bits 12..14, shift in bit 15 (1: -1/8)
======  =====  ==================================================================================

``iq1_m``: 256 weights in 56 bytes, (32 + 16 + 8) * 8 / 256 = 1.75 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       32     low 8 bits of the points, one byte per group
32      16     one nibble per group, low nibble first: bits 8..10 of the point in bits 0..2,
               shift in bit 3 (1: -1/8)
48      8      4 16-bit integers: the scales of weights 64r + 16j .. 64r + 16j + 15 in bits
               3j .. 3j + 2 of integer r; bits 4r .. 4r + 3 of d (float16) in its bits 12..15
======  =====  ==================================================================================

weight = d * (2 * scale + 1) / 8 * eighths, scale 0..7.

Source: GGML, ggml-common.h (block_iq1_s, block_iq1_m) and ggml-quants.c (dequantize_row_iq1_s,
dequantize_row_iq1_m).
"""

from __future__ import annotations

from dataclasses import replace

from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.iq_grids import GRID_IQ1, GridFormat

# code = coordinate | shift << 2, in eighths; coordinate 3 does not occur
VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)

IQ1_S = GridFormat(
    "iq1_s",
    FieldTable(
        256,
        (
            Field("point", 32, (Plane(2, 8), Plane(34, 3, shift=8, per_group=4, step=2))),
            Field("sign", 8, (Plane(35, 1, bit=7, step=2),)),
            Field("scale", 8, (Plane(35, 3, bit=4, per_group=1, step=2),), factor=2, offset=1),
            float16("d", 0),
        ),
    ),
    CodecSpec(block=256, sub_block=32, code_bits=3, values=VALUES, factor=0.125, scales=True),
    GRID_IQ1,
)

IQ1_M = GridFormat(
    "iq1_m",
    FieldTable(
        256,
        (
            Field("point", 32, (Plane(0, 8), Plane(32, 3, shift=8, pitch=4))),
            Field("sign", 32, (Plane(32, 1, bit=3, pitch=4),)),
            Field("scale", 16, (Plane(48, 3, per_group=4, step=2),), factor=2, offset=1),
            Field("d", 1, tuple(Plane(49 + 2 * k, 4, shift=4 * k, bit=4) for k in range(4))),
        ),
    ),
    replace(IQ1_S.form, sub_block=16),
    GRID_IQ1,
)
