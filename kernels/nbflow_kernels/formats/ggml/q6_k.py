"""``q6_k``: 256 weights in 210 bytes, (128 + 64 + 16 + 2) * 8 / 256 = 6.5625 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       128    low 4 bits of the codes 0..63: weight 128 h + r in the low nibble of byte 64 h + r
               (r < 64), 128 h + 64 + r in the high
128     64     bits 4, 5 of the codes: weight 128 h + 32 p + r in bits 2p, 2p + 1 of byte 32 h + r
192     16     scale of each 16 weights, int8
208     2      d, float16
======  =====  ==================================================================================

weight = d * scale * (code - 32).

Source: GGML, ggml-common.h (block_q6_K).
"""

from __future__ import annotations

from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.k_format import KQuantFormat

Q6_K = KQuantFormat(
    "q6_k",
    FieldTable(
        256,
        (
            Field("code", 256, (Plane(0, 4, stride=64), Plane(128, 2, shift=4, stride=32))),
            Field("scale", 16, (Plane(192, 8),), signed=True, offset=-128),
            float16("d", 208),
        ),
    ),
)
