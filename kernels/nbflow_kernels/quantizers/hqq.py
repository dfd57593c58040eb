r"""HQQ: half-quadratic quantization, data-free, with an error norm that tolerates outliers.

Minimized is :math:`\sum |w - Q(w)|^p` with p < 1 over the base of each block (its scale, for
formats without a base), alternating:

.. math:: e = \mathrm{shrink}_p(w - Q(w), \beta), \quad
          \mathrm{base} = \mathrm{mean}(w - e - \mathrm{scale} \cdot \mathrm{code})

where :math:`\mathrm{shrink}_p(x, \beta) = \mathrm{sign}(x) \max(0, |x| - |x|^{p-1} / \beta)`.

Source: H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023,
https://mobiusml.github.io/hqq_blog.  Deviations: errors are in units of the block's scale, so that
beta means the same for weights of any size; bases are rounded to storage in each iteration; and
each sub-block keeps its best iteration, the first being the published quantizer's result.
K-quants gain little: an iteration that moves a minimum by less than half a unit has no effect.
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
    Doubles,
    affine_grid,
    check_affine,
    stored_halves,
    with_codes,
)
from nbflow_kernels.quantizers.k_formats import pack_super_blocks
from nbflow_kernels.quantizers.registry import quantize_rows

CHUNK = 1 << 19  # weights per pass: about ten float64 arrays of this size


@dataclass(frozen=True)
class HqqOptions:
    """Parameters of the HQQ iteration."""

    p: float = 0.7
    """Power of the errors, in (0, 1]."""
    beta: float = 10.0
    """Initial shrinkage of errors; a larger beta shrinks less."""
    kappa: float = 1.01
    """Factor of beta after each iteration."""
    n_iterations: int = 20
    """Updates of bases and codes."""


def lp_errors(error: Doubles, p: float) -> Doubles:
    """Return the sums of ``|error| ** p`` over the last axis."""
    return np.sum(np.abs(error) ** p, axis=-1)  # type: ignore[no-any-return]


def hqq_rows(
    format: QuantFormat,
    x: Floats,
    n_columns: int,
    options: HqqOptions = HqqOptions(),
) -> Bytes:
    """Return the bytes of rows; parameters as for `quantizers.registry.quantize_rows`."""
    check_affine(format, "hqq")
    data = quantize_rows(format, x, n_columns, "reference")
    step = max(1, CHUNK // x.shape[1])
    counted = np.broadcast_to(np.arange(x.shape[1]) < n_columns, x.shape)
    for row in range(0, len(x), step):
        own = slice(row, row + step)
        blocks = data[own].reshape(-1, format.block_bytes)
        weights = x[own].astype(np.float64).reshape(-1, format.block_size)
        counts = counted[own].reshape(weights.shape)
        data[own] = _improved(format, weights, counts, blocks, options).reshape(data[own].shape)
    return data


def _improved(
    format: QuantFormat, x: Doubles, counts: NDArray[np.bool_], data: Bytes, options: HqqOptions
) -> Bytes:
    """Return improved blocks (n, block_bytes) for weights (n, block_size)."""
    size, beta = format.integer_form.sub_block, options.beta
    best, least = data.copy(), np.full((len(x), x.shape[1] // size), np.inf)
    for iteration in range(options.n_iterations + 1):
        grid = affine_grid(format, data)
        # the first candidate is the published quantizer's codes
        codes = format.integers(data).codes if iteration == 0 else grid.nearest(x)
        error = (x - grid.values(codes)) * counts
        sums = lp_errors(error.reshape(*least.shape, size), options.p)
        best = _with_better(format, best, with_codes(format, data, codes), sums < least)
        least = np.minimum(sums, least)
        unit = np.abs(grid.step) + (grid.step == 0)
        wanted = x - _shrunk(error / unit, options.p, beta) * unit
        steps = codes.astype(np.float64) - grid.zero
        parts: list[Any] = [a.reshape(len(x), -1, size) for a in (wanted, steps, grid.step, counts)]
        data = _stored(format, data, *parts)
        beta *= options.kappa
    return best


def _with_better(format: QuantFormat, best: Bytes, data: Bytes, better: NDArray[np.bool_]) -> Bytes:
    """Return `search` with the `better` (n, sub-blocks) sub-blocks replaced by those of `data`."""
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


def _shrunk(error: Doubles, p: float, beta: float) -> Doubles:
    """Return the generalized soft threshold of errors."""
    size = np.abs(error)
    with np.errstate(divide="ignore"):
        smaller = np.maximum(size - size ** (p - 1) / beta, 0.0)
    return np.where(size > 0, np.sign(error) * smaller, 0.0)


def _stored(
    format: QuantFormat, data: Bytes, wanted: Doubles, steps: Doubles, step: Doubles, counts: Any
) -> Bytes:
    """Return blocks with the stored bases (or scales) nearest to the least squares fit."""
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


def _nearest_integers(wanted: Doubles, unit: Floats, old: Any, low: int, high: int) -> NDArray[Any]:
    """Return the integers nearest to ``wanted / unit`` (n, 1); `old` where the unit is 0."""
    wide = unit.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(wide == 0, old, wanted / wide)
    return np.clip(np.rint(found), low, high)


def _stored_linear(format: AffineFormat, data: Bytes, base: Doubles, scale: Doubles) -> Bytes:
    """Return blocks with bases replaced, or scales where the format stores no base."""
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
