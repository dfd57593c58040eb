"""4-bit float formats (E2M1): OCP's MXFP4 and NVIDIA's NVFP4 in GGML's byte layout.

Codes 0..15 decode to `LEVELS`, twice the E2M1 value: 0 1 2 3 4 6 8 12 for codes 0..7, and the
negatives for codes 8..15; -0 decodes to 0.

``mxfp4``: 32 weights in 17 bytes, (1 + 16) * 8 / 32 = 4.25 bits per weight.

weight = 2**(d - 128) * value(code), d in E8M0.  Unlike in the OCP format, d = 255 is a scale, not
NaN.

``nvfp4``: 64 weights in 36 bytes, (4 + 32) * 8 / 64 = 4.5 bits per weight; an optional scale of the
whole tensor is a separate tensor of the file.

weight = d / 2 * value(code), one d for 16 weights in unsigned E4M3 (bias 7; 127 is 0, bit 7 is
ignored).

Source: OCP Microscaling Formats specification 1.0; GGML, ggml-common.h (block_mxfp4, block_nvfp4),
ggml-impl.h (ggml_e8m0_to_fp32_half, ggml_ue4m3_to_fp32) and ggml-quants.c.
"""

from __future__ import annotations

from nbflow_kernels.formats.block_format import BlockFormat
from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane

LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

MXFP4 = BlockFormat(
    "mxfp4",
    FieldTable(32, (Field("code", 32, (Plane(1, 4, stride=16),)), Field("d", 1, (Plane(0, 8),)))),
    CodecSpec(block=32, sub_block=32, code_bits=4, values=LEVELS, d_type="e8m0"),
)

NVFP4 = BlockFormat(
    "nvfp4",
    FieldTable(64, (Field("code", 64, (Plane(4, 4, stride=8),)), Field("d", 4, (Plane(0, 8),)))),
    CodecSpec(block=16, sub_block=16, code_bits=4, values=LEVELS, d_type="e4m3"),
)
