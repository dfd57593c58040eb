"""Matrix product on the CPU with row-major float weights: choice of the kernel.

=======================  ===========================  ============================================
tokens                   kernel                       loop
=======================  ===========================  ============================================
1, a large weight        `cpu_gemv.gemv`              one row after the other, one address stream
fewer than 64            `cpu_gemm.gemm_rows`         register tiles of 4 rows x 4 tokens
64 and more              `cpu_gemm.gemm_transposed`   panels of 16 rows, transposed, a lane a row
=======================  ===========================  ============================================

Order of additions, the same for every output element however many tokens or threads there are
(`loops.row_major`): K is cut into panels of `PANEL`; within a panel, lane i adds the products of
columns i, i + 16, ... one after the other (fused multiply-add); the lanes are added as a tree
(`simd.sum`); the panels are added, from left to right, to the initial output.  Zeros pad the end of
the last panel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.matmul import cpu_gemm, cpu_gemv

MIN_TRANSPOSED_TOKENS = 64  # below, transposing the weights costs more than it saves
MIN_GEMV_BYTES = 4 << 20  # a weight this large comes from memory, best as one stream of addresses
_NO_BIAS = np.zeros(0, np.float32)


def matmul(
    x: NDArray[np.float32],
    w: NDArray[Any],
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.matmul`."""
    if w.dtype == np.float16:
        w = w.view(np.int16)  # int16 stands for float16 bits, uint16 for bfloat16 bits
    bias = _NO_BIAS if bias is None else bias
    n_tokens, n_items = x.shape[0], w.shape[0]
    kernel = cpu_gemm.gemm_rows
    if n_tokens >= MIN_TRANSPOSED_TOKENS:
        kernel, n_items = cpu_gemm.gemm_transposed, -(-n_items // 16)
    elif n_tokens == 1 and w.nbytes >= MIN_GEMV_BYTES:
        kernel = cpu_gemv.gemv
    parallel_for(kernel, n_items, float(n_tokens * w.size), x, w, bias, accumulate, out)
