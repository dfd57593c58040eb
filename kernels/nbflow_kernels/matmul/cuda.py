"""Matrix product on CUDA devices with weights stored row by row.

Float16 and bfloat16 go to tensor cores (`tensor_cores`).  Here are float32, rows that are not whole
pieces of 16 bytes, and groups of tokens with a matrix each: `cuda_simt.cu` reads a weight once for
8 tokens and computes in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbflow_kernels.cuda import Kernel, address, ceil_div, cpp_kernel
from nbflow_kernels.matmul import cuda_mma

ROWS = 32  # of a thread block: 8 warps with 4 each
KINDS = {"float32": (0, "f32"), "float16": (1, "f16"), "uint16": (2, "bf16")}


def matmul(x: Any, w: Any, bias: Any, accumulate: bool, out: Any) -> None:
    """See `nbflow_kernels.matmul`."""
    multiply(x, w, bias, accumulate, out)


def multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, indptr: Any = None, rows: Any = None
) -> None:
    """Multiply rows by a matrix (N, K), or each segment of `indptr` by its own of (E, N, K)."""
    if indptr is None and len(out) and cuda_mma.fits(w):
        cuda_mma.multiply(x, w, bias, accumulate, out)
        return
    _multiply(x, w, bias, accumulate, out, 1 if indptr is None else len(w), indptr, rows, (0, 0))


def bands(x: Any, w: Any, out: Any) -> None:
    """Multiply bands of columns by a matrix each: ``out[:, h] = x[:, h] @ w[h].T``.

    `x` is (T, H, K), `w` (H, N, K), `out` (T, H, N); the bits are those of band by band.
    """
    if not out.size:
        return
    if not cuda_mma.fits(w):
        apart = x.strides[1] // 4, out.strides[1] // 4
        _multiply(x, w, None, False, out, len(w), None, None, apart)
        return
    step = max(1, cuda_mma.BANDS_AT_ONCE // len(w))
    for row in range(0, len(x), step):
        part = slice(row, row + step)
        staged = cuda_mma.stage(x[part], w.dtype.name)
        cuda_mma.multiply_staged(staged, w, None, False, out[part])


def _multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, n_matrices: int, indptr: Any, rows: Any,
    bands: tuple[int, int],
) -> None:  # fmt: skip
    """Launch `cuda_simt.cu`; `bands` are their strides in `x` and `out`, in numbers."""
    (n_rows, n_columns), n_tokens = w.shape[-2:], len(out)
    if not n_tokens or not n_rows or not n_matrices:
        return
    x_stride, out_stride = x.strides[0] // 4, out.strides[0] // 4
    wide = n_columns % 8 == 0 and x_stride % 4 == 0 and bands[0] % 4 == 0
    wide = wide and not (w.size and address(w) % 16) and not (x.size and address(x) % 16)
    tokens = next((n for n in (1, 2, 4, 8) if n >= n_tokens), 8)
    kind, name = KINDS[w.dtype.name]
    _kernel(kind, name, tokens, wide)(
        (ceil_div(n_rows, ROWS), min(ceil_div(n_tokens, tokens), 4096), n_matrices), 256,
        (
            x, w, bias, out, indptr, rows, x_stride, out_stride, n_tokens, n_rows, n_columns,
            int(accumulate), *bands,
        ),
    )  # fmt: skip


@cache
def _kernel(kind: int, name: str, tokens: int, wide: bool) -> Kernel:
    """Return the kernel for a type of weights."""
    parameters = (
        f"f32* x, {name}* w, f32*? bias, f32* out, i32*? indptr, i32*? rows, i64 x_stride, "
        "i64 out_stride, i32 n_tokens, i32 n_rows, i32 n_columns, i32 accumulate, i64 x_band, "
        "i64 out_band"
    )
    entry = f"matmul<{kind}, {tokens}, {str(wide).lower()}>"
    return cpp_kernel(__file__, "cuda_simt.cu", entry, parameters)
