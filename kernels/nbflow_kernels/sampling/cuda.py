"""Softmax, argmax, exact filters and sampling on CUDA devices, a thread block per row.

Filters and draws are radix selects over the row with integer sums (`cuda_radix_select.cuh`):
without sorting or rejection, and deterministic.  Random numbers, exponentials and logarithms have
the bits of the CPU.  Weights are rounded to 2**-44 of the row's largest before they are added, the
sums of the CPU to float64 (those of exponentials to float32): both draw the same token unless the
random number is within that rounding of the boundary between two tokens.

An invalid row gives -1 in the result, not an error, since only the tail-free filter synchronizes:
its counts pass through the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.arrays import all_on_device, empty, on_device
from nbflow_kernels.errors import UsageError

MAX_COLUMNS = 1 << 22


def _threads(V: int) -> int:
    """Return the threads per row."""
    return 1024 if V > 8192 else 256


def _fraction(V: int) -> int:
    """Return the fraction bits of the largest weight, with which sums fit in 63 bits."""
    if V > MAX_COLUMNS:
        raise UsageError(f"rows must have at most {MAX_COLUMNS} columns on a CUDA device, got {V}")
    return min(20, 39 - (V - 1).bit_length())


class _RowKernel:
    """Launcher of a kernel with a thread block for each row of its last array.

    Arguments in host memory are copied at once.  Trailing parameters named ``n_rows``, ``V``
    (the last two axes of the first array) and ``fraction`` need no argument.
    """

    def __init__(self, entry: str, parameters: str, file: str = "cuda_sampling.cu") -> None:
        self.kernel = cuda.cpp_kernel(__file__, file, entry, parameters)
        self._names = [p.name for p in self.kernel.parameters.all]

    def __call__(self, *arguments: Any) -> None:
        n_rows, V = arguments[0].shape[-2:]
        B = len(arguments[-1])
        if not B:
            return
        sizes = {"n_rows": n_rows, "V": V, "fraction": _fraction(V)}
        hosted = [a for a in arguments if isinstance(a, np.ndarray)]
        copies = iter(all_on_device(hosted, arguments[0]) if hosted else ())
        placed = [next(copies) if isinstance(a, np.ndarray) else a for a in arguments]
        more = [sizes[name] for name in self._names[len(arguments) :]]
        self.kernel(B, _threads(V), (*placed, *more))


# Arguments are those of the functions of the same name in `cpu`, `cpu_typical_tail_free` and
# `cpu_speculative`.
sample = _RowKernel(
    "sample",
    "f32* ranks, f32* probs, i32* rows, f64* limits, i32 top_k_first, u64* seeds, u64* offsets, "
    "i32* out, f64* shares, i32 n_rows, i32 V, i32 fraction",
)
sample_logits = _RowKernel(
    "sample_logits",
    "f32* logits, i32* rows, f32* temperature, f64* limits, i32 top_k_first, u64* seeds, "
    "u64* offsets, i32* out, i32 n_rows, i32 V, i32 fraction",
)
renorm = _RowKernel(
    "renorm", "f32* ranks, f32* probs, f64* limits, f32* out, i32* valid, i32 V, i32 fraction"
)
xtc = _RowKernel(
    "xtc",
    "f32* probs, f64* parameters, u64* seeds, u64* offsets, f32* out, i32* valid, i32 V, "
    "i32 fraction",
)
softmax = _RowKernel("softmax", "f32* logits, f32* temperature, f32* out, i32 V, i32 fraction")
argmax = _RowKernel("argmax", "f32* logits, i32* out, i32 V")
top_k_mask = _RowKernel("top_k_mask", "f32* logits, i64* counts, f32* out, i32* valid, i32 V")
n_sigma_mask = _RowKernel("n_sigma_mask", "f32* logits, f64* n, f32* out, i32* valid, i32 V")
chain_speculative = _RowKernel(  # a token out of range is rejected; here n_rows are draft tokens
    "chain_speculative",
    "f32* draft_probs, i32* draft_token_ids, f32* target_probs, u64* seeds, u64* offsets, "
    "i32* out, i32* accepted, i32* emitted, i32 n_rows, i32 V, i32 fraction",
)
typical_ranks = _RowKernel("typical_ranks", "f32* probs, f32* ranks, i32 V", "cuda_top_k_sort.cu")
_top_k = cuda.cpp_kernel(
    __file__, "cuda_top_k_sort.cu", "top_k",
    "f32* x, i32 k, i32 in_order, f32* values, i32* indices, u32* work, i32 V",
)  # fmt: skip
_tail_free = cuda.cpp_kernel(
    __file__, "cuda_top_k_sort.cu", "tail_free_counts",
    "f32* probs, i32* rows, i32 n_rows, f64* z, i32 first, f64* counts, u32* work, i32 V",
)  # fmt: skip


def tail_free_counts(probs: Any, rows: Any, z: Any, first: int, counts: Any) -> None:
    """See `nbflow_kernels.sampling.cpu_typical_tail_free.tail_free_counts`."""
    (R, V), B = probs.shape, len(rows)
    if B:
        work, threads = empty(probs, (B, 2 * V), np.uint32), _threads(V)
        _fraction(V)
        args = (probs, on_device(rows, probs), R, on_device(z, probs), first, counts, work, V)
        _tail_free(B, threads, args, _sort_shared_bytes(threads))


def top_k(x: Any, k: int, in_order: bool, values: Any, indices: Any) -> None:
    """See `nbflow_kernels.top_k`."""
    B, V = x.shape
    if B:
        work, threads = empty(x, (B, 4 * k if in_order else 1), np.uint32), _threads(V)
        _fraction(V)
        shared = _sort_shared_bytes(threads) if in_order else 0
        _top_k(B, threads, (x, k, in_order, values, indices, work, V), shared)


def _sort_shared_bytes(threads: int) -> int:
    """Return the shared memory of a sort: a count per digit and warp."""
    return 4 * 256 * (threads // 32)


_top_k_transform = cuda.cpp_kernel(
    __file__, "cuda_top_k_transform.cu", "top_k_transform",
    "f32* x, i32* lengths, i32*? row_starts, i32*? offsets, i32*? table, i32*? row_to_batch, "
    "i32*? table_starts, i32* out, i32*? raw, i64 x_row, i64 table_row, i32 page_size, i32 top_k, "
    "i32 prefer_last",
)  # fmt: skip
_SELECT_THREADS = 256  # of `select_largest.cuh`


def top_k_transform(
    x: Any, windows: Any, offsets: Any, pages: Any, page_size: int, prefer_last: bool, out: Any,
    raw: Any,
) -> None:  # fmt: skip
    """See `nbflow_kernels.sampling.top_k_transform`."""
    if not len(out):
        return
    table, batches, firsts = pages or (None, None, None)
    table_row = 0 if table is None else table.shape[1]
    _top_k_transform(
        len(out), _SELECT_THREADS,
        (
            x, *windows, offsets, table, batches, firsts, out, raw, x.strides[0] // 4, table_row,
            page_size, out.shape[1], int(prefer_last),
        ),
    )  # fmt: skip
