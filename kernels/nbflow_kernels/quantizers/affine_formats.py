"""Quantizers of formats with one base and scale per block.

The format's rule (`nbflow_kernels.formats.affine_format`) selects the published quantizer: one pass
that chooses codes with float32 parameters and then rounds the parameters to storage.  The search
starts from these parameters, so it is never worse.  With importance weights, GGML's formats use
GGML's weighted quantizers.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.affine_format import (
    GGML_ABSMAX,
    GGML_EXTREME,
    GGML_RANGE,
    MIDRISE,
    AffineFormat,
)
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers.reference import ggml_legacy, inferflow
from nbflow_kernels.quantizers.reference.ggml_legacy import QuantizedBlocks
from nbflow_kernels.quantizers.search.affine import search

SEARCH_COST = 100.0  # multiply-adds a weight costs in the search, for the choice of thread count

_GGML = (GGML_EXTREME, GGML_RANGE, GGML_ABSMAX)


def takes_importance(format: AffineFormat) -> bool:
    """Return True if the published quantizer takes importance; that of q8_0 ignores it."""
    return format.rule in _GGML


def quantize_chunk(
    format: AffineFormat, x: Floats, counts: Floats, quantizer: str, importance: Floats | None
) -> Bytes:
    """Return the bytes of rows; `counts` (columns,) is 1, and 0 for padding."""
    if importance is not None and format.rule in (GGML_EXTREME, GGML_RANGE):
        codes, parameters = ggml_legacy.quantize_weighted(format, x, importance)
    else:
        codes, parameters = _reference(format, x)
    codes = codes.reshape(x.shape)
    if quantizer == "search":
        weight = counts[None] if importance is None else _relative(format, importance)
        _search(format, x, weight, codes, parameters)
    pack = functools.partial(ggml_legacy.pack, format) if format.rule in _GGML else format.blocks
    blocks = pack(codes.reshape(-1, format.block_size), parameters.reshape(-1, 2))
    return blocks.reshape(len(x), -1)


def _relative(format: AffineFormat, importance: Floats) -> Floats:
    """Return importance (1 or rows, columns) relative to the largest of its block."""
    blocks = importance.reshape(len(importance), -1, format.block_size)
    # only ratios within a block matter: products with tiny importance must not underflow
    largest = blocks.max(axis=2, keepdims=True)
    weight = np.divide(blocks, np.where(largest > 0, largest, 1), dtype=np.float32)
    return weight.reshape(importance.shape)


def _search(
    format: AffineFormat,
    x: Floats,
    weight: Floats,
    codes: Bytes,
    parameters: NDArray[np.uint16],
) -> None:
    """Search from the published parameters (rows, blocks, 2); codes and both change in place."""
    low, high = -format.zero, format.n_codes - 1 - format.zero
    blocks = x.reshape(-1, format.block_size)
    parallel_for(
        search, -(-len(blocks) // LANES), SEARCH_COST * x.size, blocks, weight,
        x.shape[1] // format.block_size, low, high, format.parameters,
        codes.reshape(blocks.shape), parameters.reshape(-1, 2),
    )  # fmt: skip


def _reference(format: AffineFormat, x: Floats) -> QuantizedBlocks:
    """Return codes and stored parameters of the published quantizer, for rows of blocks."""
    if format.rule in _GGML:
        return ggml_legacy.quantize(format, x.reshape(-1, format.block_size))
    codes = np.empty(x.shape, np.uint8)
    parameters = np.empty((len(x), x.shape[1] // format.block_size, 2), np.uint16)
    parallel_for(
        inferflow.quantize, len(x), inferflow.COST * x.size, x, format.block_size, format.n_codes,
        np.float32(format.divisor), format.parameters, format.rule == MIDRISE, format.zero, codes,
        parameters,
    )  # fmt: skip
    return codes, parameters
