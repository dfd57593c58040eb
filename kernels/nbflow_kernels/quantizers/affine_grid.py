"""Affine view of quantized blocks: values ``base + step * (code - zero)``, and codes to replace.

For formats with equidistant codes that can be chosen one by one: `AffineFormat`, `GroupFormat` and
the K-quants.
GPTQ and HQQ, which do not choose the nearest codes, build on it.
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
from nbflow_kernels.formats.grouped import GroupFormat
from nbflow_kernels.formats.registry import FORMATS, Bytes, QuantFormat
from nbflow_kernels.quantizers.k_formats import pack_super_blocks

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class AffineGrid:
    """Representable values of each weight of some rows; K is the padded number of columns."""

    step: Doubles
    """(rows, K); may be negative or 0."""
    base: Doubles
    """(rows, K): the value of code `zero`."""
    zero: int
    n_codes: int

    def nearest(self, x: Doubles) -> Bytes:
        """Return the codes (rows, K) whose values are nearest to `x`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(self.step == 0, 0.0, (x - self.base) / self.step)
        codes: Bytes = np.clip(np.rint(steps) + self.zero, 0, self.n_codes - 1).astype(np.uint8)
        return codes

    def values(self, codes: NDArray[Any]) -> Doubles:
        """Return the values of codes (rows, K), not rounded to float32."""
        result: Doubles = self.base + self.step * (codes.astype(np.float64) - self.zero)
        return result


def is_affine(format: QuantFormat) -> bool:
    """Return True if `affine_grid` and `with_codes` support a format."""
    return isinstance(format, AffineFormat | KQuantFormat | GroupFormat)


def check_affine(format: QuantFormat, quantizer: str) -> None:
    """Raise unless `affine_grid` and `with_codes` support a format."""
    if not is_affine(format):
        known = ", ".join(name for name in FORMATS if is_affine(FORMATS[name]))
        raise UsageError(
            f"quantizer {quantizer!r} supports formats with equidistant codes chosen one by one, "
            f"{known}; got {format.name}; use quantizer='search'"
        )


def affine_grid(format: QuantFormat, data: Bytes) -> AffineGrid:
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
    return AffineGrid(step, base, form.zero, n_codes)


def with_codes(format: QuantFormat, data: Bytes, codes: Bytes) -> Bytes:
    """Return rows of storage bytes with codes (rows, K) replaced."""
    blocks = np.ascontiguousarray(data).reshape(-1, format.block_bytes)
    parts = np.ascontiguousarray(codes).reshape(-1, format.block_size)
    if isinstance(format, AffineFormat):
        return format.blocks(parts, format.stored_parameters(blocks)).reshape(data.shape)
    if isinstance(format, GroupFormat):
        of_groups = format.scales(blocks), format.offsets(blocks)
        return format.blocks(parts, *of_groups).reshape(data.shape)
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
