"""Activations on the CPU: one kernel for all functions, row by row, 16 columns at a time.

Most are ``x * g(x)``: with a logistic function of x (SiLU, quick GELU) or of a cubic in x (the
tanh form of GELU), or with the normal distribution function (GELU).
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.activation.swigluoai import NAME, swigluoai_numbers
from nbflow_kernels.cpu import jit, simd, simd_shuffle
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_math import keep_nan, one_plus_exp, sigmoid
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to

LOGISTIC, NORMAL, RELU, RELU2, SIGMOID, CLAMPED = range(6)
COST = 16  # multiply-adds per element, for the decision to use more than one thread

Activation = tuple[int, float, float]
"""Function code and its two parameters: linear and cubic factor, or alpha and limit."""

# SiLU: x * logistic(1 * x + 0 * x**3).  0.5 * (1 + tanh(u)) = logistic(2 * u) gives GELU's tanh
# form with u = sqrt(2 / pi) * (x + 0.044715 * x**3).
ACTIVATIONS: dict[str, Activation] = {
    "silu": (LOGISTIC, 1.0, 0.0),
    "gelu": (NORMAL, 0.0, 0.0),
    "gelu_tanh": (LOGISTIC, 2.0 * (2.0 / np.pi) ** 0.5, 0.044715 * 2.0 * (2.0 / np.pi) ** 0.5),
    "gelu_quick": (LOGISTIC, 1.702, 0.0),
    "relu": (RELU, 0.0, 0.0),
    "relu2": (RELU2, 0.0, 0.0),
    "sigmoid": (SIGMOID, 0.0, 0.0),
}
GATED = (*ACTIVATIONS, NAME)
"""Functions of a gate; the last one takes gate and up projection together."""


def glu(x, activation, gate_first, out):
    """Compute `nbflow_kernels.glu` with any of `GATED`; rows of `x` and `out` may be strided.

    ``swigluoai`` may have other numbers (`swigluoai_numbers`).
    """
    hold(x)
    first = address_of(x)
    second = first + out.shape[1] * 4
    gate, up = (first, second) if gate_first else (second, first)
    numbers = swigluoai_numbers(activation)
    function = ACTIVATIONS[activation] if numbers is None else (CLAMPED, *numbers)
    _run(function, gate, up, x.strides[0], False, out)


def swigluoai_and_mul(x, alpha, limit, interleaved, out):
    """See `nbflow_kernels.swigluoai_and_mul`."""
    hold(x)
    gate = address_of(x)
    up = gate + 4 * (1 if interleaved else out.shape[1])
    _run((CLAMPED, alpha, limit), gate, up, x.strides[0], interleaved, out)


def elementwise(x, activation, out):
    """Apply one of `ACTIVATIONS` to every element."""
    hold(x)
    _run(ACTIVATIONS[activation], address_of(x), 0, x.strides[0], False, out)


def _run(activation, gate, up, row_bytes, interleaved, out):
    """Divide the rows of `out` (T, I) among the threads; `up` is 0 without a gate."""
    T, width = out.shape
    hold(out)
    parallel_for(
        activate_rows, T, T * width * COST,
        gate, up, row_bytes, interleaved, address_of(out), out.strides[0], width, *activation,
    )  # fmt: skip


@jit.device_function(inline="llvm")
def times_logistic(v, linear, cubic):
    """Return v times the logistic function of linear * v + cubic * v**3; NaN for -infinity."""
    # beyond +-1e12 the function is 0 or 1 for every use here; the limit keeps the cube finite
    u = simd.maximum(simd.minimum(v, simd.splat(1e12)), simd.splat(-1e12))
    slope = simd.fma(simd.mul(u, u), simd.splat(cubic), simd.splat(linear))
    return simd.div(v, one_plus_exp(simd.sub(simd.splat(0.0), simd.mul(u, slope))))


@jit.device_function(inline="llvm")
def _normal(v):
    """Return v times the normal distribution function of v, accurate to float32 in both tails.

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
    # from |v| = 15 on, where `simd.exp` is clamped, the tail is 0 (and 0 * infinity must not occur)
    seen = simd.minimum(
        simd.maximum(simd.sub(simd.splat(15.0), a), simd.splat(0.0)), simd.splat(1.0)
    )
    tail = simd.mul(simd.mul(simd.minimum(half, simd.splat(1e4)), simd.mul(t, e)), seen)
    return simd.sub(positive, tail)


@jit.device_function(inline="llvm")
def _clamped(gate, up, alpha, limit):
    """Return (up + 1) * gate * logistic(alpha * gate), both clamped to the limit."""
    high, low = simd.splat(limit), simd.splat(-limit)
    g = keep_nan(simd.minimum(gate, high), gate)
    u = keep_nan(simd.maximum(simd.minimum(up, high), low), up)
    return simd.mul(simd.add(u, simd.splat(1.0)), times_logistic(g, alpha, 0.0))


@jit.device_function(inline="llvm")
def activated(v, code, linear, cubic):
    """Return the activation of 16 elements."""
    if code == LOGISTIC:
        return times_logistic(v, linear, cubic)
    if code == NORMAL:
        return _normal(v)
    if code == SIGMOID:
        return sigmoid(v)
    y = keep_nan(simd.maximum(v, simd.splat(0.0)), v)
    return simd.mul(y, y) if code == RELU2 else y


@jit.kernel(unroll=False)
def activate_rows(
    gate, up, row_bytes, interleaved, out, out_row_bytes, width, code, linear, cubic, start, stop
):
    """Compute rows [start, stop)."""
    step = 8 if interleaved else 4  # bytes from column to column
    for t in range(start, stop):
        for i in range(0, width, 16):
            gate_at = gate + t * row_bytes + i * step
            up_at = up + t * row_bytes + i * step
            n = width - i
            if up == 0:
                v = activated(load_up_to(gate_at, n), code, linear, cubic)
            else:
                if interleaved:
                    v, w = load_up_to(gate_at, 2 * n), load_up_to(gate_at + 64, 2 * n - 16)
                    v, w = simd_shuffle.evens(v, w), simd_shuffle.odds(v, w)
                else:
                    v, w = load_up_to(gate_at, n), load_up_to(up_at, n)
                if code == CLAMPED:
                    v = _clamped(v, w, linear, cubic)
                else:
                    v = simd.mul(activated(v, code, linear, cubic), w)
            store_up_to(out + t * out_row_bytes + i * 4, n, v)
