"""How fast this processor multiplies and adds: the bounds the benchmark compares kernels with.

The loops work in registers only: 12 independent chains, more than any processor of today needs to
hide the latency of its multiply-adds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_int8
from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads, split_rows
from nbflow_kernels.errors import unknown_name

CHAINS = 12
_STEPS = 20_000  # of a loop: 120 to 500 microseconds, a pause by the system is seldom in it


@jit.kernel
def _f32(steps, data, out, start, stop):
    """Add 12 x 16 products `steps` times, for each row of `out`."""
    a, b = simd.load_f32(simd.address(data)), simd.load_f32(simd.address(data) + 64)
    for row in range(start, stop):
        c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = c8 = c9 = c10 = c11 = a
        for _ in range(steps):
            c0, c1, c2 = simd.fma(a, c0, b), simd.fma(a, c1, b), simd.fma(a, c2, b)
            c3, c4, c5 = simd.fma(a, c3, b), simd.fma(a, c4, b), simd.fma(a, c5, b)
            c6, c7, c8 = simd.fma(a, c6, b), simd.fma(a, c7, b), simd.fma(a, c8, b)
            c9, c10, c11 = simd.fma(a, c9, b), simd.fma(a, c10, b), simd.fma(a, c11, b)
        low = simd.add(simd.add(simd.add(c0, c1), simd.add(c2, c3)), simd.add(c4, c5))
        high = simd.add(simd.add(simd.add(c6, c7), simd.add(c8, c9)), simd.add(c10, c11))
        simd.store_f32(simd.address(out) + 64 * row, simd.add(low, high))


@jit.kernel
def _int8(steps, data, out, start, stop):
    """Add 12 x 64 products of bytes `steps` times, for each row of `out`."""
    u, s = simd_int8.load_bytes(simd.address(data)), simd_int8.load_bytes(simd.address(data) + 64)
    for row in range(start, stop):
        c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = c8 = c9 = c10 = c11 = simd.splat_i32(row)
        for _ in range(steps):
            c0, c1, c2 = _dot(c0, u, s), _dot(c1, u, s), _dot(c2, u, s)
            c3, c4, c5 = _dot(c3, u, s), _dot(c4, u, s), _dot(c5, u, s)
            c6, c7, c8 = _dot(c6, u, s), _dot(c7, u, s), _dot(c8, u, s)
            c9, c10, c11 = _dot(c9, u, s), _dot(c10, u, s), _dot(c11, u, s)
        low = simd.add(simd.add(simd.add(c0, c1), simd.add(c2, c3)), simd.add(c4, c5))
        high = simd.add(simd.add(simd.add(c6, c7), simd.add(c8, c9)), simd.add(c10, c11))
        simd.store_i32(simd.address(out) + 64 * row, simd.add(low, high))


@jit.kernel
def _bf16(steps, data, out, start, stop):
    """Add 12 x 32 products of bfloat16 `steps` times, for each row of `out`."""
    a, b = simd.load_i32(simd.address(data)), simd.load_i32(simd.address(data) + 64)
    for row in range(start, stop):
        c0 = c1 = c2 = c3 = c4 = c5 = c6 = c7 = c8 = c9 = c10 = c11 = simd.splat(1.0)
        for _ in range(steps):
            c0, c1, c2 = _pairs(c0, a, b), _pairs(c1, a, b), _pairs(c2, a, b)
            c3, c4, c5 = _pairs(c3, a, b), _pairs(c4, a, b), _pairs(c5, a, b)
            c6, c7, c8 = _pairs(c6, a, b), _pairs(c7, a, b), _pairs(c8, a, b)
            c9, c10, c11 = _pairs(c9, a, b), _pairs(c10, a, b), _pairs(c11, a, b)
        low = simd.add(simd.add(simd.add(c0, c1), simd.add(c2, c3)), simd.add(c4, c5))
        high = simd.add(simd.add(simd.add(c6, c7), simd.add(c8, c9)), simd.add(c10, c11))
        simd.store_f32(simd.address(out) + 64 * row, simd.add(low, high))


_dot, _pairs = simd_int8.dot_u7_i8, register_tiles.add_pairs

_KERNELS: dict[str, tuple[Any, int]] = {"f32": (_f32, 16), "bf16": (_bf16, 32), "int8": (_int8, 64)}
"""Arithmetic to its loop and the multiply-adds of one vector."""


def compute_peak(arithmetic: str, threads: int | None = None) -> float:
    """Measure how many operations a second the processor does in registers.

    Parameters
    ----------
    arithmetic : {"f32", "bf16", "int8"}
        float32 multiply-adds, products of pairs of bfloat16 added in float32, or products of bytes
        added in 32 bits.
    threads : int, optional
        By default those of the calling thread's team.

    Returns
    -------
    float
        Operations per second, a multiply-add counted as two; the fastest of 30 loops.

    Raises
    ------
    UsageError
        If `arithmetic` is unknown, or `threads` is not between 1 and 1024.

    Examples
    --------
    >>> from nbflow_kernels.benchmarks.roofline import compute_peak
    >>> compute_peak("f32", 1) > 1e9
    True
    """
    if arithmetic not in _KERNELS:
        raise unknown_name("arithmetic", arithmetic, _KERNELS)
    before = get_num_threads()
    n = before if threads is None else threads
    kernel, lanes = _KERNELS[arithmetic]
    data = np.full(32, 0.5, np.float32)
    if arithmetic == "int8":
        data = np.ones(128, np.int8)
    out = np.zeros((n, 16), np.int32 if arithmetic == "int8" else np.float32)
    operations = 2.0 * CHAINS * lanes * _STEPS * n
    seconds = []
    set_num_threads(n)
    try:
        for _ in range(31):
            started = time.perf_counter()
            split_rows(kernel, n, 1e12, _STEPS, data, out)
            seconds.append(time.perf_counter() - started)
    finally:
        set_num_threads(before)
    assert out.any(), "the loops did nothing"
    return operations / min(seconds[1:])
