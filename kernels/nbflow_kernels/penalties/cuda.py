"""Logits processors on CUDA devices: one thread block per row, see `penalties.cu`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda

_THREADS = 256


def _kernel(entry: str, parameters: str) -> cuda.Kernel:
    return cuda.cpp_kernel(__file__, "penalties.cu", entry, parameters)


_penalties = _kernel(
    "penalties",
    "f32* logits, i32* token_ids, i32* indptr, f64* parameters, i64* spans, i32* scratch, i32 V",
)
_no_repeat_ngram = _kernel(
    "no_repeat_ngram", "f32* logits, i32* token_ids, i32* indptr, i64* sizes, i32 V"
)
_dry = _kernel(
    "dry",
    "f32* logits, i32* token_ids, i32* indptr, f64* parameters, i64* spans, i32* words, "
    "i32* edges, i32* scratch, i32 V, i32 n_words",
)
_logit_bias = _kernel(
    "logit_bias", "f32* logits, i32* token_ids, f32* biases, i32* indptr, i32* scratch, i32 V"
)
_mask = _kernel("mask_ids", "f32* logits, i32* token_ids, i32* indptr, f32* kept, i32 V, i32 keep")
_bitmask = _kernel("bitmask", "f32* logits, i32* bits, i32 V, i32 n_words, i32 n_blocks")


def penalties(logits: Any, token_ids: Any, indptr: Any, parameters: Any, spans: Any) -> None:
    """See `nbflow_kernels.apply_penalties`."""
    B, V = logits.shape
    if token_ids.size:
        device = cuda.device_of(logits)
        more = (device.asarray(parameters), device.asarray(spans), device.empty((B, V), np.int32))
        _penalties(B, _THREADS, (logits, token_ids, indptr, *more, V))


def no_repeat_ngram(logits: Any, token_ids: Any, indptr: Any, sizes: Any) -> None:
    """See `nbflow_kernels.apply_no_repeat_ngram`."""
    B, V = logits.shape
    if token_ids.size:
        args = (logits, token_ids, indptr, cuda.to_device(sizes, logits), V)
        _no_repeat_ngram(B, _THREADS, args)


def dry(logits, token_ids, indptr, parameters, spans, words, edges):
    """See `nbflow_kernels.apply_dry_penalty`."""
    B, V = logits.shape
    if token_ids.size:
        device = cuda.device_of(logits)
        tables = (device.asarray(array) for array in (parameters, spans, words, edges))
        scratch = device.empty((B, V), np.int32)
        args = (logits, token_ids, indptr, *tables, scratch, V, len(edges) - 1)
        _dry(B, _THREADS, args)


def logit_bias(logits: Any, token_ids: Any, biases: Any, indptr: Any) -> None:
    """See `nbflow_kernels.apply_logit_bias`."""
    B, V = logits.shape
    if token_ids.size:
        scratch = cuda.device_of(logits).empty((B, 2, V), np.int32)
        _logit_bias(B, _THREADS, (logits, token_ids, biases, indptr, scratch, V))


def mask(logits: Any, token_ids: Any, indptr: Any, keep: bool) -> None:
    """See `nbflow_kernels.mask_token_ids`."""
    B, V = logits.shape
    if token_ids.size:
        kept = cuda.device_of(logits).empty(token_ids.shape, np.float32)
        _mask(B, _THREADS, (logits, token_ids, indptr, kept, V, keep))


def bitmask(logits: Any, bits: Any) -> None:
    """See `nbflow_kernels.apply_token_bitmask`."""
    B, V = logits.shape
    if B:
        n_blocks = cuda.ceil_div(V, _THREADS)
        _bitmask(B * n_blocks, _THREADS, (logits, bits, V, bits.shape[1], n_blocks))
