"""xIELU on the CPU: row by row, 16 columns at a time."""

from __future__ import annotations

from nbflow_kernels.cpu import jit, simd, simd_compare
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_math import expm1
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to

_COST = 16  # multiply-adds per element, for the decision to use more than one thread


def xielu(x, alpha_p, alpha_n, beta, eps, out):
    """See `nbflow_kernels.xielu`, for rows (T, I)."""
    T, width = out.shape
    hold(x, out)
    parallel_for(
        _xielu, T, T * width * _COST,
        address_of(x), address_of(out), width, alpha_p, alpha_n, beta, eps,
    )  # fmt: skip


@jit.kernel
def _xielu(x, out, width, alpha_p, alpha_n, beta, eps, start, stop):
    """Compute rows [start, stop)."""
    linear, zero = simd.splat(beta), simd.splat(0.0)
    for t in range(start, stop):
        for i in range(0, width, 16):
            at, n = 4 * (t * width + i), width - i
            v = load_up_to(x + at, n)
            positive = simd.mul(v, simd.fma(simd.splat(alpha_p), v, linear))
            power = simd.sub(expm1(simd.minimum(v, simd.splat(eps))), v)
            negative = simd.fma(simd.splat(alpha_n), power, simd.mul(linear, v))
            y = simd_compare.choose(simd_compare.less(zero, v), positive, negative)
            store_up_to(out + at, n, y)
