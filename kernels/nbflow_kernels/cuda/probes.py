"""Probes of a device: the arithmetic of its tensor cores, large shared memory, clusters.

Tensor cores add the products of an instruction and the old sum as fixed-point numbers: all are
aligned to the largest exponent, and what lies below its last bits is cut off.  `arithmetic` finds
where with sums that are exact: two large terms cancel, and a small one is left or lost.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cuda.devices import KernelDevice
from nbflow_kernels.cuda.kernel import cpp_kernel

ROWS, COLUMNS, TERMS = 16, 8, 16
"""Shape of ``mma.m16n8k16``."""
CLUSTER_ARCHS = (90, 100, 101, 103, 120, 121)

_mma = cpp_kernel(__file__, "probes.cu", "one_mma", "any* a, any* b, f32* c")
_reverse = cpp_kernel(__file__, "probes.cu", "reverse", "i32* x, i32* out, i32 n")
_read_peer = cpp_kernel(__file__, "probe_cluster.cu", "read_peer", "i32* out")


def mma(device: KernelDevice, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return ``a @ b.T + c`` by one instruction; a is (16, 16), b (8, 16), c (16, 8)."""
    there = [device.asarray(np.ascontiguousarray(m, np.float16)) for m in (a, b)]
    sums = device.asarray(np.ascontiguousarray(c, np.float32))
    _mma(1, 32, (*there, sums))
    found: np.ndarray = sums.get()
    return found


def arithmetic(device: KernelDevice) -> dict[str, Any]:
    """Return how tensor cores align the terms of a sum.

    Returns
    -------
    dict
        ``fraction_bits``: F, bits behind the largest exponent that are kept (None: more than the
        probe can see); ``sum_bits``, the same for the old sum; ``terms_at_once``: L, products that
        are aligned together; ``subnormal_exponent``: the exponent by which the product of 1 and
        the smallest subnormal number, 2**-24, is aligned.
    """
    tiny = 2.0**-14  # the smallest normal float16
    exponents = np.arange(ROWS)
    a, b, c = np.zeros((ROWS, TERMS)), np.zeros((COLUMNS, TERMS)), np.zeros((ROWS, COLUMNS))
    # 1 - 1 + 2**-(15 + row), as a product and as the old sum
    a[:, 0], a[:, 1], b[:, :2], b[:, 2] = 1, -1, 1, tiny
    a[:14, 2] = 2.0 ** -(1.0 + exponents[:14])
    kept = mma(device, a, b, c)[:14, 0] != 0
    a[:, 2], c[:] = 0, 2.0 ** -(15.0 + exponents[:, None])
    kept_sums = mma(device, a, b, c)[:, 0] != 0
    fraction, sums = _last(kept), _last(kept_sums)
    # 1 - 1 + 2**-28 in the column of the row, beside the first two columns and beside the last
    lost = []
    for pair in ((0, 1), (14, 15)):
        a, b = np.full((ROWS, TERMS), 0.0), np.full((COLUMNS, TERMS), tiny)
        np.fill_diagonal(a, tiny)
        a[:, pair[0]], a[:, pair[1]], b[:, list(pair)] = 1, -1, 1
        cut = mma(device, a, b, np.zeros_like(c))[:, 0] == 0
        lost.append([row for row in range(ROWS) if cut[row] and row not in pair])
    # 2**-24 - 2**-24 + 2**-(34 + row)
    a, b = np.zeros((ROWS, TERMS)), np.ones((COLUMNS, TERMS))
    a[:, 0], a[:, 1] = 2.0**-24, -(2.0**-24)
    kept = mma(device, a, b, np.tile(2.0 ** -(34.0 + exponents[:, None]), (1, COLUMNS)))[:, 0] != 0
    last = _last(kept, 34)
    return {
        "fraction_bits": fraction,
        "sum_bits": sums,
        "terms_at_once": len(lost[0]) + 2 if lost[0] else None,
        "lost_beside_first": lost[0],
        "lost_beside_last": lost[1],
        "subnormal_exponent": None if last is None or sums is None else sums - last,
    }


def _last(kept: np.ndarray, first: int = 15) -> int | None:
    """Return the number of the last kept term, counted from `first`; None if all are kept."""
    return None if kept.all() else first - 1 + int(np.argmin(kept))


def uses_shared_memory(device: KernelDevice, n_bytes: int) -> bool:
    """Return whether a kernel with this much dynamic shared memory gives the right result."""
    n = n_bytes // 4
    x = np.random.default_rng(0).integers(-(2**31), 2**31, n, dtype=np.int32)
    there, out = device.asarray(x), device.empty((n,), np.int32)
    _reverse(1, 1024, (there, out, n), shared=4 * n)
    return bool(np.array_equal(out.get(), x[::-1]))


def has_clusters(device: KernelDevice) -> bool:
    """Return whether a device has clusters of thread blocks."""
    return int(device.arch.removeprefix("sm_")) in CLUSTER_ARCHS


def reads_a_peer(device: KernelDevice) -> bool:
    """Return whether thread blocks of a cluster read each other's shared memory."""
    out = device.empty((8,), np.int32)
    _read_peer(8, 32, (out,))
    return [int(v) for v in out.get()] == [100 + (block ^ 1) for block in range(8)]
