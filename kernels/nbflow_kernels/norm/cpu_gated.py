"""Gated RMS norm on the CPU: group by group, 4 x 16 columns at a time."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_math import sigmoid, silu
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.norm.cpu import sum_of_squares

ACTIVATIONS = ("silu", "sigmoid")
_COST = 20  # multiply-adds per element, for the decision to use more than one thread


def gated_rmsnorm(x, gate, weight, eps, group_size, gate_first, activation, out):
    """See `nbflow_kernels.gated_rmsnorm`; the weight has one number per column, or per group's."""
    T, C = x.shape
    n_groups = C // group_size if group_size else 0
    weight_group = 4 * group_size if weight.shape[0] == C else 0
    hold(x, gate, weight, out)
    parallel_for(
        _gated_rmsnorm, T * n_groups, x.size * _COST,
        address_of(x), x.strides[0], address_of(gate), gate.strides[0],
        address_of(weight), weight_group, address_of(out), out.strides[0], n_groups, group_size,
        eps, gate_first, activation == "silu",
    )  # fmt: skip


@jit.device_function(inline="llvm")
def _gate(v, is_silu):
    """Return the activation of 16 gates."""
    return silu(v) if is_silu else sigmoid(v)


@jit.kernel
def _gated_rmsnorm(
    x, x_bytes, gate, gate_bytes, weight, weight_group_bytes, out, out_bytes, n_groups, size,
    eps, gate_first, is_silu, start, stop
):  # fmt: skip
    """Normalize groups [start, stop), counted row by row."""
    for row in range(start, stop):
        t, group = row // n_groups, row % n_groups
        first = group * size * 4
        a, g = x + t * x_bytes + first, gate + t * gate_bytes + first
        y, w = out + t * out_bytes + first, weight + group * weight_group_bytes
        if gate_first:
            for i in range(0, size, 16):
                n, at = size - i, i * 4
                v = simd.mul(load_up_to(a + at, n), _gate(load_up_to(g + at, n), is_silu))
                store_up_to(y + at, n, v)
            a = y
        mean_square = sum_of_squares(a, size, np.float32(0.0)) / np.float32(size)
        scale = simd.splat(np.float32(1.0) / np.sqrt(mean_square + np.float32(eps)))
        for i in range(0, size, 16):
            n, at = size - i, i * 4
            v = simd.mul(simd.mul(load_up_to(a + at, n), scale), load_up_to(w + at, n))
            if not gate_first:
                v = simd.mul(v, _gate(load_up_to(g + at, n), is_silu))
            store_up_to(y + at, n, v)
