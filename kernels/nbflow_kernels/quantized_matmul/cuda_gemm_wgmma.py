"""GEMM by `wgmma` with weights dequantized to bfloat16 in registers: `cuda_gemm_wgmma.cu`.

For compute capability 9.0; the results have the bits of `cuda_dequant_gemm`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbflow_kernels.cuda import Kernel, cpp_kernel, device_of
from nbflow_kernels.formats.layout_mma import MmaLayout, MmaPacked
from nbflow_kernels.matmul import cuda_wgmma

MAX_TOKENS = 128
"""Largest tile: registers hold the sums twice and the weights of two steps."""
WEIGHT_COST = 40
"""L2 traffic of 128 rows of 4-bit weights, in tokens."""
_PARAMETERS = (
    "u8* weights, u8* staged, f32*? bias, f32* out, i64 tile_bytes, i64 out_stride, i32 n_staged, "
    "i32 n_tokens, i32 n_rows, i32 n_columns, i32 n_steps, i32 accumulate"
)


def multiply(x: Any, w: MmaPacked, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply float32 rows by a matrix in the MMA layout, both rounded to bfloat16."""
    device = device_of(x)
    for row in range(0, len(x), cuda_wgmma.MAX_STAGED_TOKENS):
        part = slice(row, row + cuda_wgmma.MAX_STAGED_TOKENS)
        tokens = x[part]
        tiling = cuda_wgmma.tiling(
            len(tokens), w.n_rows, device.n_sms, MAX_TOKENS, WEIGHT_COST, cuda_wgmma.cluster_sizes()
        )
        staged = cuda_wgmma.stage(tokens, "uint16", 1, tiling.tokens, row_major=False)
        kernel(w.form, tiling)(
            (staged.grid_x, tiling.row_tiles(w.n_rows)), cuda_wgmma.THREADS,
            (
                w.data, staged.data, bias, out[part], w.form.tile_bytes(w.n_columns),
                out.strides[0] // 4, staged.n_staged, len(tokens), w.n_rows, w.n_columns,
                staged.n_steps, int(accumulate),
            ),
            cuda_wgmma.ALIGNED + staged.ring_bytes(tiling.cluster),
        )  # fmt: skip


def workspace_bytes(n_rows: int, n_columns: int, n_tokens: int, device: Any) -> dict[str, int]:
    """Return the sizes of the workspaces of `multiply` by name."""
    limits = {"max_tokens": MAX_TOKENS, "weight_cost": WEIGHT_COST}
    return cuda_wgmma.workspace_bytes(n_rows, n_columns, n_tokens, 1, device.n_sms, **limits)


@cache
def kernel(form: MmaLayout, tiling: cuda_wgmma.Tiling) -> Kernel:
    """Return the kernel for a layout and a tiling."""
    return cpp_kernel(
        __file__, "cuda_gemm_wgmma.cu", f"gemm<{tiling.tokens}>", _PARAMETERS,
        defines={**form.defines(), "CLUSTER": tiling.cluster}, arch_specific=True,
    )  # fmt: skip
