"""Quantizers of GGML's grid formats: iq1, iq2 and iq3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nbflow_kernels.formats.ggml import iq1, iq2, iq3
from nbflow_kernels.formats.ggml.iq_grids import OnGrid
from nbflow_kernels.formats.registry import Bytes
from nbflow_kernels.quantizers.block_formats import BlockQuantizer
from nbflow_kernels.quantizers.reference import ggml_iq1
from nbflow_kernels.quantizers.reference.ggml_iq2_iq3 import quantize, reference_quantizer
from nbflow_kernels.quantizers.search.grid import search_quantizer, search_quantizer_iq1

Blocks = Callable[[OnGrid], Bytes]


def _iq1(sub_block: int, blocks: Blocks, needs_importance: bool = False) -> BlockQuantizer:
    return BlockQuantizer(
        reference_quantizer(partial(ggml_iq1.quantize, sub_block), blocks),
        search_quantizer_iq1(sub_block, blocks),
        needs_importance=needs_importance,
    )


def _on_grid(
    name: str, magnitudes: tuple[float, ...], blocks: Blocks, needs_importance: bool = False
) -> BlockQuantizer:
    return BlockQuantizer(
        reference_quantizer(partial(quantize, name), blocks),
        search_quantizer(name, magnitudes, blocks),
        needs_importance=needs_importance,
    )


QUANTIZERS = {
    "iq1_s": _iq1(32, iq1.IQ1_S.pack_rows, needs_importance=True),
    "iq1_m": _iq1(16, iq1.IQ1_M.pack_rows),
    "iq2_xxs": _on_grid("iq2_xxs", iq2.MAGNITUDES, iq2.IQ2_XXS.pack_rows, needs_importance=True),
    "iq2_xs": _on_grid("iq2_xs", iq2.MAGNITUDES, iq2.IQ2_XS.pack_rows, needs_importance=True),
    "iq2_s": _on_grid("iq2_s", iq2.MAGNITUDES, iq2.IQ2_S.pack_rows),
    "iq3_xxs": _on_grid("iq3_xxs", iq3.MAGNITUDES_XXS, iq3.IQ3_XXS.pack_rows),
    "iq3_s": _on_grid("iq3_s", iq3.MAGNITUDES_S, iq3.IQ3_S.pack_rows),
}
