"""Quantizers of GGML's codebook formats: iq4, 4-bit floats, two to four levels.

`nbflow_kernels.quantizers.reference.codebook` names the source of the published ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nbflow_kernels.formats.block_format import E4M3, E8M0, BlockFormat, value_table
from nbflow_kernels.formats.ggml import iq4, mxfp4_nvfp4, ternary
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers.block_formats import BlockQuantizer
from nbflow_kernels.quantizers.reference import codebook
from nbflow_kernels.quantizers.search.codebook import search
from nbflow_kernels.quantizers.search.two_level_scales import Rule, rule

# ---- iq4 ----------------------------------------------------------------------------------------

LEVELS = np.array(iq4.LEVELS, np.float32)
# the first or last level at the largest weight, or up to a quarter below it
_STARTS = np.outer([1 / LEVELS[0], 1 / LEVELS[-1]], 0.9 + 0.05 * np.arange(8))
RULE_NL = rule(_STARTS, signed=True)
RULE_XS = rule(_STARTS, scales=(1, 0, -32, 31), tops=(-32, 31, -31, -30, 29), signed=True)


def _iq4(format: BlockFormat, search_rule: Rule) -> BlockQuantizer:
    """Return the quantizers of iq4_nl or iq4_xs; the first does not store `scale`."""

    def reference(x: Floats, importance: Floats | None) -> Bytes:
        codes, scales, d = codebook.iq4(x, importance, LEVELS, format.block_size)
        return format.pack_blocks(code=codes, scale=scales + 32, d=d)

    def search_rows(x: Floats, weight: Floats) -> Bytes:
        found = search(x, weight, LEVELS, search_rule, format.block_size, 32)
        codes = found.chosen.reshape(len(x), -1)
        return format.pack_blocks(code=codes, scale=found.scales + 32, d=found.d)

    return BlockQuantizer(reference, search_rows)


# ---- 4-bit floats -------------------------------------------------------------------------------

FP4_LEVELS = np.array(mxfp4_nvfp4.LEVELS, np.float32)
ASCENDING, CODES = np.unique(FP4_LEVELS, return_index=True)  # the first 0: not -0
CODES = CODES.astype(np.uint8)
_FP4_STARTS = np.array([1, 1.25, 1.5]) / 12
# The largest weight at E2M1's 6 or at its 4 (J. Cook et al., "Four Over Six", arXiv:2512.02010):
# trying both, the search loses to neither in any block.
FOUR_OVER_SIX = (1 / 12, 1 / 8)
RULE_MXFP4 = rule(_FP4_STARTS, stored=E8M0, plain=FOUR_OVER_SIX)
# candidates from half to twice the ideal scale: the error has many minima
RULE_NVFP4 = rule(
    _FP4_STARTS, stored=E4M3[:127], tops=1.08 ** np.arange(-9, 9), rounds=1, plain=FOUR_OVER_SIX
)


def _fp4(
    format: BlockFormat, search_rule: Rule, scale_bytes: Callable[[Floats], Bytes]
) -> BlockQuantizer:
    """Return the quantizers of a format of 4-bit floats; `scale_bytes` as `codebook.e8m0`."""
    size, stored = format.form.block, np.zeros(256, np.float32)
    stored[: len(search_rule.stored)] = search_rule.stored

    def reference(x: Floats, importance: Floats | None) -> Bytes:
        codes, scales = codebook.fp4(x, FP4_LEVELS, stored, scale_bytes, size)
        return format.pack_blocks(code=codes, d=scales)

    def search_rows(x: Floats, weight: Floats) -> Bytes:
        found = search(x, weight, ASCENDING, search_rule, size, size)
        return format.pack_blocks(code=CODES[found.chosen].reshape(len(x), -1), d=found.d)

    return BlockQuantizer(reference, search_rows, takes_importance=False)


# ---- two to four levels -------------------------------------------------------------------------

# trial values of the highest level, in units of the largest weight
REACH = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def _few_levels(format: BlockFormat, n_levels: int) -> BlockQuantizer:
    """Return the quantizers of a format with `n_levels` codes."""
    block, form = format.block_size, format.form
    levels = value_table(form)[:n_levels]
    search_rule = rule(np.outer([1 / levels[-1], 1 / levels[0]], REACH), signed=True)

    def reference(x: Floats, importance: Floats | None) -> Bytes:
        codes, d = codebook.few_levels(x, block, form.code_bits == 1)
        return format.pack_blocks(code=codes, d=d)

    def search_rows(x: Floats, weight: Floats) -> Bytes:
        found = search(x, weight, levels, search_rule, block, block)
        return format.pack_blocks(code=found.chosen.reshape(len(x), -1), d=found.d)

    return BlockQuantizer(reference, search_rows, takes_importance=False)


QUANTIZERS = {
    "iq4_nl": _iq4(iq4.IQ4_NL, RULE_NL),
    "iq4_xs": _iq4(iq4.IQ4_XS, RULE_XS),
    "mxfp4": _fp4(mxfp4_nvfp4.MXFP4, RULE_MXFP4, codebook.e8m0),
    "nvfp4": _fp4(mxfp4_nvfp4.NVFP4, RULE_NVFP4, codebook.e4m3),
    "q1_0": _few_levels(ternary.Q1_0, 2),
    "q2_0": _few_levels(ternary.Q2_0, 4),
    "tq1_0": _few_levels(ternary.TQ1_0, 3),
    "tq2_0": _few_levels(ternary.TQ2_0, 3),
}
