"""Quantizers of GGML's grid formats: iq1, iq2 and iq3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nbflow_kernels.formats.ggml import iq1, iq2, iq3
from nbflow_kernels.formats.ggml.iq_grids import GridFormat, OnGrid
from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.quantizers.block_formats import BlockQuantizer
from nbflow_kernels.quantizers.reference import ggml_iq1, ggml_iq2_iq3
from nbflow_kernels.quantizers.search import grid


def _packed(
    format: GridFormat,
    reference: Callable[[Floats, Floats | None], OnGrid],
    search: Callable[[Floats, Floats], OnGrid],
    needs_importance: bool,
) -> BlockQuantizer:
    """Return the quantizers of a format that packs rows on the grid."""
    return BlockQuantizer(
        lambda x, importance: format.pack_rows(reference(x, importance)),
        lambda x, weight: format.pack_rows(search(x, weight)),
        needs_importance=needs_importance,
    )


def _iq1(format: GridFormat, needs_importance: bool = False) -> BlockQuantizer:
    sub_block = format.form.sub_block
    reference = partial(ggml_iq1.quantize, sub_block)
    return _packed(format, reference, partial(grid.search_iq1, sub_block), needs_importance)


def _iq2_iq3(
    format: GridFormat, magnitudes: tuple[float, ...], needs_importance: bool = False
) -> BlockQuantizer:
    reference = partial(ggml_iq2_iq3.quantize, format.name)
    return _packed(
        format, reference, partial(grid.search, format.name, magnitudes), needs_importance
    )


QUANTIZERS = {
    "iq1_s": _iq1(iq1.IQ1_S, needs_importance=True),
    "iq1_m": _iq1(iq1.IQ1_M),
    "iq2_xxs": _iq2_iq3(iq2.IQ2_XXS, iq2.MAGNITUDES, needs_importance=True),
    "iq2_xs": _iq2_iq3(iq2.IQ2_XS, iq2.MAGNITUDES, needs_importance=True),
    "iq2_s": _iq2_iq3(iq2.IQ2_S, iq2.MAGNITUDES),
    "iq3_xxs": _iq2_iq3(iq3.IQ3_XXS, iq3.MAGNITUDES_XXS),
    "iq3_s": _iq2_iq3(iq3.IQ3_S, iq3.MAGNITUDES_S),
}
