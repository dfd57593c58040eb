"""GGML's nonlinear 4-bit formats IQ4: a codebook with denser levels around zero.

Codes 0..15 decode to `LEVELS`: -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.

``iq4_nl``: 32 weights in 18 bytes, (2 + 16) * 8 / 32 = 4.5 bits per weight.

weight = d * value(code); d may be negative.

``iq4_xs``: 256 weights in 136 bytes, (2 + 2 + 4 + 128) * 8 / 256 = 4.25 bits per weight.  A
sub-block s is 32 weights.

weight = d * (scale - 32) * value(code), scale 0..63; d may be negative.

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
