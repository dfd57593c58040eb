"""GPTQ as derived in the paper, in float64: the inverse Hessian is reduced column by column."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.quantizers.affine_grid import affine_grid, with_codes
from nbflow_kernels.quantizers.registry import quantize_rows


def gptq_rows(format: QuantFormat, x: Floats, hessian: np.ndarray, importance: np.ndarray) -> Bytes:
    """Return the bytes of rows (N, K), K whole blocks, for a positive definite `hessian` (K, K).

    Equations 2 and 3 of arXiv:2210.17323 (those of Optimal Brain Quantization), columns in order;
    `importance` (K,) weighs the choice of each block's scales.
    """
    moving, block = x.astype(np.float64), format.block_size
    inverse = np.linalg.inv(hessian)
    codes, parts = np.empty(x.shape, np.uint8), []
    for j in range(x.shape[1]):
        if j % block == 0:
            now = np.ascontiguousarray(moving[:, j : j + block], np.float32)
            weight = np.ascontiguousarray(importance[None, j : j + block], np.float32)
            parts.append(quantize_rows(format, now, block, "search", weight))
            grid = affine_grid(format, parts[-1])
        nearest = grid.nearest(np.repeat(moving[:, j : j + 1], block, axis=1))
        codes[:, j] = nearest[:, j % block]
        error = moving[:, j] - grid.values(nearest)[:, j % block]
        moving -= np.outer(error / inverse[j, j], inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return with_codes(format, np.concatenate(parts, axis=1), codes)
