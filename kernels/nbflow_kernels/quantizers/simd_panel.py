"""SIMD across blocks: panels of 16 blocks, one per lane.

A quantizer sums over the weights of a block in the published order, so it cannot be vectorized
within a block.  Here each lane holds a block: vector i of a *panel* has weight i of 16 blocks, and
each step of a quantizer is one instruction for 16 blocks.

Vectors are compared and selected by `nbflow_kernels.cpu.simd_compare`.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.simd import LANES
from nbflow_kernels.cpu.simd_compare import choose, less

VECTOR = 64  # bytes


# ---- panels -------------------------------------------------------------------------------------


@jit.device_function(strict=True)
def load_panel(source, first, panel):
    """Write 16 blocks of `source` (blocks, size) from `first` on to `panel` (size, 16).

    Lanes behind the last block hold copies of it.
    """
    for lane in range(LANES):
        block = source[min(first + lane, len(source) - 1)]
        for i in range(panel.shape[0]):
            panel[i, lane] = block[i]


@jit.device_function(strict=True)
def load_importance(importance, blocks, first, panel):
    """Write importance (1 or rows, columns) of 16 blocks to a panel; a row has `blocks` blocks."""
    size = panel.shape[0]
    for lane in range(LANES):
        block = first + lane
        row, column = block // blocks % len(importance), block % blocks * size
        for i in range(size):
            panel[i, lane] = importance[row, column + i]


@jit.device_function(strict=True)
def store_panel(panel, first, target):
    """Write a panel (size, 16) of small integers to blocks of `target`."""
    for lane in range(min(LANES, len(target) - first)):
        block = target[first + lane]
        for i in range(panel.shape[0]):
            block[i] = np.int32(panel[i, lane])


# ---- vectors ------------------------------------------------------------------------------------


@jit.device_function(strict=True)
def clip(v, low, high):
    """Clamp lanes to the vectors `low` and `high`; NaN gives `low`.

    One instruction per bound on x86, where `simd.maximum` takes three to pass over NaN.
    """
    v = choose(less(low, v), v, low)
    return choose(less(v, high), v, high)
