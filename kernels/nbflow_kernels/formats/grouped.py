"""Grouped integer formats: ``weight = scale * (code - zero)``, one scale and zero point per group.

They hold the matrices of GPTQ, AWQ, compressed-tensors, bitsandbytes (int8), HQQ, torchao and Quark
checkpoints without quantizing again.  Where zero points are floats, a block stores the base instead
of them: ``weight = scale * code + base``.  Names have the bits of a code, the weights of a block,
the type of the scale, and ``base``:

=======================  =========  ===============  =================================
format                   scale      zero or base     bytes of a block of G weights
=======================  =========  ===============  =================================
``int4_g128``            float16    8, a constant    2 + G / 2
``int4_g128_f32``        float32    8, a constant    4 + G / 2
``uint4_g128``           float16    uint8            2 + 1 + G / 2
``uint4_g128_f32``       float32    uint8            4 + 1 + G / 2
``uint4_g128_base``      float16    float32 base     2 + 4 + G / 2
``uint4_g128_f32_base``  float32    float32 base     4 + 4 + G / 2
=======================  =========  ===============  =================================

Codes have 1 to 8 bits and lie in 0 .. 2**bits - 1; the constant zero point is 2**(bits - 1).
Blocks have 16, 32, 64 or 128 weights; larger groups of a checkpoint are several blocks with equal
scales.  bfloat16 scales become float32.

The base ``-scale * zero`` is rounded to float32.  It is exact for float16 and bfloat16 scales (and
zero points, where they are floats), so a weight is then rounded once.

Source: this project.  The values are those of GPTQ (Frantar et al. 2022, arXiv 2210.17323) and AWQ
(Lin et al. 2023, arXiv 2306.00978) checkpoints.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.affine_format import dequantize_affine
from nbflow_kernels.formats.bit_fields import unpack_field
from nbflow_kernels.formats.block_format import FieldFormat, stored_floats
from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane
from nbflow_kernels.formats.registry import Bytes, Floats

Offsets = NDArray[Any] | None
"""Zero points, uint8 (n,), bases, float32 (n,), or None, by format."""
BLOCK_SIZES = (128, 64, 32, 16)
"""Weights per block, largest first."""
_NAME = re.compile(r"(u?)int([1-8])_g(128|64|32|16)(_f32)?(_base)?")


@dataclass(frozen=True, eq=False, repr=False)
class GroupFormat(FieldFormat):
    """Grouped integer format with the fields "d", "code" and "zero", "base" or neither."""

    @property
    def code_bits(self) -> int:
        """Bits per code."""
        return self.fields["code"].bits

    @property
    def n_codes(self) -> int:
        """Number of codes: 0 .. n_codes - 1 are valid."""
        return 1 << self.code_bits

    @property
    def has_zeros(self) -> bool:
        """True if each block stores a zero point."""
        return "zero" in self.fields

    @property
    def has_base(self) -> bool:
        """True if each block stores a base, float32."""
        return "base" in self.fields

    @property
    def scale_type(self) -> str:
        """Stored type of scales: "f16" or "f32" (two 16-bit halves, the lower first)."""
        return "f16" if self.fields["d"].n == 1 else "f32"

    @functools.cached_property
    def form(self) -> CodecSpec:
        """Decode formula; the base needs float32."""
        size, bits = self.block_size, self.code_bits
        if self.has_zeros or self.has_base:
            return CodecSpec(size, size, bits, base="d", d_type="f32")
        return CodecSpec(size, size, bits, zero=1 << bits - 1, d_type=self.scale_type)

    @property
    def integer_form(self) -> CodecSpec:
        """See `QuantFormat.integer_form`."""
        return self.form

    @property
    def stored_d_type(self) -> str:
        """See `FieldFormat.stored_d_type`."""
        return self.scale_type

    def scales(self, blocks: Bytes) -> Floats:
        """Return the scales of blocks (n, block_bytes), float32 (n,)."""
        return stored_floats(self.fields["d"], self.scale_type, blocks).reshape(-1)

    def zeros(self, blocks: Bytes) -> NDArray[np.uint8]:
        """Return the zero points of blocks (n, block_bytes), uint8 (n,)."""
        if not self.has_zeros:
            return np.full(len(blocks), self.form.zero, np.uint8)
        return unpack_field(self.fields["zero"], blocks)[:, 0].astype(np.uint8)

    def offsets(self, blocks: Bytes) -> Offsets:
        """Return the stored zero points, uint8 (n,), or bases, float32 (n,), if any."""
        if self.has_base:
            return stored_floats(self.fields["base"], "f32", blocks).reshape(-1)
        return self.zeros(blocks) if self.has_zeros else None

    def floats(self, blocks: Bytes) -> tuple[Floats, Floats | None]:
        """Return scale and base; see `FieldFormat.floats`."""
        scale = self.scales(blocks)
        if self.has_base:
            return scale, self.offsets(blocks)
        if not self.has_zeros:
            return scale, None
        with np.errstate(invalid="ignore", over="ignore"):  # bytes from a file may hold inf
            return scale, -(scale * self.zeros(blocks).astype(np.float32))

    def blocks(self, codes: Bytes, scales: Floats, offsets: Offsets) -> Bytes:
        """Pack codes (n, block_size), scales (n,) and offsets (n,) into (n, block_bytes).

        Scales must be exact in the stored type; `offsets` are as `offsets` returns them.
        """
        if self.scale_type == "f16":
            with np.errstate(over="ignore"):
                bits = scales.astype(np.float16).view(np.uint16)[:, None]
        else:
            bits = _halves(scales)
        numbers = {"code": codes, "d": bits}
        if self.has_base:
            assert offsets is not None
            numbers["base"] = _halves(offsets)
        elif offsets is not None:
            numbers["zero"] = offsets[:, None]
        return self.pack_blocks(**numbers).reshape(len(codes), self.block_bytes)

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the weights of rows; see `QuantFormat.dequantize_rows`."""
        dequantize_affine(self, data, out)


def _halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return float32 numbers (n,) as 16-bit halves (n, 2), the lower first."""
    return values.astype("<f4").view("<u2").reshape(-1, 2)


@functools.cache
def group_format(
    bits: int, block_size: int, scale_type: str, has_zeros: bool, has_base: bool = False
) -> GroupFormat:
    """Return the format of these properties; `scale_type` is "f16" or "f32".

    With `has_base`, blocks have a base instead of a zero point.
    """
    at = {"f16": 2, "f32": 4}[scale_type]
    fields = [Field("d", at // 2, (Plane(0, 16),))]
    if has_base:
        fields.append(Field("base", 2, (Plane(at, 16),)))
        at += 4
    elif has_zeros:
        fields.append(Field("zero", 1, (Plane(at, 8),)))
        at += 1
    planes, shift = [], 0
    for width in (8, 4, 2, 1):  # a plane has 1, 2, 4 or 8 bits of each code
        if bits & width:
            planes.append(Plane(at, width, shift=shift))
            at, shift = at + block_size * width // 8, shift + width
    fields.append(Field("code", block_size, tuple(planes)))
    unsigned = has_zeros or has_base
    name = f"{'u' * unsigned}int{bits}_g{block_size}{'_f32' * (scale_type == 'f32')}"
    name += "_base" * has_base
    return GroupFormat(name, FieldTable(block_size, tuple(fields)))


def by_name(name: str) -> GroupFormat | None:
    """Return the format of a name, or None if it is not one of a grouped format.

    Examples
    --------
    >>> by_name("uint4_g128")
    <GroupFormat uint4_g128: 4.1875 bits per weight>
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    unsigned, bits, block_size, f32, base = found.groups()
    if base and not unsigned:
        return None
    scale_type = "f32" if f32 else "f16"
    return group_format(int(bits), int(block_size), scale_type, bool(unsigned), bool(base))
