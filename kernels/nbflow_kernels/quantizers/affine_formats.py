"""Quantizers of formats with one base and scale per block.

The published one follows from the format's rule (`nbflow_kernels.formats.affine_format`): one pass,
codes chosen with the float32 parameters, which are rounded to storage afterwards.  The search
starts from its parameters, so it is never worse.  With importance weights the published one is
GGML's for them, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.affine_format import (
    F16_SCALE,
    GGML_ABSMAX,
    GGML_EXTREME,
    GGML_RANGE,
    MIDRISE,
    AffineFormat,
)
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers.reference import ggml_legacy, inferflow
from nbflow_kernels.quantizers.reference.ggml_legacy import Encoded
from nbflow_kernels.quantizers.search.affine import search

SIGN = np.uint16(0x8000)  # of a float16
SEARCH_COST = 300.0  # multiply-adds a weight costs in the search, for the choice of thread count
CHUNK = 1 << 22  # weights encoded at once: bounds the temporary arrays to some 30 MB

_GGML: dict[int, Callable[[AffineFormat, Floats], Encoded]] = {
    GGML_EXTREME: ggml_legacy.plain_extreme,
    GGML_RANGE: ggml_legacy.plain_range,
    GGML_ABSMAX: ggml_legacy.plain_absmax,
}
_WEIGHTED: dict[int, Callable[[AffineFormat, Floats, Floats], Encoded]] = {
    GGML_EXTREME: ggml_legacy.weighted_signed,
    GGML_RANGE: ggml_legacy.weighted_range,
    GGML_ABSMAX: ggml_legacy.weighted_absmax,
}


class AffineQuantizer:
    """The two quantizers of all these formats."""

    def takes_importance(self, format: AffineFormat) -> bool:
        """Return whether the published quantizer knows importance weights."""
        return format.rule in _WEIGHTED

    def quantize_rows(
        self,
        format: AffineFormat,
        x: Floats,
        n_columns: int,
        encoder: str,
        importance: Floats | None = None,
    ) -> Bytes:
        """Return the bytes of each row of `x`; see `quantizers.registry.quantize_rows`."""
        n_rows, width = x.shape
        n_blocks = width // format.block_size
        data = np.empty((n_rows, n_blocks * format.block_bytes), np.uint8)
        weighted = _WEIGHTED.get(format.rule)
        if encoder == "plain" and importance is not None and weighted is None:
            raise UsageError(
                f"encoder 'plain' of {format.name} is the published one, which knows no "
                "importance; use encoder='best'"
            )
        weight = _search_weight(format, width, n_columns, importance)
        step = max(1, CHUNK // max(width, 1))
        for row in range(0, n_rows, step):
            part = x[row : row + step]
            own = slice(None) if len(weight) == 1 else slice(row, row + step)
            if importance is not None and weighted is not None:
                codes, parameters = weighted(format, part, importance[own])
            else:
                codes, parameters = _reference(format, part)
            codes = codes.reshape(part.shape)
            if encoder == "best":
                parameters = parameters.reshape(len(part), n_blocks, 2)
                _search(format, part, weight[own], codes, parameters)
            blocks = format.blocks(codes.reshape(-1, format.block_size), parameters.reshape(-1, 2))
            data[row : row + step] = blocks.reshape(len(part), -1)
        return data


def _search_weight(
    format: AffineFormat, width: int, n_columns: int, importance: Floats | None
) -> Floats:
    """Return the weight of each column's error (1 or rows, width), at most 1."""
    if importance is None:
        return (np.arange(width) < n_columns).astype(np.float32)[None]
    blocks = importance.reshape(len(importance), -1, format.block_size)
    # only ratios within a block matter: products with tiny importances must not underflow
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
    """Improve the published codes and parameters (rows, blocks, 2) of rows in place."""
    # the search knows scales >= 0: a block with a negative one is searched as its mirror image
    sign = parameters[:, :, 1] & (SIGN if format.parameters == F16_SCALE else np.uint16(0))
    if sign.any():
        x = np.where(np.repeat(sign != 0, format.block_size, axis=1), -x, x)
        parameters[:, :, 1] ^= sign
    low, high = -format.zero, format.n_codes - 1 - format.zero
    parallel_for(
        search, len(x), SEARCH_COST * x.size, x, weight, format.block_size,
        low, high, format.parameters, codes, parameters,
    )  # fmt: skip
    parameters[:, :, 1] ^= sign


def _reference(format: AffineFormat, x: Floats) -> Encoded:
    """Return codes and stored parameters of the published quantizer, for rows of blocks."""
    published = _GGML.get(format.rule)
    if published is not None:
        return published(format, x.reshape(-1, format.block_size))
    codes = np.empty(x.shape, np.uint8)
    parameters = np.empty((len(x), x.shape[1] // format.block_size, 2), np.uint16)
    parallel_for(
        inferflow.plain, len(x), inferflow.COST * x.size, x, format.block_size, format.n_codes,
        np.float32(format.divisor), format.parameters, format.rule == MIDRISE, format.zero, codes,
        parameters,
    )  # fmt: skip
    return codes, parameters
