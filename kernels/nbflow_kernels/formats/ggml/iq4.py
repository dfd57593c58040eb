"""GGML's nonlinear 4-bit formats IQ4: a codebook with denser levels around zero.

Codes 0..15 decode to `LEVELS`: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.

``iq4_nl``: 32 weights in 18 bytes, (2 + 16) * 8 / 32 = 4.5 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16; may be negative
2       16     codes: weight r in the low nibble of byte r, r + 16 in the high
======  =====  ==================================================================================

weight = scale * value(code).

``iq4_xs``: 256 weights in 136 bytes, (2 + 2 + 4 + 128) * 8 / 256 = 4.25 bits per weight.  A
sub-block s is 32 weights.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      d, float16; may be negative
2       2      bits 4, 5 of the scales: sub-block s in bits 2s, 2s + 1
4       4      low 4 bits of the scales: sub-block 2r in the low nibble of byte r, 2r + 1 in the
               high
8       128    codes, 16 bytes per sub-block: weight r of it in the low nibble of byte r,
               r + 16 in the high
======  =====  ==================================================================================

weight = d * (scale - 32) * value(code), scale 0..63.

Source: GGML, ggml-common.h (block_iq4_nl, block_iq4_xs, kvalues_iq4nl) and ggml-quants.c
(dequantize_row_iq4_nl, quantize_row_iq4_nl_impl).
"""

from __future__ import annotations

from nbflow_kernels.formats.block_format import BlockFormat
from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane, float16

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

IQ4_NL = BlockFormat(
    "iq4_nl",
    FieldTable(32, (Field("code", 32, (Plane(2, 4, stride=16),)), float16("d", 0))),
    CodecSpec(block=32, sub_block=32, code_bits=4, values=LEVELS),
)

IQ4_XS = BlockFormat(
    "iq4_xs",
    FieldTable(
        256,
        (
            Field("code", 256, (Plane(8, 4, stride=16),)),
            Field("scale", 8, (Plane(4, 4), Plane(2, 2, shift=4)), offset=-32),
            float16("d", 0),
        ),
    ),
    CodecSpec(block=256, sub_block=32, code_bits=4, values=LEVELS, scales=True),
)
