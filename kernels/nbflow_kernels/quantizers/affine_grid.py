"""Blocks as ``base + step * (code - zero)``, and codes put into blocks whose scales stay.

For formats whose codes lie at equal distances and can be chosen one by one: those of
`AffineFormat` and the K-quants.  Encoders that choose codes by other rules than the nearest, GPTQ
and HQQ, are made of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.bit_fields import unpack_field
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.formats.registry import FORMATS, Bytes, QuantFormat
from nbflow_kernels.quantizers.k_formats import pack_super_blocks

Wide = NDArray[np.float64]


@dataclass(frozen=True)
class Affine:
    """The grid of each weight of some rows; K is the padded number of columns."""

    step: Wide
    """(rows, K); may be negative or 0."""
    base: Wide
    """(rows, K): the value of code `zero`."""
    zero: int
    n_codes: int

    def nearest(self, x: Wide) -> Bytes:
        """Return the codes (rows, K) whose values are nearest to `x`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(self.step == 0, 0.0, (x - self.base) / self.step)
        codes: Bytes = np.clip(np.rint(steps) + self.zero, 0, self.n_codes - 1).astype(np.uint8)
        return codes

    def values(self, codes: NDArray[Any]) -> Wide:
        """Return the values of codes (rows, K), not rounded to float32."""
        result: Wide = self.base + self.step * (codes.astype(np.float64) - self.zero)
        return result


def is_affine(format: QuantFormat) -> bool:
    """Return whether `affine` and `with_codes` know a format."""
    return isinstance(format, AffineFormat | KQuantFormat)


def check_affine(format: QuantFormat, encoder: str) -> None:
    """Raise unless `affine` and `with_codes` know a format."""
    if not is_affine(format):
        known = ", ".join(name for name in FORMATS if is_affine(FORMATS[name]))
        raise UsageError(
            f"encoder {encoder!r} is for formats whose codes lie at equal distances and are chosen "
            f"one by one, {known}; {format.name} is none of them, use encoder='best'"
        )


def affine(format: QuantFormat, data: Bytes) -> Affine:
    """Return the grids of rows of storage bytes (rows, row bytes)."""
    form, rows = format.integer_form, format.integers(data)
    step = np.repeat(rows.d.astype(np.float64), form.block // form.sub_block, axis=1) * form.factor
    if rows.scales is not None:
        step = step * rows.scales
    base = np.zeros_like(step)
    if rows.m is not None:
        base = np.repeat(rows.m.astype(np.float64), form.block // form.sub_block, axis=1)
        if rows.mins is not None:
            base = -base * rows.mins
    n_codes = format.n_codes if isinstance(format, AffineFormat) else 1 << form.code_bits
    step, base = (np.repeat(part, form.sub_block, axis=1) for part in (step, base))
    return Affine(step, base, form.zero, n_codes)


def with_codes(format: QuantFormat, data: Bytes, codes: Bytes) -> Bytes:
    """Return rows of storage bytes with other codes (rows, K), and all else as it is."""
    blocks = np.ascontiguousarray(data).reshape(-1, format.block_bytes)
    parts = np.ascontiguousarray(codes).reshape(-1, format.block_size)
    if isinstance(format, AffineFormat):
        return format.blocks(parts, format.stored_parameters(blocks)).reshape(data.shape)
    assert isinstance(format, KQuantFormat)
    rows = format.integers(blocks)
    assert rows.scales is not None
    mins = np.empty((len(blocks), 0), np.uint8) if rows.mins is None else rows.mins
    params = stored_halves(format, blocks)
    return pack_super_blocks(format, parts, rows.scales, mins, params).reshape(data.shape)


def stored_halves(format: KQuantFormat, blocks: Bytes) -> NDArray[np.uint16]:
    """Return the bits of `d` and `dmin` (n, 2) of super-blocks; without minima the second is 0."""
    params = np.zeros((len(blocks), 2), np.uint16)
    for i, name in enumerate(("d", "dmin") if format.has_mins else ("d",)):
        params[:, i] = unpack_field(format.fields[name], blocks)[:, 0]
    return params
