"""The gated delta rule on CUDA devices: launches of `delta_rule.cu`."""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.state_format import KINDS, POINTERS

_COLUMNS = 32  # of the state in a thread block
_MAX_WARPS = 32


@functools.cache
def _kernel(rows: int, kind: int) -> cuda.Kernel:
    return cuda.cpp_kernel(
        __file__, "delta_rule.cu", f"gated_delta_rule<{rows}, {kind}>",
        f"f32* q, f32* k, f32* v, f32* g, f32* beta, {POINTERS[kind]} state, i32* indptr, "
        "i32* state_indices, i32*? positions, f32* out, i32 N, i32 Hk, i32 Hv, i32 Dk, "
        "i32 Dv, i64 q_token, i64 k_token, i64 v_token, i64 g_token, i64 beta_token, "
        "i64 out_token, i32 g_head, i32 g_row, f32 scale, i32 normalize, i32 chunked",
    )  # fmt: skip


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    indptr: Any,
    state_indices: Any,
    start_positions: Any,
    scale: float,
    normalize_qk: bool,
    chunked: bool,
    out: Any,
) -> None:
    """See `nbflow_kernels.gated_delta_rule`.

    Every token is a step; `start_positions` and `chunked` say where the state is rounded.
    """
    T, Hk, Dk = q.shape
    Hv, Dv = v.shape[1:]
    if not T:
        return
    rows = 8 if Dk <= 64 else 32
    n_warps = cuda.ceil_div(Dk, rows)
    if n_warps > _MAX_WARPS:
        raise UsageError(
            f"q must have at most {rows * _MAX_WARPS} numbers per head on a CUDA device, got {Dk}"
        )
    tokens = [a.strides[0] // a.itemsize for a in (q, k, v, g, beta, out)]
    g_head, g_row = (Dk, 1) if g.ndim == 3 else (1, 0)
    _kernel(rows, KINDS[state.dtype.name])(
        (cuda.ceil_div(Dv, _COLUMNS), Hv, len(state_indices)), 32 * n_warps,
        (
            q, k, v, g, beta, state, indptr, state_indices, start_positions, out, len(state), Hk,
            Hv, Dk, Dv, *tokens, g_head, g_row, scale, int(normalize_qk), int(chunked),
        ),
    )  # fmt: skip
