"""Merging attention over parts of the keys: kernels and launchers on the CPU.

A state is the attention output over some keys and its base-2 LSE.  Sums are taken in float64, so
that merging costs one rounding, whatever the number of states.
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.parallel_for import parallel_for

_ALL = np.zeros(0, np.bool_)


def merge_state(
    v_a: np.ndarray,
    s_a: np.ndarray,
    v_b: np.ndarray,
    s_b: np.ndarray,
    v_out: np.ndarray,
    s_out: np.ndarray,
    mask: np.ndarray | None = None,
) -> None:
    """See `nbflow_kernels.merge_state`; tokens where `mask` is False are not written."""
    T, H, D = v_a.shape
    rows = [a.reshape(T * H, D) for a in (v_a, v_b, v_out)]
    sums = [a.reshape(T * H) for a in (s_a, s_b, s_out)]
    parallel_for(
        _merge_two, T * H, 4.0 * T * H * D, *rows, *sums, _ALL if mask is None else mask, H
    )


def merge_states(v: np.ndarray, s: np.ndarray, v_out: np.ndarray, s_out: np.ndarray) -> None:
    """See `nbflow_kernels.merge_states`."""
    parallel_for(_merge_many, v.shape[0], 2.0 * v.size, v, s, v_out, s_out)


@jit.kernel
def _merge_two(v_a, v_b, v_out, s_a, s_b, s_out, mask, H, start, stop):
    for row in range(start, stop):
        if len(mask) and not mask[row // H]:
            continue
        a, b = np.float64(s_a[row]), np.float64(s_b[row])
        top = max(a, b)
        if top == -np.inf:
            v_out[row, :] = 0.0
            s_out[row] = -np.inf
            continue
        weight_a, weight_b = 2.0 ** (a - top), 2.0 ** (b - top)
        total = weight_a + weight_b
        s_out[row] = top + math.log2(total)
        for d in range(v_a.shape[1]):
            mixed = weight_a * v_a[row, d] + weight_b * v_b[row, d]
            v_out[row, d] = mixed / total


@jit.kernel
def _merge_many(v, s, v_out, s_out, start, stop):
    _, n_states, H, D = v.shape
    mixed = np.empty(D, np.float64)
    for row in range(start, stop):
        for h in range(H):
            top = -np.inf
            for i in range(n_states):
                x = np.float64(s[row, i, h])
                if x > top or x != x:
                    top = x
            mixed[:] = 0.0
            total = 0.0
            if top == -np.inf:
                top, total = 0.0, 0.0
            else:
                for i in range(n_states):
                    weight = 2.0 ** (np.float64(s[row, i, h]) - top)
                    total += weight
                    for d in range(D):
                        mixed[d] += weight * v[row, i, h, d]
            inverse = 1.0 / total if total != 0.0 else 0.0
            for d in range(D):
                v_out[row, h, d] = mixed[d] * inverse
            s_out[row, h] = top + math.log2(total) if total != 0.0 else -np.inf
