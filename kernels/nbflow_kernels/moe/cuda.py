"""Mixture of experts on CUDA devices: routing, permutation, grouped GEMM, combination.

A grouped GEMM reads `indptr` on the device, so the whole layer can be captured into a graph: each
matrix has its thread blocks, which look up its segment.  A matrix is read once for 8 rows.  With
many rows, or matrices that are not a stack in one format, matrices are multiplied one after the
other instead, for which the host waits for `indptr`.  The bits are the same.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cuda as float_cuda
from nbflow_kernels.quantized_matmul import cuda as quant_cuda
from nbflow_kernels.quantized_matmul import cuda_gemm_wgmma
from nbflow_kernels.quantized_matmul.cuda_dequant_gemm import decodes_tiles, has_mma_layout

MIN_ROWS_TO_SYNC = 16
"""Average rows per matrix from which waiting for `indptr` pays."""

ROUTING = (
    "f32*? bias, i32 E, i32 k, i32 sigmoid, i32 renormalize, i32 n_groups, i32 top_k_groups, "
    "i32 top2_sum, f32 scale, f32 min_score, f32 mixer_margin"
)
"""Parameters of the struct `Routing` in `cuda_topk_routing.cuh`."""
_kernel = partial(cuda.cpp_kernel, __file__, "cuda_route_permute_combine.cu")
_routing = _kernel("routing", f"f32* logits, f32* weights, i32* ids, {ROUTING}")
_count_pairs = _kernel("count_pairs", "i32* ids, i32* counts, i32 n, i32 first_id")
_place_pairs = _kernel(
    "place_pairs",
    "i32* ids, i32* counts, i32* rows, i32* indptr, i32* inverse, i32 n, i32 E, i32 k, "
    "i32 first_id",
)
_combine = _kernel(
    "combine",
    "f32* y, f32* weights, i32* inverse, f32* out, i32 H, i32 k, i32 P, i32 accumulate, i64 y_row, "
    "i64 out_row",
)
_scale_rows = _kernel("scale_rows", "f32* x, f32* gate, f32* y, i32 width, i32 H")
_clear_unused = _kernel(
    "clear_unused", "f32* out, i32* indptr, i64 out_stride, i32 E, i32 n_rows, i32 width"
)


def routing(
    logits: Any, bias: Any, sigmoid: bool, renormalize: bool, n_groups: int, top_k_groups: int,
    top2_sum: bool, scale: float, min_score: float, mixer_margin: float, weights: Any, ids: Any,
) -> None:  # fmt: skip
    """See `nbflow_kernels.moe_routing`."""
    T, E = logits.shape
    if not T:
        return
    args = (
        bias, E, ids.shape[1], int(sigmoid), int(renormalize), n_groups, top_k_groups,
        int(top2_sum), scale, min_score, mixer_margin,
    )  # fmt: skip
    _routing(T, 32, (logits, weights, ids, *args), shared=8 * (2 * E + n_groups))


def permute(ids: Any, rows: Any, indptr: Any, inverse: Any, first_id: int = 0) -> None:
    """See `nbflow_kernels.moe_permute`; the experts are those from `first_id` on."""
    n, E = ids.size, len(indptr) - 1
    if not n:
        indptr[...] = 0
        return
    counts = cuda.device_of(ids).empty((E + 1,), np.int32)
    _count_pairs(E, 256, (ids, counts, n, first_id))
    args = (ids, counts, rows, indptr, inverse, n, E, ids.shape[1], first_id)
    _place_pairs(E + 1, 256, args)


def grouped(
    x: Any, matrices: Any, indptr: Any, bias: Any, out: Any, rows: Any = None,
    activations: str = "f32",
) -> None:  # fmt: skip
    """See `nbflow_kernels.grouped_matmul`.

    `matrices` is an array or `QuantTensor` (E, N, K), or a sequence of matrices.
    """
    E, n_rows = len(indptr) - 1, len(out)
    if not multiplies_at_once(matrices, activations) or n_rows >= MIN_ROWS_TO_SYNC * E:
        _multiply_in_turn(x, matrices, indptr, bias, out, rows, activations)
    elif isinstance(matrices, QuantTensor) and not matrices.is_float:
        if n_rows and matrices.shape[1]:
            arithmetic = _supported(matrices, activations)
            quant_cuda.grouped(
                x, matrices.units(), E, indptr, rows, bias, matrices.shape[1], arithmetic, out
            )
    else:
        stack = matrices.array if isinstance(matrices, QuantTensor) else matrices
        float_cuda.matmul(x, stack, bias, False, out, indptr=indptr, rows=rows)
    if n_rows and out.shape[1]:
        grid = cuda.ceil_div(out.shape[1], 256), min(n_rows, 1024)
        args = (out, indptr, out.strides[0] // 4, E, n_rows, out.shape[1])
        _clear_unused(grid, 256, args)


def multiplies_at_once(matrices: Any, activations: str) -> bool:
    """Return whether one launch can multiply by all matrices."""
    if not isinstance(matrices, QuantTensor):
        return not isinstance(matrices, list | tuple)
    return activations != "bf16" if matrices.is_float else has_units(matrices)


def _supported(w: QuantTensor, activations: str) -> str:
    """Return "f32" instead of "int8" for formats that int8 activations do not multiply."""
    return "f32" if activations == "int8" and not w.format.takes_int8 else activations


def _multiply_in_turn(x, matrices, indptr, bias, out, rows, activations):
    """Multiply by the matrices that have rows, one after the other."""
    if rows is not None:
        x = x[rows]
    for i, (start, stop) in enumerate(pairwise(cuda.to_host(indptr).tolist())):
        if start < stop:
            part, own_bias = slice(start, stop), None if bias is None else bias[i]
            if has_units(matrices):
                units = matrices.units().matrix(i, matrices.shape[1])
                tall = stop - start > quant_cuda.BF16_MAX_ROWS and activations == "bf16"
                if tall and decodes_tiles(cuda.device_of(x), matrices, stop - start):
                    cuda_gemm_wgmma.multiply(x[part], units, own_bias, False, out[part])
                    continue
                arithmetic = _supported(matrices, activations)
                quant_cuda.multiply(x[part], units, own_bias, False, arithmetic, out[part])
            else:
                listed = matrices.matrices() if isinstance(matrices, QuantTensor) else matrices
                matmul(x[part], listed[i], own_bias, out[part], activations)


def has_units(w: Any) -> bool:
    """Return whether the MMA layout holds all of a weight."""
    if not isinstance(w, QuantTensor) or w.outliers is not None or w.column_order is not None:
        return False
    return has_mma_layout(w)


def matmul(x: Any, w: Any, bias: Any, out: Any, activations: str = "f32") -> None:
    """Multiply by a float or quantized matrix."""
    if isinstance(w, QuantTensor):
        quant_cuda.qmatmul(x, w, bias, False, activations, out)
    else:
        float_cuda.matmul(x, w, bias, False, out)


def combine(y: Any, weights: Any, inverse: Any, accumulate: bool, out: Any) -> None:
    """See `nbflow_kernels.moe_combine`."""
    T, H = out.shape
    for t in range(0, T, 65535):  # limit of the grid
        part = slice(t, t + 65535)
        if H:
            _combine(
                (cuda.ceil_div(H, 256), len(out[part])), 256,
                (y, weights[part], inverse[part], out[part], H, weights.shape[1], len(y),
                 int(accumulate), y.strides[0] // 4, out.strides[0] // 4),
            )  # fmt: skip


def scale_rows(x: Any, gate: Any, y: Any) -> None:
    """Multiply row t of `y` by ``sigmoid(x[t] @ gate)``."""
    if len(x):
        _scale_rows(len(x), 256, (x, gate, y, x.shape[1], y.shape[1]))
