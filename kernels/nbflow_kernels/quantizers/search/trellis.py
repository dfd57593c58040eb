"""Viterbi search for trellis-coded formats: the path of least weighted squared error of a block.

For each weight and each of the 2**(12 - k) nodes of the trellis, the least error of all paths to
the node is kept with the choice of the node before: 2**k candidates per node, 4096 per weight.
Nodes are SIMD lanes; each candidate takes two fused multiply-adds, a comparison and two selections,
in a fixed order, so the bytes are the same on every processor and for any number of threads.  In
float64: `nbflow_kernels.quantizers.trellis_reference`.

The error of value v for weight x at scale d is w * (v - x / d)**2 up to a constant,
w * v**2 - 2 * w * (x / d) * v.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_compare import choose, less
from nbflow_kernels.cpu.simd_int8 import store_narrow
from nbflow_kernels.cpu.simd_memory import read_f16, write_f16
from nbflow_kernels.cpu.simd_shuffle import evens, odds
from nbflow_kernels.formats import trellis_code
from nbflow_kernels.formats.registry import Bytes, Floats

BLOCK = 256
LANES = simd.LANES
UNREACHED = 1e30  # error of nodes that no path reaches; errors of paths are below 256 * 2**20
LARGEST_HALF = 65504.0


def search(
    x: Floats,
    weight: Floats,
    bits: int,
    steps: NDArray[np.float32],
    values: Floats | None = None,
) -> tuple[Bytes, NDArray[np.uint16]]:
    """Quantize rows (rows, K) to streams and scales.

    Parameters
    ----------
    x : array of float32, shape (rows, K)
        Weights; K is a multiple of 256.
    weight : array of float32, shape (1 or rows, K)
        Weights of the squared errors; 0 for padding.
    bits : int
        Bits per weight.
    steps : array of float32, shape (n,)
        Scales to try, relative to the root mean square of a block.  For each, the path of least
        error is found, then the scale of least error for this path; the best of all is kept.
    values : array of float32, shape (2**STATE_BITS,), optional
        Values of all states; by default those of the format.

    Returns
    -------
    streams : array of uint8, shape (rows, K / 8 * bits)
    d : array of uint16, shape (rows, K / 256)
        Bits of float16.
    """
    streams = np.empty((len(x), x.shape[1] // 8 * bits), np.uint8)
    d = np.empty((len(x), x.shape[1] // BLOCK), np.uint16)
    if values is None:
        values = trellis_code.codes_of_states(bits).astype(np.float32) - trellis_code.ZERO
    cost = float((1 << trellis_code.STATE_BITS) * len(steps)) / LANES
    parallel_for(
        _kernel(bits), len(x), cost * x.size,
        x, weight, steps, _branch_values(values, bits), streams, d,
    )  # fmt: skip
    return streams, d


def _branch_values(values: Floats, bits: int) -> Floats:
    """Return values of states by newest bits, dropped bits and the bits between."""
    return np.ascontiguousarray(values.reshape(1 << bits, -1, 1 << bits).transpose(0, 2, 1))


@functools.cache
def _kernel(bits: int) -> Any:
    """Return the kernel for rows [start, stop)."""
    n_branches = 1 << bits
    n_nodes = 1 << trellis_code.STATE_BITS - bits
    n_between = n_nodes >> bits
    unreached = np.float32(UNREACHED)

    @jit.device_function
    def advance(errors, before, values, a, b, choices_at):
        """Extend all paths by a weight whose value v has the error v * (a * v + b)."""
        # node = between << bits | dropped: rotate the index, so that lanes are `between`
        for _ in range(bits):
            to, half = simd.address(before), 2 * n_nodes
            for at in range(simd.address(errors), simd.address(errors) + 4 * n_nodes, 8 * LANES):
                first, second = simd.load_f32(at), simd.load_f32(at + 4 * LANES)
                simd.store_f32(to, evens(first, second))
                simd.store_f32(to + half, odds(first, second))
                to += 4 * LANES
            errors, before = before, errors
        a, b = simd.splat(a), simd.splat(b)
        to, from_ = simd.address(before), simd.address(errors)
        value_at = simd.address(values)
        for _ in range(n_branches):
            for i in range(0, 4 * n_between, 4 * LANES):
                least, chosen = simd.splat(unreached), simd.splat_i32(np.int32(0))
                for dropped in range(n_branches):
                    v = simd.load_f32(value_at + 4 * n_between * dropped + i)
                    old = simd.load_f32(from_ + 4 * n_between * dropped + i)
                    error = simd.fma(v, simd.fma(a, v, b), old)
                    better = less(error, least)
                    least = choose(better, error, least)
                    chosen = choose(better, simd.splat_i32(np.int32(dropped)), chosen)
                simd.store_f32(to, least)
                store_narrow(choices_at, chosen)
                to += 4 * LANES
                choices_at += LANES
            value_at += 4 * n_between * n_branches
        return before, errors

    @jit.device_function
    def find_path(x, w, inverse, values, errors, before, choices, states):
        """Write the states of the path of least error."""
        for node in range(n_nodes):
            errors[node] = unreached
        errors[0] = np.float32(0)
        for t in range(BLOCK):
            b = np.float32(-2) * (w[t] * (x[t] * inverse))
            to = simd.address(choices) + t * n_nodes
            errors, before = advance(errors, before, values, w[t], b, to)
        node = 0
        for i in range(n_nodes):
            if errors[i] < errors[node]:
                node = i
        for t in range(BLOCK - 1, -1, -1):
            state = node << bits | np.int64(choices[t, node])
            states[t] = state
            node = state & n_nodes - 1

    @jit.kernel
    def kernel(x, weight, steps, values, streams, d, start, stop):
        errors, before = np.empty(n_nodes, np.float32), np.empty(n_nodes, np.float32)
        choices, states = np.empty((BLOCK, n_nodes), np.uint8), np.empty(BLOCK, np.int64)
        block_x, block_w = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        of_state = np.empty(n_nodes << bits, np.float32)
        for state in range(len(of_state)):
            of_state[state] = values[
                state >> trellis_code.STATE_BITS - bits, state & n_branches - 1,
                state >> bits & n_between - 1,
            ]  # fmt: skip
        scale = np.empty(1, np.uint16)
        for row in range(start, stop):
            for block in range(d.shape[1]):
                size = root_mean_square(x, weight, row, block, block_x, block_w)
                least = np.inf
                d[row, block] = 0
                for i in range(32 * bits):
                    streams[row, 32 * bits * block + i] = 0
                for step in steps:
                    first = size * step
                    inverse = np.float32(1) / first if first > 0 else np.float32(0)
                    if inverse > 1e30:
                        inverse = np.float32(0)
                    find_path(block_x, block_w, inverse, values, errors, before, choices, states)
                    error, bits_of_d = fit(block_x, block_w, size, states, of_state, scale)
                    if error < least:
                        least = error
                        d[row, block] = bits_of_d
                        write_stream(states, streams[row], 32 * bits * block)

    @jit.device_function
    def write_stream(states, stream, at):
        """Write the newest bits of the states to a row's stream from byte `at` on."""
        waiting, n_waiting = 0, 0
        for t in range(BLOCK):
            waiting |= states[t] >> trellis_code.STATE_BITS - bits << n_waiting
            n_waiting += bits
            if n_waiting >= 8:
                stream[at] = waiting & 255
                waiting >>= 8
                n_waiting -= 8
                at += 1

    return kernel


@jit.device_function
def root_mean_square(x, weight, row, block, block_x, block_w):
    """Copy a block, with weights of mean 1, and return its weighted root mean square."""
    w = weight[min(row, len(weight) - 1)]
    norm, squares, largest = 0.0, 0.0, np.float32(0)
    for t in range(BLOCK):
        norm += np.float64(w[BLOCK * block + t])
        largest = max(largest, abs(x[row, BLOCK * block + t]))
    mean = norm / BLOCK
    for t in range(BLOCK):
        block_x[t] = x[row, BLOCK * block + t]
        block_w[t] = np.float32(np.float64(w[BLOCK * block + t]) / mean) if mean > 0 else 1
        squares += np.float64(block_w[t]) * np.float64(block_x[t]) ** 2
    return np.float32(np.sqrt(squares / BLOCK))


@jit.device_function
def fit(x, w, size, states, values, scale):
    """Return the error of a path at its best float16 scale, and the bits of that scale."""
    have, want = 0.0, 0.0
    for t in range(BLOCK):
        v = np.float64(values[states[t]])
        have += np.float64(w[t]) * v * v
        want += np.float64(w[t]) * v * np.float64(x[t])
    best = want / have if have > 0 else 0.0
    at = simd.address(scale)
    write_f16(at, np.float32(max(min(best, LARGEST_HALF), 0.0)))
    d = np.float64(read_f16(at))
    error = 0.0
    for t in range(BLOCK):
        error += np.float64(w[t]) * (d * np.float64(values[states[t]]) - np.float64(x[t])) ** 2
    return error, scale[0]
