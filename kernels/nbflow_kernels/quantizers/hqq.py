r"""HQQ: half-quadratic quantization, which lets few weights be far off so that most are near.

Minimized is :math:`\sum |w - Q(w)|^p` with p < 1 over the base of each block (its scale, for
formats without a base), in turns:

.. math:: e = \mathrm{shrink}_p(w - Q(w), \beta), \quad
          \mathrm{base} = \mathrm{mean}(w - e - \mathrm{scale} \cdot \mathrm{code})

where :math:`\mathrm{shrink}_p(x, \beta) = \mathrm{sign}(x) \max(0, |x| - |x|^{p-1} / \beta)`.  It
needs no inputs.

Source: H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
https://mobiusml.github.io/hqq_blog.  Deviations: errors are in units of the block's scale, so that
beta means the same for weights of any size; bases are rounded as the format stores them at every
turn; and each sub-block keeps the turn whose sum is least, the first being the published encoder's.
K-quants gain little: a turn that moves a minimum by less than half a unit does not move it at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats.affine_format import F16_SCALE, U8_PAIR, AffineFormat
from nbflow_kernels.formats.ggml.k_format import KQuantFormat
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.quantizers.affine_grid import (
    Wide,
    affine,
    check_affine,
    stored_halves,
    with_codes,
)
from nbflow_kernels.quantizers.k_formats import pack_super_blocks
from nbflow_kernels.quantizers.registry import quantize_rows

CHUNK = 1 << 19  # weights at once: some ten float64 arrays of so many


@dataclass(frozen=True)
class Settings:
    """How HQQ iterates."""

    p: float = 0.7
    """Power of the errors, in (0, 1]."""
    beta: float = 10.0
    """How strongly errors are shrunk at first: less the larger it is."""
    kappa: float = 1.01
    """What beta is multiplied with at each turn."""
    turns: int = 20
    """How often bases and codes are set."""


def lp_errors(error: Wide, p: float) -> Wide:
    """Return the sums of ``|error| ** p`` over the last axis."""
    return np.sum(np.abs(error) ** p, axis=-1)  # type: ignore[no-any-return]


def hqq_rows(
    format: QuantFormat,
    x: Floats,
    n_columns: int,
    settings: Settings = Settings(),
) -> Bytes:
    """Return the bytes of rows; parameters as of `quantizers.registry.quantize_rows`."""
    check_affine(format, "hqq")
    data = quantize_rows(format, x, n_columns, "plain")
    step = max(1, CHUNK // x.shape[1])
    counted = np.broadcast_to(np.arange(x.shape[1]) < n_columns, x.shape)
    for row in range(0, len(x), step):
        own = slice(row, row + step)
        blocks = data[own].reshape(-1, format.block_bytes)
        weights = x[own].astype(np.float64).reshape(-1, format.block_size)
        counts = counted[own].reshape(weights.shape)
        data[own] = _improved(format, weights, counts, blocks, settings).reshape(data[own].shape)
    return data


def _improved(
    format: QuantFormat, x: Wide, counts: NDArray[np.bool_], data: Bytes, settings: Settings
) -> Bytes:
    """Return better blocks (n, block_bytes) for weights (n, block_size)."""
    size, beta = format.integer_form.sub_block, settings.beta
    best, least = data.copy(), np.full((len(x), x.shape[1] // size), np.inf)
    for turn in range(settings.turns + 1):
        grid = affine(format, data)
        # the published encoder's own codes count as the first turn
        codes = format.integers(data).codes if turn == 0 else grid.nearest(x)
        error = (x - grid.values(codes)) * counts
        sums = lp_errors(error.reshape(*least.shape, size), settings.p)
        best = _with_better(format, best, with_codes(format, data, codes), sums < least)
        least = np.minimum(sums, least)
        unit = np.abs(grid.step) + (grid.step == 0)
        wanted = x - _shrunk(error / unit, settings.p, beta) * unit
        steps = codes.astype(np.float64) - grid.zero
        parts: list[Any] = [a.reshape(len(x), -1, size) for a in (wanted, steps, grid.step, counts)]
        data = _stored(format, data, *parts)
        beta *= settings.kappa
    return best


def _with_better(format: QuantFormat, best: Bytes, data: Bytes, better: NDArray[np.bool_]) -> Bytes:
    """Return `best` with those sub-blocks of `data` that are `better` (n, sub-blocks)."""
    if isinstance(format, AffineFormat):
        return np.where(better, data, best)
    assert isinstance(format, KQuantFormat)  # d and dmin are the same in both
    old, new = format.integers(best), format.integers(data)
    assert old.scales is not None
    assert new.scales is not None
    codes = np.where(np.repeat(better, format.form.sub_block, axis=1), new.codes, old.codes)
    mins = np.empty((len(best), 0), np.uint8)
    if old.mins is not None and new.mins is not None:
        mins = np.where(better, new.mins, old.mins)
    scales = np.where(better, new.scales, old.scales)
    return pack_super_blocks(format, codes, scales, mins, stored_halves(format, best))


def _shrunk(error: Wide, p: float, beta: float) -> Wide:
    """Return the generalized soft threshold of errors."""
    size = np.abs(error)
    with np.errstate(divide="ignore"):
        smaller = np.maximum(size - size ** (p - 1) / beta, 0.0)
    return np.where(size > 0, np.sign(error) * smaller, 0.0)


def _stored(
    format: QuantFormat, data: Bytes, wanted: Wide, steps: Wide, step: Wide, counts: Any
) -> Bytes:
    """Return blocks whose bases (or scales) fit what is wanted, as the format stores them."""
    n = np.maximum(counts.sum(axis=2), 1)
    base = np.sum((wanted - step * steps) * counts, axis=2) / n  # (n, sub-blocks)
    squares = np.sum(steps**2 * counts, axis=2)
    fitted = np.sum(wanted * steps * counts, axis=2) / np.where(squares > 0, squares, 1)
    scale = np.where(squares > 0, fitted, step[:, :, 0])
    if isinstance(format, AffineFormat):
        return _stored_linear(format, data, base[:, 0], scale[:, 0])
    assert isinstance(format, KQuantFormat)
    rows = format.integers(data)
    scales, mins = rows.scales, rows.mins
    assert scales is not None
    top = format.scale_top
    if mins is None:
        lowest = -top
        new = _nearest_integers(scale, rows.d * format.form.factor, scales, lowest, top - 1)
        scales, mins = new.astype(np.int16), np.empty((len(data), 0), np.uint8)
    else:
        assert rows.m is not None
        mins = _nearest_integers(-base, rows.m, mins, 0, top).astype(np.uint8)
    return pack_super_blocks(format, rows.codes, scales, mins, stored_halves(format, data))


def _nearest_integers(wanted: Wide, unit: Floats, old: Any, low: int, high: int) -> NDArray[Any]:
    """Return integers whose multiples of `unit` (n, 1) are nearest to `wanted`; old where it is 0.

    The one decoded formula is ``unit * integer``.
    """
    wide = unit.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(wide == 0, old, wanted / wide)
    return np.clip(np.rint(found), low, high)


def _stored_linear(format: AffineFormat, data: Bytes, base: Wide, scale: Wide) -> Bytes:
    """Return blocks with other bases, or other scales where the format stores no base."""
    parameters = format.stored_parameters(data)
    if format.parameters == F16_SCALE:
        half = np.clip(scale, -65504, 65504).astype(np.float16)
        parameters[:, 1] = half.view(np.uint16)
    elif format.parameters == U8_PAIR:
        parameters[:, 0] = np.clip(np.rint((base + 1) * 100), 0, 255).astype(np.uint16)
    else:
        half = np.clip(base, -65504, 65504).astype(np.float16)
        parameters[:, 0] = half.view(np.uint16)
    return format.blocks(format.unpack_codes(data), parameters)
