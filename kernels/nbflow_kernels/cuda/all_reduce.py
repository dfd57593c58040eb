"""All-reduce over the ranks of a node, for message sizes of decoding.

Ranks exchange IPC handles of device memory once (`share_memory`), then one kernel per sum reads and
writes it, without the host or another library, and can be captured into a CUDA graph.  Ranks are
added in order in float32, so all get the same bits in every run.  Messages up to `ONE_SHOT_BYTES`
take the one-shot algorithm (every rank reads everything), larger ones the two-shot algorithm
(reduce-scatter, then all-gather).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nbflow_kernels.cuda.devices import KernelDevice, device_of
from nbflow_kernels.cuda.kernel import Kernel, cpp_kernel
from nbflow_kernels.errors import UsageError

MOST_RANKS = 8
FLAG_BYTES = 4096
"""Flags and counters at the start of a rank's memory."""
ONE_SHOT_BYTES = 256 * 1024
N_BLOCKS = 64
"""Thread blocks of every launch: block b synchronizes with block b of the other ranks."""
THREADS = 512
DTYPES = {"float32": "float", "float16": "Half", "uint16": "Bfloat"}
"""dtype of the arrays (uint16: bits of bfloat16) -> type in the source."""


@functools.cache
def kernel_of(algorithm: str, dtype: str) -> Kernel:
    """Return the kernel of an algorithm, ``one_shot`` or ``two_shot``, for arrays of a dtype."""
    return cpp_kernel(
        __file__, "all_reduce.cu", f"{algorithm}<{DTYPES[dtype]}>",
        "u64* bases, any* x, any* out, i64 n, i64 most_bytes, i32 n_ranks, i32 rank",
    )  # fmt: skip


ordered_sum_kernel = cpp_kernel(
    __file__, "all_reduce.cu", "ordered_sum", "f32* parts, f32* out, i64 n, i32 n_parts"
)


def ordered_sum(parts: Any, out: Any) -> None:
    """Add the rows of `parts` (R, n) in order, as `AllReduce` does, to `out` (n,), all float32."""
    n_parts, n = parts.shape
    if n:
        ordered_sum_kernel(min(1024, -(-n // 1024)), 256, (parts, out, n, n_parts))


def memory_bytes(most_bytes: int) -> int:
    """Return the bytes of device memory a rank contributes for messages of up to `most_bytes`."""
    return FLAG_BYTES + 3 * (-(-most_bytes // 16) * 16)


class AllReduce:
    """The sum over all ranks of arrays of one shape.

    Parameters
    ----------
    bases : sequence of int
        Addresses of the ranks' memory, as this rank's device sees them, `memory_bytes` each, the
        first `FLAG_BYTES` of them zero; see `share_memory`.
    rank : int
        This rank, or -1 to run all ranks in one launch on one device: then arrays have an axis of
        ranks in front.
    most_bytes : int
        The largest message.
    device : KernelDevice
        The device of the arrays.
    n_blocks : int
        Thread blocks; the same on all ranks.

    Raises
    ------
    UsageError
        If there are more than 8 ranks, or `rank` is out of range.
    """

    def __init__(
        self,
        bases: Sequence[int],
        rank: int,
        most_bytes: int,
        device: KernelDevice,
        *,
        n_blocks: int = N_BLOCKS,
    ) -> None:
        if not 1 <= len(bases) <= MOST_RANKS:
            raise UsageError(f"bases must have 1..{MOST_RANKS} addresses, got {len(bases)}")
        if not -1 <= rank < len(bases):
            raise UsageError(f"rank must be 0..{len(bases) - 1}, or -1 for all, got {rank}")
        if not 1 <= n_blocks * (MOST_RANKS + 1) * 4 <= FLAG_BYTES:
            raise UsageError(f"n_blocks must be 1..{FLAG_BYTES // (4 * MOST_RANKS + 4)}")
        self.rank, self.n_ranks, self.n_blocks = rank, len(bases), n_blocks
        self.most_bytes = (memory_bytes(most_bytes) - FLAG_BYTES) // 3
        self._bases = device.asarray(np.array(bases, np.uint64))

    def __call__(self, x: Any, out: Any = None) -> Any:
        """Return the sum of all ranks' `x`, in `out` if it is given (it may be `x`).

        Parameters
        ----------
        x : array of float32, float16 or bfloat16 (uint16 bits), C-contiguous
            This rank's part; all ranks have the same shape and type.
        out : array like `x`, optional
            Destination of the sum.

        Raises
        ------
        UsageError
            If the array is larger than the shared memory, not contiguous, or unlike `out`.
        """
        if x.dtype.name not in DTYPES:
            raise TypeError(f"x must be float32, float16 or bfloat16 bits, got {x.dtype.name}")
        if out is None:
            out = device_of(x).empty(x.shape, x.dtype)
        if out.shape != x.shape or out.dtype != x.dtype:
            raise UsageError(
                f"out must have shape {tuple(x.shape)} and dtype {x.dtype.name}, got "
                f"{tuple(out.shape)} and {out.dtype.name}"
            )
        if not (x.flags.c_contiguous and out.flags.c_contiguous):
            raise UsageError("x and out must be C-contiguous")
        every = 1 if self.rank >= 0 else self.n_ranks
        n = x.size // every
        if n * x.itemsize > self.most_bytes:
            raise UsageError(
                f"x must have at most {self.most_bytes} bytes, got {n * x.itemsize}; share more "
                "memory"
            )
        small = self.n_ranks <= 2 or n * x.itemsize <= ONE_SHOT_BYTES
        kernel = kernel_of("one_shot" if small else "two_shot", x.dtype.name)
        threads = min(THREADS, max(32, -(-n * x.itemsize // (16 * self.n_blocks * 32)) * 32))
        kernel(
            (self.n_blocks, every), threads,
            (self._bases, x, out, n, self.most_bytes, self.n_ranks, self.rank),
        )  # fmt: skip
        return out


def share_memory(
    most_bytes: int, rank: int, exchange: Callable[[bytes], list[bytes]]
) -> tuple[list[int], Callable[[], None]]:
    """Allocate this rank's memory on CuPy's current device and open that of the others.

    Parameters
    ----------
    most_bytes : int
        The largest message.
    rank : int
        This rank.
    exchange : callable
        Takes this rank's bytes and returns those of all ranks in order, e.g. mpi4py's
        ``communicator.allgather``.

    Returns
    -------
    bases : list of int
        The addresses for `AllReduce`.
    close : callable
        Frees the memory; call it when no rank uses it any more.
    """
    runtime = importlib.import_module("cupy").cuda.runtime
    n_bytes = memory_bytes(most_bytes)
    # not from the pool: a handle stands for a whole allocation
    own = runtime.malloc(n_bytes)
    runtime.memset(own, 0, n_bytes)
    runtime.deviceSynchronize()
    handles = exchange(bytes(runtime.ipcGetMemHandle(own)))
    bases = [own if r == rank else runtime.ipcOpenMemHandle(h) for r, h in enumerate(handles)]

    def close() -> None:
        runtime.deviceSynchronize()
        for r, base in enumerate(bases):
            if r != rank:
                runtime.ipcCloseMemHandle(base)
        exchange(b"")  # all ranks have closed it
        runtime.free(own)

    return bases, close
