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


def _kernel(name: str, parameters: str, file: str = "cuda_sampling.cu") -> cuda.Kernel:
    return cuda.cpp_kernel(__file__, file, name, parameters)


sample_kernel = _kernel(
    "sample",
    "f32* ranks, f32* probs, i32* rows, i32 n_rows, f64* limits, i32 top_k_first, u64* seeds, "
    "u64* offsets, i32* out, f64* shares, i32 V, i32 fraction",
)
sample_logits_kernel = _kernel(
    "sample_logits",
    "f32* logits, i32* rows, i32 n_rows, f32* temperature, f64* limits, i32 top_k_first, "
    "u64* seeds, u64* offsets, i32* out, i32 V, i32 fraction",
)
renorm_kernel = _kernel(
    "renorm", "f32* ranks, f32* probs, f64* limits, f32* out, i32* valid, i32 V, i32 fraction"
)
xtc_kernel = _kernel(
    "xtc",
    "f32* probs, f64* parameters, u64* seeds, u64* offsets, f32* out, i32* valid, i32 V, "
    "i32 fraction",
)
softmax_kernel = _kernel("softmax", "f32* logits, f32* temperature, f32* out, i32 V, i32 fraction")
argmax_kernel = _kernel("argmax", "f32* logits, i32* out, i32 V")
top_k_mask_kernel = _kernel("top_k_mask", "f32* logits, i64* counts, f32* out, i32* valid, i32 V")
n_sigma_mask_kernel = _kernel("n_sigma_mask", "f32* logits, f64* n, f32* out, i32* valid, i32 V")
chain_kernel = _kernel(
    "chain_speculative",
    "f32* draft_probs, i32* draft_token_ids, f32* target_probs, u64* seeds, u64* offsets, "
    "i32* out, i32* accepted, i32* emitted, i32 n, i32 V, i32 fraction",
)
top_k_kernel = _kernel(
    "top_k", "f32* x, i32 k, i32 in_order, f32* values, i32* indices, u32* work, i32 V",
    "cuda_top_k_sort.cu",
)  # fmt: skip
typical_ranks_kernel = _kernel(
    "typical_ranks", "f32* probs, f32* ranks, i32 V", "cuda_top_k_sort.cu"
)
tail_free_kernel = _kernel(
    "tail_free_counts",
    "f32* probs, i32* rows, i32 n_rows, f64* z, i32 first, f64* counts, u32* work, i32 V",
    "cuda_top_k_sort.cu",
)


def _threads(V: int) -> int:
    """Return the threads per row."""
    return 1024 if V > 8192 else 256


def _fraction(V: int) -> int:
    """Return the fraction bits of the largest weight, with which sums fit in 63 bits."""
    if V > MAX_COLUMNS:
        raise UsageError(f"rows must have at most {MAX_COLUMNS} columns on a CUDA device, got {V}")
    return min(20, 39 - (V - 1).bit_length())


def _sort_shared_bytes(threads: int) -> int:
    """Return the shared memory of a sort: a count per digit and warp."""
    return 4 * 256 * (threads // 32)


def softmax(logits: Any, temperature: Any, out: Any) -> None:
    """See `nbflow_kernels.softmax`."""
    B, V = logits.shape
    if B:
        scale = on_device(temperature, logits)
        softmax_kernel(B, _threads(V), (logits, scale, out, V, _fraction(V)))


def argmax(logits: Any, out: Any) -> None:
    """See `nbflow_kernels.argmax`."""
    B, V = logits.shape
    if B:
        _fraction(V)
        argmax_kernel(B, _threads(V), (logits, out, V))


def sample(
    ranks: Any,
    probs: Any,
    rows: Any,
    limits: Any,
    top_k_first: bool,
    seeds: Any,
    offsets: Any,
    out: Any,
    shares: Any,
) -> None:
    """See `nbflow_kernels.sampling.cpu.sample`."""
    R, V = probs.shape
    if len(rows):
        rows, limits, seeds, offsets = all_on_device((rows, limits, seeds, offsets), probs)
        sample_kernel(
            len(rows), _threads(V),
            (
                ranks, probs, rows, R, limits, int(top_k_first), seeds, offsets, out, shares, V,
                _fraction(V),
            ),
        )  # fmt: skip


def sample_logits(
    logits: Any,
    rows: Any,
    temperature: Any,
    limits: Any,
    top_k_first: bool,
    seeds: Any,
    offsets: Any,
    out: Any,
) -> None:
    """See `nbflow_kernels.sampling.cpu.sample_logits`."""
    R, V = logits.shape
    if len(rows):
        tables = all_on_device((rows, temperature, limits, seeds, offsets), logits)
        rows, temperature, limits, seeds, offsets = tables
        sample_logits_kernel(
            len(rows), _threads(V),
            (
                logits, rows, R, temperature, limits, int(top_k_first), seeds, offsets, out, V,
                _fraction(V),
            ),
        )  # fmt: skip


def renorm(ranks: Any, probs: Any, limits: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.sampling.cpu.renorm`."""
    B, V = probs.shape
    if B:
        arguments = (ranks, probs, on_device(limits, probs), out, valid, V, _fraction(V))
        renorm_kernel(B, _threads(V), arguments)


def typical_ranks(probs: Any, ranks: Any) -> None:
    """See `nbflow_kernels.sampling.cpu_typical_tail_free.typical_ranks`."""
    B, V = probs.shape
    if B:
        typical_ranks_kernel(B, _threads(V), (probs, ranks, V))


def tail_free_counts(probs: Any, rows: Any, z: Any, first: int, counts: Any) -> None:
    """See `nbflow_kernels.sampling.cpu_typical_tail_free.tail_free_counts`."""
    (R, V), B = probs.shape, len(rows)
    if B:
        work, threads = empty(probs, (B, 2 * V), np.uint32), _threads(V)
        _fraction(V)
        tail_free_kernel(
            B, threads,
            (probs, on_device(rows, probs), R, on_device(z, probs), first, counts, work, V),
            _sort_shared_bytes(threads),
        )  # fmt: skip


def xtc(probs: Any, parameters: Any, seeds: Any, offsets: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.xtc_renorm_probs`."""
    B, V = probs.shape
    if B:
        tables = [on_device(a, probs) for a in (parameters, seeds, offsets)]
        xtc_kernel(B, _threads(V), (probs, *tables, out, valid, V, _fraction(V)))


def top_k(x: Any, k: int, in_order: bool, values: Any, indices: Any) -> None:
    """See `nbflow_kernels.top_k`."""
    B, V = x.shape
    if B:
        work, threads = empty(x, (B, 4 * k if in_order else 1), np.uint32), _threads(V)
        _fraction(V)
        arguments = (x, k, int(in_order), values, indices, work, V)
        top_k_kernel(B, threads, arguments, _sort_shared_bytes(threads) if in_order else 0)


def top_k_mask(logits: Any, counts: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.top_k_mask_logits`."""
    B, V = logits.shape
    if B:
        _fraction(V)
        arguments = (logits, on_device(counts, logits), out, valid, V)
        top_k_mask_kernel(B, _threads(V), arguments)


def n_sigma_mask(logits: Any, n: Any, out: Any, valid: Any) -> None:
    """See `nbflow_kernels.top_n_sigma_mask_logits`."""
    B, V = logits.shape
    if B:
        n_sigma_mask_kernel(B, _threads(V), (logits, on_device(n, logits), out, valid, V))


def chain_speculative(
    draft_probs: Any,
    draft_token_ids: Any,
    target_probs: Any,
    seeds: Any,
    offsets: Any,
    out: Any,
    accepted: Any,
    emitted: Any,
) -> None:
    """See `nbflow_kernels.chain_speculative_sampling`; a token out of range is rejected."""
    B, n, V = draft_probs.shape
    if B:
        tables = [on_device(a, draft_probs) for a in (seeds, offsets)]
        chain_kernel(
            B, _threads(V),
            (
                draft_probs, draft_token_ids, target_probs, *tables, out, accepted, emitted, n, V,
                _fraction(V),
            ),
        )  # fmt: skip
