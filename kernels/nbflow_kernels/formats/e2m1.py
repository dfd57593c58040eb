"""``e2m1_g16_f32``: 16 E2M1 codes with a float32 scale in 12 bytes, 6 bits per weight.

It holds NVFP4 checkpoints of ModelOpt and compressed-tensors, whose blocks have an E4M3 scale and
whose tensors have a float32 scale: `d` is the product of both, rounded once.

weight = d / 2 * value(code), with the values of `nbflow_kernels.formats.ggml.mxfp4_nvfp4.LEVELS`.

Source: this project; OCP Microscaling Formats specification 1.0, section 5.3.3 (E2M1).
"""

from __future__ import annotations

from nbflow_kernels.formats.block_format import BlockFormat
from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane
from nbflow_kernels.formats.ggml.mxfp4_nvfp4 import LEVELS

E2M1_G16_F32 = BlockFormat(
    "e2m1_g16_f32",
    FieldTable(16, (Field("d", 2, (Plane(0, 16),)), Field("code", 16, (Plane(4, 4),)))),
    CodecSpec(block=16, sub_block=16, code_bits=4, values=LEVELS, factor=0.5, d_type="f32"),
)


def by_name(name: str) -> BlockFormat | None:
    """Return the format if it has that name, or None."""
    return E2M1_G16_F32 if name == E2M1_G16_F32.name else None
