"""Roofline of this processor: peak arithmetic and the bandwidth of reading memory.

The arithmetic loops work in registers only, with 12 independent chains: enough to hide the latency
of multiply-adds on current processors.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit, register_tiles, simd, simd_int8
from nbflow_kernels.cpu.parallel_for import get_num_threads, parallel_for, set_num_threads
from nbflow_kernels.errors import unknown_name

CHAINS = 12
_STEPS = 20_000  # 120 to 500 microseconds per loop, which the system seldom interrupts
PROBE_BYTES = 384 << 20
"""Default bytes of a pass."""
ROW = 1 << 16  # float32 elements, 256 KB: long streams for the hardware's prefetcher


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
    """Measure the peak operations per second in registers.

    Parameters
    ----------
    arithmetic : {"f32", "bf16", "int8"}
        float32 multiply-adds, products of pairs of bfloat16 added in float32, or products of bytes
        added in 32 bits.
    threads : int, optional
        Number of threads; by default those of the calling thread's pool.

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
            parallel_for(kernel, n, 1e12, _STEPS, data, out)
            seconds.append(time.perf_counter() - started)
    finally:
        set_num_threads(before)
    assert out.any(), "the loops computed nothing"
    return operations / min(seconds[1:])


@jit.kernel
def _read(data, sums, start, stop):
    """Write the sum of each row of `data` to `sums`, with 8 x 16 lanes of loads and adds."""
    for row in range(start, stop):
        a = simd.address(data) + row * data.strides[0]
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = simd.splat(0.0)
        for i in range(a, a + data.shape[1] * 4, 512):
            s0 = simd.add(s0, simd.load_f32(i))
            s1 = simd.add(s1, simd.load_f32(i + 64))
            s2 = simd.add(s2, simd.load_f32(i + 128))
            s3 = simd.add(s3, simd.load_f32(i + 192))
            s4 = simd.add(s4, simd.load_f32(i + 256))
            s5 = simd.add(s5, simd.load_f32(i + 320))
            s6 = simd.add(s6, simd.load_f32(i + 384))
            s7 = simd.add(s7, simd.load_f32(i + 448))
        low = simd.add(simd.add(s0, s1), simd.add(s2, s3))
        high = simd.add(simd.add(s4, s5), simd.add(s6, s7))
        sums[row] = simd.sum(simd.add(low, high))


class ReadProbe:
    """Repeated reads of a large array, the bandwidth to compare kernels with.

    On a shared machine the bandwidth changes within seconds: compare a kernel with passes right
    before and after it.

    Parameters
    ----------
    n_bytes : int, optional
        Bytes of a pass, rounded down to a multiple of 256 KB; by default `PROBE_BYTES`, several
        times the last cache.
    threads : int, optional
        As in `compute_peak`.

    Attributes
    ----------
    n_bytes : int
        Bytes of a pass.
    """

    def __init__(self, n_bytes: int | None = None, threads: int | None = None) -> None:
        n_bytes = n_bytes or PROBE_BYTES
        self._threads = threads
        self._data = np.ones((max(2, n_bytes // (4 * ROW)), ROW), np.float32)
        self._sums = np.empty(len(self._data), np.float32)
        self.n_bytes = self._data.nbytes
        self.seconds()  # compiles

    def seconds(self) -> float:
        """Return the duration of one pass."""
        before = get_num_threads()
        set_num_threads(self._threads or before)
        try:
            started = time.perf_counter()
            parallel_for(_read, len(self._data), float(self._data.size), self._data, self._sums)
            taken = time.perf_counter() - started
        finally:
            set_num_threads(before)
        assert (self._sums == ROW).all(), "the read probe skipped elements"
        return taken

    def bandwidth(self, passes: int = 3) -> float:
        """Return the mean bytes per second of `passes` passes."""
        return passes * self.n_bytes / sum(self.seconds() for _ in range(passes))


def read_bandwidth(threads: int | None = None) -> float:
    """Measure the bandwidth of reading memory, in bytes per second; threads as in `compute_peak`.

    384 MB of float32 are summed by a compiled loop; the fastest of five passes counts, after one
    that touches the pages and compiles.

    Examples
    --------
    >>> from nbflow_kernels.benchmarks.roofline import read_bandwidth
    >>> read_bandwidth(1) > 1e8
    True
    """
    probe = ReadProbe(threads=threads)
    return probe.n_bytes / min(probe.seconds() for _ in range(5))
