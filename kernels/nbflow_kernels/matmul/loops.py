"""Float matrix products as plain loops, with the kernels' order of additions.

`row_major` is the loop of `cpu_gemv` and `cpu_gemm`, `interleaved` that of `cpu_packed` and of the
kernels with quantized weights and float32 activations.  Register tiles interleave the sums of many
outputs, which leaves the order within each sum as it is here.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.scalar_math import fma, tree_sum
from nbflow_kernels.matmul.cpu_gemm import PANEL


@jit.kernel(strict=True)
def row_major(x, w, bias, accumulate, out):
    """Multiply `x` (T, K) by rows of `w` (N, K): 16 sums along K in each panel."""
    for t in range(x.shape[0]):
        for n in range(w.shape[0]):
            y = bias[n] if len(bias) else np.float32(0.0)
            y = out[t, n] + y if accumulate else y
            for first in range(0, w.shape[1], PANEL):
                lanes = np.zeros(16, np.float32)
                for k in range(first, min(first + PANEL, w.shape[1])):
                    lanes[k % 16] = fma(w[n, k], x[t, k], lanes[k % 16])
                y += tree_sum(lanes)
            out[t, n] = y


@jit.kernel(strict=True)
def interleaved(x, w, bias, accumulate, out):
    """Multiply `x` (T, K) by `w` (groups, K, 16), 16 rows interleaved: four chains along K."""
    for t in range(x.shape[0]):
        for n in range(out.shape[1]):
            chains = np.zeros(4, np.float32)
            for k in range(x.shape[1]):
                chains[k % 4] = fma(w[n // 16, k, n % 16], x[t, k], chains[k % 4])
            y = (chains[0] + chains[1]) + (chains[2] + chains[3])
            if len(bias):
                y += bias[n]
            out[t, n] = y + out[t, n] if accumulate else y
