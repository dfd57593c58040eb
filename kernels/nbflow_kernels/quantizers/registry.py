"""Registry of quantizers: "reference" (published), "search" (least error) and "unbiased"."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.block_format import CHUNK
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.grouped import GroupFormat
from nbflow_kernels.formats.nf4_fp4 import FloatCodebookFormat
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.quantizers import (
    affine_formats,
    codebook_formats,
    grid_formats,
    grouped_formats,
    k_formats,
    nf4_fp4,
    trellis_formats,
)
from nbflow_kernels.quantizers.gain import takes_gain, unit_gain

QUANTIZERS: dict[str, Any] = {
    **k_formats.QUANTIZERS,
    **codebook_formats.QUANTIZERS,
    **grid_formats.QUANTIZERS,
    **trellis_formats.QUANTIZERS,
}
"""Quantizers by format name.  Each `AffineFormat` is quantized by `affine_formats` according to its
rule; float formats round; user formats bring a function."""
LOW_BITS = 3.0


def _encoder_of(format: QuantFormat) -> Any:
    """Return the module that quantizes to a format."""
    if isinstance(format, AffineFormat):
        return affine_formats
    if isinstance(format, GroupFormat):
        return grouped_formats
    if isinstance(format, FloatCodebookFormat):
        return nf4_fp4
    if format.name not in QUANTIZERS:
        raise UsageError(
            f"format {format.name} is only read from checkpoints, it has no quantizer; weights of "
            "that kind can be quantized to nvfp4 or mxfp4"
        )
    return QUANTIZERS[format.name]


def quantize_rows(
    format: QuantFormat,
    x: Floats,
    n_columns: int,
    quantizer: str,
    importance: Floats | None = None,
) -> Bytes:
    """Return the bytes of each row of `x`, shape (rows, row bytes).

    `x` has finite weights in whole blocks; its columns from `n_columns` on are padding: copies of
    the row's last weight, whose error does not count.  `importance` (1 or rows, columns) weighs
    squared errors; UsageError if the published quantizer of the format ("reference") has none.
    """
    if isinstance(format, FloatFormat | UserFormat):
        return format.quantize_rows(x, n_columns, quantizer, importance)
    if quantizer == "reference" and importance is not None and not takes_importance(format):
        raise UsageError(
            f"quantizer 'reference' of {format.name} is the published one, which knows no "
            "importance; use quantizer='search'"
        )
    scaled = quantizer == "unbiased"
    quantizer = "search" if quantizer == "unbiased" else quantizer
    encoder = _encoder_of(format)
    n_rows, width = x.shape
    counts = (np.arange(width) < n_columns).astype(np.float32)
    if importance is not None:
        importance = np.atleast_2d(importance) * counts
    data = np.empty((n_rows, width // format.block_size * format.block_bytes), np.uint8)
    step = max(1, CHUNK // max(width, 1))
    for row in range(0, n_rows, step):
        rows = slice(row, row + step)
        weights = importance
        if importance is not None and len(importance) > 1:
            weights = importance[rows]
        data[rows] = encoder.quantize_chunk(format, x[rows], counts, quantizer, weights)
        if scaled and takes_gain(format):
            counted = counts[None] if weights is None else weights
            data[rows] = unit_gain(format, x[rows], data[rows], counted)
    return data


def default_quantizer(format: QuantFormat) -> str:
    """Return the quantizer with which a model diverges least from its float32 weights.

    "unbiased" for block formats of at most `LOW_BITS` bits per weight, otherwise "search".  Above
    that the two differ by less than 2 % of the divergence (docs/quantization.md), and "search"
    has the smaller squared error.
    """
    low = format.bits_per_weight <= LOW_BITS and takes_gain(format)
    return "unbiased" if low else "search"


def takes_importance(format: QuantFormat) -> bool:
    """Return True if the published quantizer of a format takes importance weights."""
    if isinstance(format, UserFormat):
        return "quantize_block_weighted" in format.code.functions
    if isinstance(format, AffineFormat):
        return affine_formats.takes_importance(format)
    found = QUANTIZERS.get(format.name)
    return isinstance(format, FloatFormat) or (found is not None and found.takes_importance)
