"""Gates on the CPU: row by row, 16 columns at a time."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.activation.cpu import ACTIVATIONS, activated
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_math import keep_nan, softplus
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to

IDENTITY = -1
GATES = {"sigmoid": ACTIVATIONS["sigmoid"], "silu": ACTIVATIONS["silu"], "identity": (-1, 0.0, 0.0)}
_COST = 16  # multiply-adds per element, for the decision to use more than one thread


def gated_product(gate, x, activation, out):
    """See `nbflow_kernels.gated_product`; the gate may also be one row (I,) for all."""
    hold(gate, x, out)
    T, width = out.shape
    gate_bytes = gate.strides[0] if gate.ndim == 2 else 0
    parallel_for(
        _gated_product, T, T * width * _COST,
        address_of(gate), gate_bytes, address_of(x), x.strides[0],
        address_of(out), out.strides[0], width, *GATES[activation],
    )  # fmt: skip


def clip(x, limit, out):
    """See `nbflow_kernels.clip`."""
    hold(x, out)
    T, width = out.shape
    parallel_for(
        _clip, T, float(T * width),
        address_of(x), x.strides[0], address_of(out), out.strides[0], width, limit,
    )  # fmt: skip


def log_decay(x, rate, bias, out):
    """See `nbflow_kernels.log_decay`."""
    hold(x, rate, bias, out)
    T, width = out.shape
    parallel_for(
        _log_decay, T, T * width * 2 * _COST,
        address_of(x), x.strides[0], address_of(rate), address_of(bias),
        address_of(out), out.strides[0], width,
    )  # fmt: skip


def extend_heads(x, numbers, exponential, out):
    """See `nbflow_kernels.extend_heads`."""
    parallel_for(_extend_heads, len(x), float(out.size), x, numbers, exponential, out)


@jit.kernel
def _extend_heads(x, numbers, exponential, out, start, stop):
    """Compute rows [start, stop)."""
    D = x.shape[2]
    for t in range(start, stop):
        for h in range(x.shape[1]):
            for i in range(D):
                out[t, h, i] = x[t, h, i]
            number = numbers[t, h]
            out[t, h, D] = np.float32(np.exp(np.float64(number))) if exponential else number
            for i in range(D + 1, out.shape[2]):
                out[t, h, i] = np.float32(0.0)


@jit.kernel
def _gated_product(
    gate, gate_bytes, x, x_bytes, out, out_bytes, width, code, linear, cubic, start, stop
):
    """Compute rows [start, stop)."""
    for t in range(start, stop):
        for i in range(0, width, 16):
            n = width - i
            v = load_up_to(gate + t * gate_bytes + 4 * i, n)
            if code != IDENTITY:
                v = activated(v, code, linear, cubic)
            v = simd.mul(v, load_up_to(x + t * x_bytes + 4 * i, n))
            store_up_to(out + t * out_bytes + 4 * i, n, v)


@jit.kernel
def _clip(x, x_bytes, out, out_bytes, width, limit, start, stop):
    """Compute rows [start, stop)."""
    for t in range(start, stop):
        for i in range(0, width, 16):
            n = width - i
            v = load_up_to(x + t * x_bytes + 4 * i, n)
            y = simd.maximum(simd.minimum(v, simd.splat(limit)), simd.splat(-limit))
            store_up_to(out + t * out_bytes + 4 * i, n, keep_nan(y, v))


@jit.kernel
def _log_decay(x, x_bytes, rate, bias, out, out_bytes, width, start, stop):
    """Compute rows [start, stop)."""
    for t in range(start, stop):
        for i in range(0, width, 16):
            n = width - i
            v = simd.add(load_up_to(x + t * x_bytes + 4 * i, n), load_up_to(bias + 4 * i, n))
            v = simd.mul(load_up_to(rate + 4 * i, n), softplus(v))
            store_up_to(out + t * out_bytes + 4 * i, n, v)
