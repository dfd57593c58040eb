"""``q5_k``: 256 weights in 176 bytes, (2 + 2 + 12 + 32 + 128) * 8 / 256 = 5.5 bits per weight.

weight = d * scale * code - dmin * minimum, scale and minimum 0..63 for each 32 weights.

Source: GGML, ggml-common.h (block_q5_K).
"""

from __future__ import annotations

from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.formats.ggml.q4_k import SCALES

Q5_K = KQuantFormat(
    "q5_k",
    FieldTable(
        256,
        (
            Field("code", 256, (Plane(16, 1, 4, stride=32), Plane(48, 4, stride=32))),
            *SCALES,
            float16("d", 0),
            float16("dmin", 2),
        ),
    ),
)
