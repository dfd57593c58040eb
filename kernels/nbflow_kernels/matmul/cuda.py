"""Matrix product on CUDA devices with row-major float weights: choice of the kernel.

=====================================================  =============================================
weights, tokens                                        kernel
=====================================================  =============================================
float16 or bfloat16, rows of whole 16 bytes            `cuda_mma`: `gemv` up to 16 tokens, `gemm`
the same, above 64 tokens, compute capability 9.0      `cuda_wgmma`
the same, a matrix per segment                         `cuda_mma.grouped`, by `gemv`
float32, other rows                                    `cuda_simt.cu`: float32 arithmetic, a weight
                                                       is read once for 8 tokens
=====================================================  =============================================

A row of the result does not depend on the number of tokens if `cuda_wgmma` gives the same bits as
`cuda_mma` (`same_bits`).  Where it does not, a log line says so; the environment variable
NBFLOW_WGMMA=0 then keeps results independent of the batch, at the cost of speed.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np

from nbflow_kernels.cuda import Kernel, KernelDevice, address, ceil_div, cpp_kernel, device_of
from nbflow_kernels.matmul import cuda_mma, cuda_wgmma

logger = logging.getLogger(__name__)

ROWS = 32  # of a thread block: 8 warps with 4 each
MIN_WGMMA_TOKENS = 65
"""Below, `cuda_mma.gemm` with its smaller thread blocks is as fast."""
KINDS = {"float32": (0, "f32"), "float16": (1, "f16"), "uint16": (2, "bf16")}


def matmul(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, indptr: Any = None, rows: Any = None
) -> None:
    """See `nbflow_kernels.matmul`; with `indptr` grouped GEMM, `w` (E, N, K) and `rows` of `x`."""
    if len(out) and len(x) and cuda_mma.fits(w):
        if indptr is None:
            multiply_16bit(x, w, bias, accumulate, out)
        else:
            cuda_mma.grouped(x, w, bias, indptr, rows, out)
        return
    _multiply(x, w, bias, accumulate, out, 1 if indptr is None else len(w), indptr, rows, (0, 0))


def multiply_16bit(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, *, rounded: bool = False,
    fragment_order: bool = False,
) -> None:  # fmt: skip
    """Multiply by weights (N, K) that `cuda_mma.fits`; for the options see `cuda_mma.stage`."""
    if use_wgmma(device_of(x), len(x)):
        row_major = not fragment_order
        cuda_wgmma.multiply(x, w, bias, accumulate, out, rounded=rounded, row_major=row_major)
    else:
        cuda_mma.multiply(
            x, w, bias, accumulate, out, rounded=rounded, fragment_order=fragment_order
        )


def workspace_bytes(
    dtype: str, n_rows: int, n_columns: int, n_tokens: int, device: Any, *, rounded: bool = False
) -> dict[str, int]:
    """Return the sizes of a product's workspaces by name; `device` has `n_sms` and `arch`."""
    if dtype not in cuda_mma.KINDS or n_columns % cuda_mma.LOAD_COLUMNS:
        return {}
    if not plans_wgmma(device, n_tokens):
        return cuda_mma.workspace_bytes(dtype, n_columns, n_tokens, rounded)
    n_parts = 1 if rounded else cuda_mma.KINDS[dtype][2]
    limit = cuda_wgmma.max_tile(n_parts)
    return cuda_wgmma.workspace_bytes(
        n_rows, n_columns, n_tokens, n_parts, device.n_sms, max_tokens=limit
    )


def plans_wgmma(device: Any, n_tokens: int) -> bool:
    """Return `use_wgmma` of a device that need not exist; it has `arch`."""
    switch = cuda_wgmma.environment_switch("NBFLOW_WGMMA")
    return n_tokens >= MIN_WGMMA_TOKENS and device.arch == "sm_90" and switch != "0"


def use_wgmma(device: KernelDevice, n_tokens: int) -> bool:
    """Return whether to multiply this many tokens by `wgmma`."""
    return n_tokens >= MIN_WGMMA_TOKENS and wgmma_enabled(device)


def wgmma_enabled(device: KernelDevice) -> bool:
    """Return whether to use the `wgmma` of a device.

    The first call compares its bits with those of `mma.sync` and logs a difference.  The
    environment variable NBFLOW_WGMMA decides without the test: 0, never; 1, always.
    """
    if device.arch != "sm_90":
        return False
    switch = cuda_wgmma.environment_switch("NBFLOW_WGMMA")
    if not switch:
        _compare_once(device)
    return switch != "0"


def _compare_once(device: KernelDevice) -> None:
    """Log if the instructions differ; runs at the first call, hence outside of graphs."""
    key = ("matmul", "wgmma compared")
    if key not in device.constants:
        device.constants[key] = all(same_bits(device, dtype) for dtype in ("float16", "uint16"))
        if not device.constants[key]:
            logger.warning(
                "wgmma and mma.sync round sums differently on this device: the last bits of a "
                "prompt's results depend on how many tokens are in a step; NBFLOW_WGMMA=0 makes "
                "all products use mma.sync"
            )


def same_bits(device: KernelDevice, dtype: str) -> bool:
    """Return whether `wgmma` and `mma.sync` give the same bits for weights of a dtype.

    Terms range from 2**-16 to 2**16 with any sign, so the bits reveal how many terms an instruction
    adds at once and which of their bits it drops.
    """
    rng = np.random.default_rng(0)
    n_rows, n_tokens, n_columns = cuda_wgmma.ROWS, 8, 8 * cuda_wgmma.STEP
    sizes = rng.integers(-8, 9, (2, n_columns))
    w = np.ldexp(rng.standard_normal((n_rows, n_columns)), sizes[0]).astype(np.float32)
    w = w.view(np.uint32) >> 16 if dtype == "uint16" else w.astype(np.float16).view(np.uint16)
    weights = device.asarray(w.astype(np.uint16).view(dtype))
    x = np.ldexp(rng.standard_normal((n_tokens, n_columns)), sizes[1]).astype(np.float32)
    tokens = device.asarray(x)
    outs = [device.empty((n_tokens, n_rows), "f4") for _ in range(2)]
    staged = cuda_mma.stage(tokens, dtype, rounded=True)
    cuda_mma.multiply_staged(staged, weights, None, False, outs[0])
    swizzled = cuda_wgmma.stage(tokens, dtype, 1, 64, row_major=True)
    cuda_wgmma.multiply_staged(swizzled, weights, None, False, outs[1])
    mma, wgmma = (out.get().tobytes() for out in outs)
    return bool(mma == wgmma)


def batched(x: Any, w: Any, out: Any) -> None:
    """Batched product: ``out[:, h] = x[:, h] @ w[h].T``.

    `x` is (T, H, K), `w` (H, N, K), `out` (T, H, N); the bits are those of H single products.
    """
    if not out.size:
        return
    if not cuda_mma.fits(w):
        strides = x.strides[1] // 4, out.strides[1] // 4
        _multiply(x, w, None, False, out, len(w), None, None, strides)
        return
    step = max(1, cuda_mma.MAX_STAGED_ROWS // len(w))
    for row in range(0, len(x), step):
        part = slice(row, row + step)
        staged = cuda_mma.stage(x[part], w.dtype.name)
        cuda_mma.multiply_staged(staged, w, None, False, out[part])


def _multiply(
    x: Any, w: Any, bias: Any, accumulate: bool, out: Any, n_matrices: int, indptr: Any, rows: Any,
    batch_strides: tuple[int, int],
) -> None:  # fmt: skip
    """Launch `cuda_simt.cu`; `batch_strides` are those of `x` and `out`, in numbers."""
    (n_rows, n_columns), n_tokens = w.shape[-2:], len(out)
    if not n_tokens or not n_rows or not n_matrices:
        return
    x_stride, out_stride = x.strides[0] // 4, out.strides[0] // 4
    wide = n_columns % 8 == 0 and x_stride % 4 == 0 and batch_strides[0] % 4 == 0
    wide = wide and not (w.size and address(w) % 16) and not (x.size and address(x) % 16)
    tokens = next((n for n in (1, 2, 4, 8) if n >= n_tokens), 8)
    kind, name = KINDS[w.dtype.name]
    _kernel(kind, name, tokens, wide)(
        (ceil_div(n_rows, ROWS), min(ceil_div(n_tokens, tokens), 4096), n_matrices), 256,
        (
            x, w, bias, out, indptr, rows, x_stride, out_stride, n_tokens, n_rows, n_columns,
            int(accumulate), *batch_strides,
        ),
    )  # fmt: skip


@cache
def _kernel(kind: int, name: str, tokens: int, wide: bool) -> Kernel:
    """Return the kernel for a type of weights."""
    parameters = (
        f"f32* x, {name}* w, f32*? bias, f32* out, i32*? indptr, i32*? rows, i64 x_stride, "
        "i64 out_stride, i32 n_tokens, i32 n_rows, i32 n_columns, i32 accumulate, "
        "i64 x_batch_stride, i64 out_batch_stride"
    )
    entry = f"matmul<{kind}, {tokens}, {str(wide).lower()}>"
    return cpp_kernel(__file__, "cuda_simt.cu", entry, parameters)
