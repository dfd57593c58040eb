"""``q6_k``: 256 weights in 210 bytes, (128 + 64 + 16 + 2) * 8 / 256 = 6.5625 bits per weight.

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
