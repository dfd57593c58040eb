"""Formats of 4-bit codes with a codebook of floats: NF4 and FP4, as bitsandbytes has them.

``nf4_b64``, ``fp4_b64``: 64 weights in 36 bytes, (4 + 32) * 8 / 64 = 4.5 bits per weight.  Blocks
have 128, 64, 32 or 16 weights; the name ends in their number.  A block is a float32 scale and the
codes, two in a byte, the first in the low nibble.

weight = d * value(code), rounded once.  `NF4` holds quantiles of a normal distribution, `FP4` the
numbers of a float with a sign, two exponent bits and one mantissa bit, over the largest.

Products take float32 or bfloat16 activations.  The values do not fit in 8 bits, so that int8
products would be those of another codebook; they are refused.

They hold checkpoints of bitsandbytes; scales of double quantization are stored as the float32 that
they decode to (4.5 bits instead of 4.127).  There a group is 256 scales of the flattened matrix: of
4 rows with 4096 columns, or of a part of a row.  Rows that are read, cut for ranks or gathered by
themselves would need the groups of others, and every user of a row a second scale and an offset.

Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), appendix E; bitsandbytes 0.50, functional.py
(get_4bit_type).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np

from nbflow_kernels.formats.block_format import BlockFormat
from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane
from nbflow_kernels.formats.registry import Bytes, Floats

# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)
"""Value of each NF4 code, float32 numbers."""
_FP4_HALF = (0.0, 0.0625 / 12, 8.0 / 12, 12.0 / 12, 4.0 / 12, 6.0 / 12, 2.0 / 12, 3.0 / 12)
# fmt: on
FP4 = tuple(float(np.float32(value)) for value in (*_FP4_HALF, *(-v for v in _FP4_HALF)))
"""Value of each FP4 code, float32 numbers."""
CODEBOOKS = {"nf4": NF4, "fp4": FP4}
BLOCK_SIZES = (128, 64, 32, 16)
"""Weights per block, largest first."""
_NAME = re.compile(r"(nf4|fp4)_b(128|64|32|16)")


@dataclass(frozen=True, eq=False, repr=False)
class FloatCodebookFormat(BlockFormat):
    """Block format with a codebook of floats and a float32 scale."""

    @property
    def takes_int8(self) -> bool:
        """See `QuantFormat.takes_int8`."""
        return False

    def blocks(self, codes: Bytes, scales: Floats) -> Bytes:
        """Pack codes (n, block_size) and scales (n,) into (n, block_bytes)."""
        halves = scales.astype("<f4").view("<u2").reshape(-1, 2)
        return self.pack_blocks(code=codes, d=halves).reshape(len(codes), self.block_bytes)


@functools.cache
def float_codebook_format(kind: str, block_size: int) -> FloatCodebookFormat:
    """Return the format with the codebook "nf4" or "fp4" and blocks of that size."""
    fields = Field("d", 2, (Plane(0, 16),)), Field("code", block_size, (Plane(4, 4),))
    form = CodecSpec(block_size, block_size, 4, values=CODEBOOKS[kind], d_type="f32")
    return FloatCodebookFormat(f"{kind}_b{block_size}", FieldTable(block_size, fields), form)


def by_name(name: str) -> FloatCodebookFormat | None:
    """Return the format of a name, or None if it is not one of these.

    Examples
    --------
    >>> by_name("nf4_b64")
    <FloatCodebookFormat nf4_b64: 4.5 bits per weight>
    """
    found = _NAME.fullmatch(name)
    return None if found is None else float_codebook_format(found[1], int(found[2]))
