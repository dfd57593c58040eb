"""``q4_k``: 256 weights in 144 bytes, (2 + 2 + 12 + 128) * 8 / 256 = 4.5 bits per weight.

weight = d * scale * code - dmin * minimum, scale and minimum 0..63 for each 32 weights.

Source: GGML, ggml-common.h (block_q4_K).
"""

from __future__ import annotations

from nbflow_kernels.formats.codec_spec import Field, FieldTable, Plane, float16
from nbflow_kernels.formats.ggml.k_format import KQuantFormat


def _sixes(name: str, at: int, bit: int) -> Field:
    """Return the field of 8 6-bit numbers at byte `at`.

    Numbers 0 to 3 are the low 6 bits of 4 bytes; numbers 4 to 7 have their low 4 bits in bytes 12
    to 15 and their high 2 bits above numbers 0 to 3.
    """
    rest = Plane(12, 4, bit=bit, first=4, per_group=1), Plane(at, 2, 4, bit=6, first=4)
    return Field(name, 8, (Plane(at, 6, count=4), *rest))


SCALES = (_sixes("scale", 4, 0), _sixes("min", 8, 4))

Q4_K = KQuantFormat(
    "q4_k",
    FieldTable(
        256,
        (
            Field("code", 256, (Plane(16, 4, stride=32),)),
            *SCALES,
            float16("d", 0),
            float16("dmin", 2),
        ),
    ),
)
