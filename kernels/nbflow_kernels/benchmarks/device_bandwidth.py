"""Bandwidth of reading a CUDA device's memory, the limit of products with few rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda

read_kernel = cuda.cpp_kernel(__file__, "read_bandwidth.cu", "read", "f32* x, f32* sums, i64 n")
_THREADS = 256
_BLOCKS_PER_SM = 8
_RANDOM_BYTES = 16 << 20
"""Bytes of random numbers, which are repeated."""
_OF_L2 = 8
"""Bytes of a pass, in sizes of the L2 cache."""


def device_read_bandwidth(xp: Any, passes: int = 3, n_bytes: int | None = None) -> float:
    """Measure the bandwidth of reading the current device's memory, in bytes per second.

    Random numbers, eight times as large as the L2 cache, are summed by a kernel that loads 16 bytes
    at a time; the mean of `passes` passes counts, after one that loads the kernel.  The memory is
    taken from the device itself and returned to it.

    Parameters
    ----------
    xp : module
        CuPy, or the emulator's stand-in, whose time is the host's.
    passes : int
        Passes that are timed together.
    n_bytes : int, optional
        Bytes of a pass, by default as above.

    Raises
    ------
    MemoryError
        If the device lacks the memory.
    """
    if n_bytes is None:
        n_bytes = _OF_L2 * int(xp.cuda.Device().attributes.get("L2CacheSize", 64 << 20))
    random = np.random.default_rng(0).random(min(_RANDOM_BYTES, n_bytes) // 4, np.float32)
    with xp.cuda.using_allocator(None):  # not from the pool, which would keep it
        tile = xp.asarray(random)
        n_tiles = max(1, n_bytes // random.nbytes)
        x = xp.empty((n_tiles * random.size,), np.float32)
        for i in range(n_tiles):
            x[i * random.size : (i + 1) * random.size] = tile
        n_blocks = _BLOCKS_PER_SM * cuda.device_of(x).n_sms
        sums = xp.empty((n_blocks * _THREADS,), np.float32)

    def read() -> None:
        read_kernel(n_blocks, _THREADS, (x, sums, x.size // 4))

    read()
    stream = xp.cuda.get_current_stream()
    first, last = xp.cuda.Event(), xp.cuda.Event()
    first.record(stream)
    for _ in range(passes):
        read()
    last.record(stream)
    last.synchronize()
    seconds = 1e-3 * float(xp.cuda.get_elapsed_time(first, last))
    found, expected = float(sums.get().sum(dtype=np.float64)), float(random.sum(dtype=np.float64))
    assert abs(found / (n_tiles * expected) - 1) < 1e-4, "the read probe skipped numbers"
    return passes * int(x.nbytes) / seconds
