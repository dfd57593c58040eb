"""Quantizers of the K-quants: GGML's, bit for bit, and a search that starts from its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.ggml.k_format import SUPER, KQuantFormat
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers.reference import ggml_k
from nbflow_kernels.quantizers.search import k_quants

FIT_COST = 250.0  # multiply-adds a weight costs in the published quantizer
SEARCH_COST = 1000.0  # and in the search, for the choice of thread count


@dataclass(frozen=True)
class SuperBlocks:
    """Codes, scales and parameters of n super-blocks."""

    codes: Bytes
    """(n, 256), from 0."""
    scales: NDArray[np.int16]
    """(n, sub-blocks)."""
    mins: Bytes
    """(n, sub-blocks); (n, 0) where the format has no minima."""
    params: NDArray[np.uint16]
    """(n, 2): the float16 `d` and `dmin`, as bits."""


@dataclass(frozen=True)
class KQuantizer:
    """The published quantizer of a K-quant and its search."""

    ranges: tuple[float, float, int, bool] = (0.0, 0.0, 0, False)
    """Arguments of `ggml_scale_fit.fit_range`: first, step, tries, absolutely."""
    effort: tuple[int, int, float] = (3, 6, 0.4)
    """Arguments of `k_quants.search`: starts, grid, clip."""
    takes_importance: bool = True

    def quantize_chunk(
        self,
        format: KQuantFormat,
        x: Floats,
        counts: Floats,
        quantizer: str,
        importance: Floats | None,
    ) -> Bytes:
        """Return the bytes of rows; `counts` (columns,) is 1, and 0 for padding."""
        blocks = x.shape[1] // SUPER
        super_blocks = x.reshape(-1, SUPER)
        given = np.empty((0, x.shape[1]), np.float32) if importance is None else importance
        found = self._reference(format, super_blocks, given, blocks)
        if quantizer == "search":
            weight = counts[None] if importance is None else importance
            self._search(format, super_blocks, weight, blocks, found)
        packed = pack_super_blocks(format, found.codes, found.scales, found.mins, found.params)
        return packed.reshape(len(x), -1)

    def recipe(self, format: KQuantFormat, weighted: bool) -> tuple[Any, ...]:
        """Return the trials of the published quantizer, as `ggml_k.quantize_ranges` takes them."""
        tried = (-0.9, 0.05, 36, False) if weighted else self.ranges
        return format.form.sub_block, (1 << format.form.code_bits) - 1, format.scale_top, *tried

    def _reference(
        self, format: KQuantFormat, x: Floats, importance: Floats, blocks: int
    ) -> SuperBlocks:
        """Return super-blocks (n, 256) quantized as GGML does."""
        n = len(x)
        found = SuperBlocks(
            np.empty((n, SUPER), np.uint8),
            np.empty((n, format.sub_blocks), np.int16),
            np.empty((n, format.sub_blocks if format.has_mins else 0), np.uint8),
            np.empty((n, 2), np.uint16),
        )
        groups, work = -(-n // LANES), FIT_COST * x.size
        if format.has_mins:
            recipe = self.recipe(format, len(importance) > 0)
            parallel_for(
                ggml_k.quantize_ranges, groups, work, x, importance, blocks, recipe, found.codes,
                found.scales, found.mins, found.params,
            )  # fmt: skip
        else:
            parallel_for(
                ggml_k.quantize_signed, groups, work, x, importance, blocks, format.form.zero,
                found.codes, found.scales, found.params,
            )  # fmt: skip
        return found

    def _search(
        self, format: KQuantFormat, x: Floats, weight: Floats, blocks: int, found: SuperBlocks
    ) -> None:
        """Improve the published super-blocks in place."""
        low, top = -format.form.zero, format.scale_top
        form = (
            format.form.sub_block, low, low + (1 << format.form.code_bits) - 1,
            0 if format.has_mins else -top, top if format.has_mins else top - 1,
            top if format.has_mins else 0,
        )  # fmt: skip
        parallel_for(
            k_quants.search, -(-len(x) // LANES), SEARCH_COST * x.size, x, weight, blocks, form,
            *self.effort, found.codes, found.scales, found.mins, found.params,
        )  # fmt: skip


def pack_super_blocks(
    format: KQuantFormat,
    codes: Bytes,
    scales: NDArray[Any],
    mins: Bytes,
    params: NDArray[np.uint16],
) -> Bytes:
    """Return the bytes (n, block_bytes) of super-blocks of a K-quant."""
    numbers = {"code": codes, "d": params[:, :1], "scale": scales - format.fields["scale"].offset}
    if format.has_mins:
        numbers |= {"min": mins, "dmin": params[:, 1:]}
    return format.pack_blocks(**numbers)


QUANTIZERS = {
    "q2_k": KQuantizer(ranges=(-0.5, 0.1, 15, True), effort=(4, 6, 0.25)),
    "q3_k": KQuantizer(effort=(4, 4, 0.3)),
    "q4_k": KQuantizer(ranges=(-1.0, 0.1, 20, False)),
    "q5_k": KQuantizer(ranges=(-0.5, 0.1, 15, False)),
    "q6_k": KQuantizer(effort=(4, 24, 0.3)),
}
