"""Search for formats with a table of levels (quantizer "search"); see `two_level_scales`."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.llvm import LANES
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.quantizers.search import single_scale
from nbflow_kernels.quantizers.search.two_level_scales import (
    Rule,
    SearchResult,
    empty_result,
    search_rows,
)

COST = 800.0  # operations per weight, for the choice of thread count


def search(
    x: Floats, weight: Floats, levels: Floats, rule: Rule, block: int, sub_block: int
) -> SearchResult:
    """Return rows of weights (rows, K) as indices of ascending levels.

    `weight` (1 or rows, K) weighs the squared error of each weight.
    """
    middles = (levels[1:] + levels[:-1]) / 2
    if block == sub_block and rule.by == 0:
        blocks = x.reshape(-1, block)
        codes, d = np.empty(blocks.shape, np.uint8), np.empty(len(blocks), np.uint16)
        parallel_for(
            single_scale.search, -(-len(blocks) // LANES), COST * x.size, blocks, weight,
            x.shape[1] // block, levels, middles, rule, codes, d,
        )  # fmt: skip
        scales = np.zeros((len(x), len(blocks) // len(x)), np.int16)
        return SearchResult(codes.reshape(len(x), -1, block), scales, d.reshape(len(x), -1))
    out = empty_result(x, block, sub_block, sub_block)
    tables = levels, middles
    parallel_for(_search, len(x), COST * x.size, x, weight, tables, rule, *out)
    return out


@jit.kernel
def _search(x, weight, tables, rule, chosen, scales, d, start, stop):
    search_rows(_evaluate, x, weight, tables, rule, chosen, scales, d, start, stop)


@jit.device_function
def _evaluate(value, weight, step, tables, out, scratch):
    """Choose the nearest levels of a sub-block; see `two_level_scales.search_rows`."""
    levels, middles = tables
    n = len(value)
    inverse = np.float32(1) / step if step != 0 else np.float32(0)
    for j in range(n):
        out[j] = 0
    for level in range(len(middles)):  # counts the levels passed: vectorized this way round
        middle = middles[level]
        for j in range(n):
            out[j] += value[j] * inverse >= middle
    error, qx, qq = np.float32(0), np.float32(0), np.float32(0)
    for j in range(n):
        q = levels[out[j]]
        wq = weight[j] * q
        difference = step * q - value[j]
        error += weight[j] * difference * difference
        qx += wq * value[j]
        qq += wq * q
    return error, qx, qq
