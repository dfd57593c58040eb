"""Products of many tokens with weights decoded to bfloat16 in registers: `cuda_gemm_wgmma.cu`.

Of the devices with `wgmma`; the results have the same bits as by panels (`rounded`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbflow_kernels.cuda import Kernel, cpp_kernel, device_of
from nbflow_kernels.formats.layout_mma import MmaLayout, MmaPacked
from nbflow_kernels.matmul import cuda_wgmma

MOST_TOKENS = 128
"""Of a thread block: registers hold the sums twice, and the weights of two steps."""
WEIGHTS = 40
"""What the second-level cache brings for 128 rows of 4 bits, in tokens."""
_PARAMETERS = (
    "u8* weights, u8* lines, f32*? bias, f32* out, i64 tile_bytes, i64 out_stride, i32 n_staged, "
    "i32 n_tokens, i32 n_rows, i32 n_columns, i32 n_steps, i32 accumulate"
)


def multiply(x: Any, w: MmaPacked, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply float32 rows, rounded to bfloat16, by a matrix in units, rounded to bfloat16."""
    device = device_of(x)
    for row in range(0, len(x), cuda_wgmma.ROWS_AT_ONCE):
        part = slice(row, row + cuda_wgmma.ROWS_AT_ONCE)
        tokens, to = x[part], out[part]
        tiling = cuda_wgmma.tiling(
            len(tokens), w.n_rows, device.n_sms, MOST_TOKENS, WEIGHTS, cuda_wgmma.cluster_sizes()
        )
        lines = cuda_wgmma.stage(tokens, "uint16", 1, tiling.tokens, in_pieces=False)
        kernel(w.form, tiling)(
            (lines.grid_x, tiling.row_tiles(w.n_rows)), cuda_wgmma.THREADS,
            (
                w.data, lines.lines, bias, to, w.form.tile_bytes(w.n_columns),
                to.strides[0] // 4, lines.n_staged, len(tokens), w.n_rows, w.n_columns,
                lines.n_steps, int(accumulate),
            ),
            cuda_wgmma.ALIGNED + lines.ring_bytes(tiling.together),
        )  # fmt: skip


@cache
def kernel(form: MmaLayout, tiling: cuda_wgmma.Tiling) -> Kernel:
    """Return the kernel for a form and a tiling."""
    return cpp_kernel(
        __file__, "cuda_gemm_wgmma.cu", f"unit_tile<{tiling.tokens}>", _PARAMETERS,
        defines={**form.defines(), "CLUSTER": tiling.together}, arch_specific=True,
    )  # fmt: skip
