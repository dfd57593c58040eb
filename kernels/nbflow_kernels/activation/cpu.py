"""Activations on the CPU: one kernel for all, a row at a time, 16 lanes along it.

Everything but ReLU is ``x * g(x)``: with a logistic function of x (SiLU) or of a cubic in x (the
tanh form of GELU), or with the normal distribution function (GELU).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels import simd
from nbflow_kernels._jit import inline, njit
from nbflow_kernels.threads import split_rows

LOGISTIC, NORMAL, RELU = 0, 1, 2
_COST = 16  # multiply-adds per element, for the decision to use more than one thread

# SiLU: x * logistic(1 * x + 0 * x**3).  0.5 * (1 + tanh(u)) = logistic(2 * u) gives GELU's tanh
# form with u = sqrt(2 / pi) * (x + 0.044715 * x**3).
_SILU = (LOGISTIC, 1.0, 0.0)
_TANH = (LOGISTIC, 2.0 * (2.0 / np.pi) ** 0.5, 0.044715 * 2.0 * (2.0 / np.pi) ** 0.5)
_GELU = (NORMAL, 0.0, 0.0)
_RELU = (RELU, 0.0, 0.0)


def silu(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.silu`."""
    _run(_SILU, False, x, out)


def gelu(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.gelu`."""
    _run(_GELU, False, x, out)


def gelu_tanh(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.gelu_tanh`."""
    _run(_TANH, False, x, out)


def relu(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.relu`."""
    _run(_RELU, False, x, out)


def silu_and_mul(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.silu_and_mul`."""
    _run(_SILU, True, x, out)


def gelu_and_mul(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.gelu_and_mul`."""
    _run(_GELU, True, x, out)


def gelu_tanh_and_mul(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.gelu_tanh_and_mul`."""
    _run(_TANH, True, x, out)


def relu_and_mul(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """See `nbflow_kernels.relu_and_mul`."""
    _run(_RELU, True, x, out)


def _run(
    activation: tuple[int, float, float],
    gated: bool,
    x: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Share the rows (T, I) or (T, 2 * I) of `x` among the threads."""
    code, linear, cubic = activation
    work = out.size * _COST
    split_rows(_activate, x.shape[0], work, x, code, linear, cubic, gated, out)


@inline
def _logistic(v: Any, linear: Any, cubic: Any) -> Any:
    """Return v times the logistic function of linear * v + cubic * v**3."""
    # beyond +-1e4 the function is 0 or 1 for every use here; the limit keeps the cube finite
    u = simd.maximum(simd.minimum(v, simd.splat(1e4)), simd.splat(-1e4))
    slope = simd.fma(simd.mul(u, u), simd.splat(cubic), simd.splat(linear))
    e = simd.exp(simd.sub(simd.splat(0.0), simd.mul(u, slope)))
    return simd.div(v, simd.add(simd.splat(1.0), e))


@inline
def _normal(v: Any) -> Any:
    """Return v times the normal distribution function of v, exact to float32 in both tails.

    max(v, 0) - |v| / 2 * erfc(|v| / sqrt(2)), which does not cancel for negative v, and
    erfc(z) = t * exp(-z * z + p(t)) with t = 1 / (1 + z / 2).  p is a least-squares polynomial
    on 4000 Chebyshev nodes of 0 <= z <= 9.4; it is off by less than 4.5e-8.
    """
    a = simd.as_f32(simd.and_(simd.as_i32(v), simd.splat_i32(0x7FFFFFFF)))
    half = simd.mul(a, simd.splat(0.5))
    # z / 2 = |v| / sqrt(8)
    t = simd.div(simd.splat(1.0), simd.fma(a, simd.splat(0.35355339059327373), simd.splat(1.0)))
    p = simd.splat(0.13954682273686905)
    p = simd.fma(p, t, simd.splat(-0.6513414397303249))
    p = simd.fma(p, t, simd.splat(1.0869086040497644))
    p = simd.fma(p, t, simd.splat(-0.6026692372304069))
    p = simd.fma(p, t, simd.splat(-0.15827996268178934))
    p = simd.fma(p, t, simd.splat(0.043063442963854975))
    p = simd.fma(p, t, simd.splat(0.020251359507829636))
    p = simd.fma(p, t, simd.splat(0.3896754405716474))
    p = simd.fma(p, t, simd.splat(0.9982751660002952))
    p = simd.fma(p, t, simd.splat(-1.2654301530512504))
    e = simd.exp(simd.fma(simd.sub(simd.splat(0.0), half), a, p))
    positive = simd.fma(v, simd.splat(0.5), half)
    # the limit keeps infinity times zero out of the tail, which is 0 from |v| = 14 on
    tail = simd.mul(simd.minimum(half, simd.splat(1e4)), simd.mul(t, e))
    return simd.sub(positive, tail)


@njit
def _activate(
    x: Any, code: Any, linear: Any, cubic: Any, gated: Any, out: Any, start: Any, stop: Any
) -> None:
    """Do rows [start, stop); the ragged end of a row goes through the same lanes, padded."""
    width = out.shape[1]
    ends = np.zeros((3, 16), np.float32)  # gate, up, out
    for t in range(start, stop):
        xa = simd.address(x) + t * x.strides[0]
        oa = simd.address(out) + t * out.strides[0]
        if code == RELU:
            for i in range(width):
                gate = x[t, i]
                if gate < 0:  # not true for NaN, which is kept
                    gate = np.float32(0.0)
                out[t, i] = gate * x[t, width + i] if gated else gate
            continue
        for i in range(0, width, 16):
            gate_at = xa + i * 4
            up_at = gate_at + width * 4
            out_at = oa + i * 4
            n = min(16, width - i)
            if n < 16:
                for j in range(n):
                    ends[0, j] = x[t, i + j]
                    if gated:
                        ends[1, j] = x[t, width + i + j]
                gate_at = simd.address(ends)
                up_at = gate_at + 64
                out_at = gate_at + 128
            v = simd.load_f32(gate_at)
            v = _logistic(v, linear, cubic) if code == LOGISTIC else _normal(v)
            if gated:
                v = simd.mul(v, simd.load_f32(up_at))
            simd.store_f32(out_at, v)
            if n < 16:
                for j in range(n):
                    out[t, i + j] = ends[2, j]
