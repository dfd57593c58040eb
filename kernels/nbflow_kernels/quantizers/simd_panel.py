"""Panels of 16 blocks, for quantizers that process 16 blocks in lockstep, one in each lane.

A published quantizer adds up the weights of a block in a fixed order, so it cannot be vectorized
within a block.  A *panel* (size, 16) holds weight i of 16 blocks in vector i, and each step of the
quantizer is one instruction for 16 blocks.

"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.simd import LANES

VECTOR = 64  # bytes


# ---- panels -------------------------------------------------------------------------------------


@jit.kernel(strict=True)
def fill_panel(source, first, panel):
    """Write blocks `first`.. of `source` (blocks, size) side by side to `panel` (size, 16).

    Lanes past the last block hold copies of it, which are not read back.
    """
    for lane in range(LANES):
        block = source[min(first + lane, len(source) - 1)]
        for i in range(panel.shape[0]):
            panel[i, lane] = block[i]


@jit.kernel(strict=True)
def fill_importance(importance, blocks, first, panel):
    """Fill a panel with importances (1 or rows, columns) of rows of `blocks` blocks."""
    size = panel.shape[0]
    for lane in range(LANES):
        block = first + lane
        row, column = block // blocks % len(importance), block % blocks * size
        for i in range(size):
            panel[i, lane] = importance[row, column + i]


@jit.kernel(strict=True)
def empty_panel(panel, first, target):
    """Write a panel (size, 16) of small whole numbers back to blocks of `target`."""
    for lane in range(min(LANES, len(target) - first)):
        block = target[first + lane]
        for i in range(panel.shape[0]):
            block[i] = np.int32(panel[i, lane])
