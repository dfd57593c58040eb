"""CPU GEMV of block formats (q4_0, q4_k, ...) with float32 activations.

Weights are dequantized in registers to ``scale * value + base``, the float32 that `dequantize`
gives.  Order of additions of one output, as in `nbflow_kernels.matmul.cpu_packed_tiles`: chain j of
4 adds columns j, j + 4, ... one after the other (fused multiply-add), the result is (chain 0 +
chain 1) + (chain 2 + chain 3), plus the bias, plus the old output.  As plain loops:
`nbflow_kernels.matmul.loops.interleaved`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.simd_int8 import broadcast_f32
from nbflow_kernels.cpu.simd_memory import prefetch_lines
from nbflow_kernels.formats.decode_cpu import codes, parameters, weight
from nbflow_kernels.formats.layout_cpu import CpuLayout
from nbflow_kernels.matmul.cpu_packed_tiles import epilogue
from nbflow_kernels.quantized_matmul.cpu_gemv_int8 import LINE, PREFETCH_BYTES_OF_ROWS


@functools.cache
def gemv(form: CpuLayout) -> Any:
    """Return the kernel for row groups [start, stop) and one row of activations.

    Weights are prefetched as by `cpu_gemv_int8.gemv` for several rows: decoding takes longer than
    the memory.
    """
    units, vectors, per_scale = form.block // form.unit, form.unit // 4, form.sub_block // 4
    block, block_bytes = form.block, form.block_bytes
    share = block_bytes // units  # bytes prefetched with each unit
    lines = -(-share // LINE)

    @jit.kernel
    def kernel(x, packed, n_blocks, bias, accumulate, out, start, stop):
        n_whole = x.shape[1] // block
        # x padded with zeros to whole blocks; storage may have several blocks of padding
        tail = np.zeros((n_blocks - n_whole) * block, np.float32)
        for i in range(x.shape[1] - n_whole * block):
            tail[i] = x[0, n_whole * block + i]
        for group in range(start, stop):
            at = simd.address(packed) + group * n_blocks * block_bytes
            x_at = simd.address(x)
            chain0 = chain1 = chain2 = chain3 = simd.splat(0.0)
            for b in range(n_blocks):
                if b == n_whole:
                    x_at = simd.address(tail)
                ahead = at + PREFETCH_BYTES_OF_ROWS
                for unit in range(units):
                    prefetch_lines(ahead, lines)
                    ahead += share
                    for v in range(vectors):
                        s = (unit * vectors + v) // per_scale
                        scale, base = parameters(form, at, s)
                        u = codes(form, at, unit, v)
                        w = weight(form, u, 0, scale, base)
                        chain0 = simd.fma(w, broadcast_f32(x_at), chain0)
                        w = weight(form, u, 1, scale, base)
                        chain1 = simd.fma(w, broadcast_f32(x_at + 4), chain1)
                        w = weight(form, u, 2, scale, base)
                        chain2 = simd.fma(w, broadcast_f32(x_at + 8), chain2)
                        w = weight(form, u, 3, scale, base)
                        chain3 = simd.fma(w, broadcast_f32(x_at + 12), chain3)
                        x_at += 16
                at += block_bytes
            total = simd.add(simd.add(chain0, chain1), simd.add(chain2, chain3))
            epilogue(total, bias, accumulate, out, 0, group)

    return kernel
