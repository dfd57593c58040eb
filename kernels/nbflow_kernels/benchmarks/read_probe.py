"""How fast this machine reads memory: the bound of everything that generates tokens."""

from __future__ import annotations

import time

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads, split_rows

PROBE_BYTES = 384 << 20
"""Bytes of a pass where nothing else is asked for."""
ROW = 1 << 16  # float32 elements, 256 KB: long streams for the hardware's prefetcher


@jit.kernel
def _read(data, sums, start, stop):
    """Put the sum of each row of `data` into `sums`: 8 x 16 lanes, nothing but loads and adds."""
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
    """Memory that is read again and again, to compare kernels with.

    On a shared machine the bandwidth changes within seconds, so a kernel should be compared with
    passes right before and after it.

    Parameters
    ----------
    n_bytes : int, optional
        Bytes of a pass, rounded down to a multiple of 256 KB; by default `PROBE_BYTES`, several
        times the last cache.
    threads : int, optional
        Number of threads; by default those of the calling thread's team.

    Raises
    ------
    UsageError
        If `threads` is not between 1 and 1024.

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
            split_rows(_read, len(self._data), float(self._data.size), self._data, self._sums)
            taken = time.perf_counter() - started
        finally:
            set_num_threads(before)
        assert (self._sums == ROW).all(), "the probe did not read every element"
        return taken

    def bandwidth(self, passes: int = 3) -> float:
        """Return the bytes per second of some passes together."""
        return passes * self.n_bytes / sum(self.seconds() for _ in range(passes))


def read_bandwidth(threads: int | None = None) -> float:
    """Measure how fast this machine reads memory.

    Parameters
    ----------
    threads : int, optional
        Number of threads; by default those of the calling thread's team.

    Returns
    -------
    float
        Bytes per second: 384 MB of float32 summed by a compiled loop, the fastest of five passes
        after one that touches the pages and compiles.

    Raises
    ------
    UsageError
        If `threads` is not between 1 and 1024.

    Examples
    --------
    >>> from nbflow_kernels.benchmarks.read_probe import read_bandwidth
    >>> read_bandwidth(1) > 1e8
    True
    """
    probe = ReadProbe(threads=threads)
    return probe.n_bytes / min(probe.seconds() for _ in range(5))
