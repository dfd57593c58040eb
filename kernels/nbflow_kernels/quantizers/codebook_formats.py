"""Quantizers of GGML's codebook formats: iq4, 4-bit floats, two to four levels.

`nbflow_kernels.quantizers.reference.codebook` names the source of the published ones.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.formats.block_format import E4M3, E8M0, BlockFormat, value_table
from nbflow_kernels.formats.ggml import iq4, mxfp4_nvfp4, ternary
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers.block_formats import BlockQuantizer, weights
from nbflow_kernels.quantizers.reference import codebook
from nbflow_kernels.quantizers.search.codebook import search
from nbflow_kernels.quantizers.search.two_level_scales import rule

# ---- iq4 ----------------------------------------------------------------------------------------

LEVELS = np.array(iq4.LEVELS, np.float32)
# the first or last level at the largest weight, or up to a quarter below it
_STARTS = np.outer([1 / LEVELS[0], 1 / LEVELS[-1]], 0.9 + 0.05 * np.arange(8))
RULE_NL = rule(_STARTS, signed=True)
RULE_XS = rule(_STARTS, scales=(1, 0, -32, 31), tops=(-32, 31, -31, -30, 29), signed=True)


def _search_iq4_nl(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    found = search(x, weights(importance, counts), LEVELS, RULE_NL, 32, 32)
    return iq4.IQ4_NL.pack_blocks(code=found.chosen.reshape(len(x), -1), d=found.d)


def _search_iq4_xs(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    found = search(x, weights(importance, counts), LEVELS, RULE_XS, 256, 32)
    codes = found.chosen.reshape(len(x), -1)
    return iq4.IQ4_XS.pack_blocks(code=codes, scale=found.scales + 32, d=found.d)


def _reference_iq4_nl(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    codes, _, d = codebook.iq4(x, importance, LEVELS, 32)
    return iq4.IQ4_NL.pack_blocks(code=codes, d=d)


def _reference_iq4_xs(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    codes, scales, d = codebook.iq4(x, importance, LEVELS, 256)
    return iq4.IQ4_XS.pack_blocks(code=codes, scale=scales + 32, d=d)


# ---- 4-bit floats -------------------------------------------------------------------------------

FP4_LEVELS = np.array(mxfp4_nvfp4.LEVELS, np.float32)
ASCENDING, CODES = np.unique(FP4_LEVELS, return_index=True)  # the first 0: not -0
CODES = CODES.astype(np.uint8)
_FP4_STARTS = np.array([1, 1.25, 1.5]) / 12
RULE_MXFP4 = rule(_FP4_STARTS, stored=E8M0)
# candidates from half to twice the ideal scale: the error has many minima
RULE_NVFP4 = rule(_FP4_STARTS, stored=E4M3[:127], tops=1.08 ** np.arange(-9, 9), rounds=1)


def _search_mxfp4(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    found = search(x, weights(importance, counts), ASCENDING, RULE_MXFP4, 32, 32)
    codes = CODES[found.chosen].reshape(len(x), -1)
    return mxfp4_nvfp4.MXFP4.pack_blocks(code=codes, d=found.d)


def _search_nvfp4(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    found = search(x, weights(importance, counts), ASCENDING, RULE_NVFP4, 16, 16)
    codes = CODES[found.chosen].reshape(len(x), -1)
    return mxfp4_nvfp4.NVFP4.pack_blocks(code=codes, d=found.d)


def _reference_mxfp4(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    scales = codebook.e8m0(x.reshape(-1, 32)).reshape(len(x), -1)
    codes = codebook.fp4(x, FP4_LEVELS, E8M0[scales])
    return mxfp4_nvfp4.MXFP4.pack_blocks(code=codes, d=scales)


def _reference_nvfp4(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
    scales = codebook.e4m3(x.reshape(-1, 16), 2 * E4M3).reshape(len(x), -1)
    codes = codebook.fp4(x, FP4_LEVELS, E4M3[scales])
    return mxfp4_nvfp4.NVFP4.pack_blocks(code=codes, d=scales)


# ---- two to four levels -------------------------------------------------------------------------

# trial values of the highest level, in units of the largest weight
REACH = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def _few_levels(format: BlockFormat, n_levels: int) -> BlockQuantizer:
    """Return the quantizers of a format with `n_levels` codes."""
    block, form = format.block_size, format.form
    levels = value_table(form)[:n_levels]
    search_rule = rule(np.outer([1 / levels[-1], 1 / levels[0]], REACH), signed=True)

    def reference(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
        codes, d = codebook.few_levels(x, block, form.code_bits == 1)
        return format.pack_blocks(code=codes, d=d)

    def search_rows(x: Floats, importance: Floats | None, counts: Floats) -> Bytes:
        found = search(x, weights(importance, counts), levels, search_rule, block, block)
        return format.pack_blocks(code=found.chosen.reshape(len(x), -1), d=found.d)

    return BlockQuantizer(reference, search_rows, takes_importance=False)


QUANTIZERS = {
    "iq4_nl": BlockQuantizer(_reference_iq4_nl, _search_iq4_nl),
    "iq4_xs": BlockQuantizer(_reference_iq4_xs, _search_iq4_xs),
    "mxfp4": BlockQuantizer(_reference_mxfp4, _search_mxfp4, takes_importance=False),
    "nvfp4": BlockQuantizer(_reference_nvfp4, _search_nvfp4, takes_importance=False),
    "q1_0": _few_levels(ternary.Q1_0, 2),
    "q2_0": _few_levels(ternary.Q2_0, 4),
    "tq1_0": _few_levels(ternary.TQ1_0, 3),
    "tq2_0": _few_levels(ternary.TQ2_0, 3),
}
