"""Causal convolution on the CPU: 16 channels in the lanes of a vector, row by row.

Threads divide the channels, so that a batch of one long and many short sequences keeps all of them
busy.  Taps and state are stored channel by channel; they are transposed into scratch memory for
each group of 16 channels: 16 (2 K - 1) numbers, against 16 K products of each row.
"""

from __future__ import annotations

from nbflow_kernels.activation.cpu import times_logistic
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    allocate,
    read_f32,
    read_i32,
    release,
    store_f16,
    write_f32,
)
from nbflow_kernels.cpu.simd_narrow import store_bf16
from nbflow_kernels.cpu.simd_row_end import load_up_to, store_up_to
from nbflow_kernels.cpu.simd_shuffle import join_columns, split_columns
from nbflow_kernels.state_format import F16, F32, KINDS
from nbflow_kernels.state_format.cpu import read_number, row_bytes, write_number

_SILU_COST = 16  # multiply-adds per element, for the decision to use more than one thread


def causal_conv1d(x, weight, bias, state, indptr, state_indices, silu, out):
    """See `nbflow_kernels.causal_conv1d`."""
    hold(x, weight, bias, state, indptr, state_indices, out)
    T, C = x.shape
    K = weight.shape[1]
    parallel_for(
        _causal_conv1d, -(-C // 16), x.size * (K + _SILU_COST * silu),
        address_of(x), x.strides[0] if T else 0, address_of(weight),
        0 if bias is None else address_of(bias), address_of(state),
        KINDS[state.dtype.name], address_of(indptr), address_of(state_indices),
        address_of(out), out.strides[0] if T else 0, len(state_indices), C, K, silu,
    )  # fmt: skip


@jit.device_function
def _transpose(rows, kind, n_rows, n_columns, to):
    """Copy up to 16 rows of numbers to columns of 16 float32 at `to`."""
    if n_rows == 16 and 2 <= n_columns <= 4:
        if kind != F32:  # widened in place first
            for i in range(n_columns):
                v = simd.load_f16(rows + 32 * i) if kind == F16 else simd.load_bf16(rows + 32 * i)
                simd.store_f32(to + 64 * i, v)
            rows = to
        if n_columns == 2:
            split_columns(rows, 2, to)
        elif n_columns == 3:
            split_columns(rows, 3, to)
        else:
            split_columns(rows, 4, to)
        return
    for row in range(n_rows):
        for column in range(n_columns):
            at = rows + (row * n_columns + column) * row_bytes(kind, 1)
            write_f32(to + 64 * column + 4 * row, read_number(at, kind))


@jit.device_function(inline="llvm")
def _rounded(v, kind, narrow):
    """Return 16 numbers as they are read back from the state."""
    if kind == F32:
        return v
    if kind == F16:
        store_f16(narrow, v)
        return simd.load_f16(narrow)
    store_bf16(narrow, v)
    return simd.load_bf16(narrow)


@jit.device_function
def _update_state(state, kind, history, x, x_bytes, n_tokens, n_kept, lanes, narrow):
    """Write the last `n_kept` inputs of a sequence, of which `n_tokens` are new, to its state."""
    if lanes == 16 and 2 <= n_kept <= 3:
        for j in range(n_kept):  # rises: a later place of the history is not overwritten yet
            t = n_tokens - n_kept + j
            source = history + 64 * (t + n_kept) if t < 0 else x + t * x_bytes
            simd.store_f32(history + 64 * j, simd.load_f32(source))
        to = state if kind == F32 else history
        if n_kept == 2:
            join_columns(history, 2, to)
        else:
            join_columns(history, 3, to)
        if kind != F32:
            for i in range(n_kept):
                v = simd.load_f32(history + 64 * i)
                if kind == F16:
                    store_f16(state + 32 * i, v)
                else:
                    store_bf16(state + 32 * i, v)
        return
    for j in range(n_kept):
        t = n_tokens - n_kept + j
        source = history + 64 * (t + n_kept) if t < 0 else x + t * x_bytes
        for lane in range(lanes):
            at = state + (lane * n_kept + j) * row_bytes(kind, 1)
            write_number(at, kind, read_f32(source + 4 * lane), narrow)


@jit.device_function
def _step(kept, taps, shift, x, silu, out, history):
    """Convolve a token of 16 channels with 4 taps, and update their float32 state."""
    split_columns(kept, 3, history)
    second, third, v = simd.load_f32(history + 64), simd.load_f32(history + 128), simd.load_f32(x)
    y = simd.fma(simd.load_f32(history), simd.load_f32(taps), shift)
    y = simd.fma(second, simd.load_f32(taps + 64), y)
    y = simd.fma(third, simd.load_f32(taps + 128), y)
    y = simd.fma(v, simd.load_f32(taps + 192), y)
    simd.store_f32(out, times_logistic(y, 1.0, 0.0) if silu else y)
    simd.store_f32(history, second)
    simd.store_f32(history + 64, third)
    simd.store_f32(history + 128, v)
    join_columns(history, 3, kept)


@jit.kernel
def _causal_conv1d(
    x, x_bytes, weight, bias, state, kind, indptr, state_indices, out, out_bytes, B, C, K, silu,
    start, stop
):  # fmt: skip
    """Convolve groups [start, stop) of 16 channels of all sequences."""
    taps = allocate(128 * K + 64)
    history = taps + 64 * K
    narrow = history + 64 * K
    for group in range(start, stop):
        first = 16 * group
        lanes = min(C - first, 16)
        _transpose(weight + 4 * first * K, F32, lanes, K, taps)
        shift = simd.splat(0.0) if bias == 0 else load_up_to(bias + 4 * first, lanes)
        for b in range(B):
            begin = read_i32(indptr + 4 * b)
            n_tokens = read_i32(indptr + 4 * b + 4) - begin
            if n_tokens <= 0:
                continue
            at = (read_i32(state_indices + 4 * b) * C + first) * (K - 1)
            kept = state + at * row_bytes(kind, 1)
            _transpose(kept, kind, lanes, K - 1, history)
            x_at = x + begin * x_bytes + 4 * first
            out_at = out + begin * out_bytes + 4 * first
            if n_tokens == 1 and lanes == 16 and K == 4 and kind == F32:
                _step(kept, taps, shift, x_at, silu, out_at, history)
                continue
            for t in range(n_tokens):
                y = shift
                for j in range(K):
                    i = t + j - (K - 1)
                    source = history + 64 * (t + j) if i < 0 else x_at + i * x_bytes
                    v = load_up_to(source, lanes)
                    if j < K - 1:  # in a call of its own the input would come from the state
                        v = _rounded(v, kind, narrow)
                    y = simd.fma(v, simd.load_f32(taps + 64 * j), y)
                if silu:
                    y = times_logistic(y, 1.0, 0.0)
                store_up_to(out_at + t * out_bytes, lanes, y)
            _update_state(kept, kind, history, x_at, x_bytes, n_tokens, K - 1, lanes, narrow)
    release(taps)
