"""Matrix product on the CPU: 16 lanes along K, panels of K, register tiles of rows x tokens.

Order of additions, the same for every output element however many tokens or threads there are:
K is cut into panels of `PANEL`; within a panel, lane i adds the products of columns i, i + 16, ...
one after the other (fused multiply-add); the lanes are added as a tree (`simd.sum`); the panels
are added, from left to right, to what the output starts with.  Zeros pad the end of the last one.

Four ways through the same sums:

=================  ================================================================================
`_matmul_stream`   one token, a large weight: row after row, one stream of addresses
`_matmul_vector`   one token, a small weight, likely in a cache: four rows at once
`_matmul_direct`   few tokens: tiles of four rows read `w` where it lies, once
`transposed`       many tokens, or a ragged K: 16 rows are transposed panel by panel, so that a
                   lane is a row, what was a lane is a chain of additions, and no lanes are added
=================  ================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.core.extending import overload
from numpy.typing import NDArray

from nbflow_kernels import simd
from nbflow_kernels._jit import inline, njit
from nbflow_kernels.matmul import transposed
from nbflow_kernels.matmul.transposed import PANEL
from nbflow_kernels.threads import split_rows

MIN_TRANSPOSED_TOKENS = 12  # below, transposing the weights costs more than it saves
ONE_STREAM_BYTES = 4 << 20  # a weight this large comes from memory, best as one stream of addresses
_NO_BIAS = np.zeros(0, np.float32)


def matmul(
    x: NDArray[np.float32],
    w: NDArray[Any],
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.matmul`."""
    if w.dtype == np.float16:
        w = w.view(np.int16)  # int16 stands for float16 bits, uint16 for bfloat16 bits
    n_tokens, n_columns = x.shape
    work = n_tokens * w.size
    bias = _NO_BIAS if bias is None else bias
    if n_tokens >= MIN_TRANSPOSED_TOKENS or n_columns % simd.LANES:
        n_groups = -(-w.shape[0] // 16)
        split_rows(transposed.multiply, n_groups, work, x, w, bias, accumulate, out)
    elif n_tokens == 1:
        kernel = _matmul_stream if w.nbytes >= ONE_STREAM_BYTES else _matmul_vector
        split_rows(kernel, w.shape[0], work, x, w, bias, accumulate, out)
    else:
        split_rows(_matmul_direct, w.shape[0], work, x, w, bias, accumulate, out)


def _load16(w: Any, addr: Any) -> Any:
    """Return 16 weights at an address, widened to float32; `w` only gives the type."""
    raise NotImplementedError("only inside kernels")


@overload(_load16, inline="always", strict=False)
def _load16_overload(w: Any, addr: Any) -> Any:
    if w.dtype == types.float32:
        return lambda w, addr: simd.load_f32(addr)
    if w.dtype == types.int16:
        return lambda w, addr: simd.load_f16(addr)
    return lambda w, addr: simd.load_bf16(addr)


@inline
def _plain(i: Any) -> Any:
    """Return `i` as an int64 whose value is unknown to the compiler's types: one specialisation."""
    return np.int64(i)


@njit
def _tile_1x1(
    x: Any, t: Any, w: Any, n: Any, k: Any, stop: Any, out: Any, to: Any, no: Any
) -> None:
    """Add the panel of columns [k, stop) of row n times token t to out[to, no]."""
    xa = simd.address(x) + t * x.strides[0]
    wa = simd.address(w) + n * w.strides[0]
    size = w.itemsize
    a = simd.splat(0.0)
    for i in range(k, stop, 16):
        a = simd.fma(_load16(w, wa + i * size), simd.load_f32(xa + i * 4), a)
    out[to, no] += simd.sum(a)


@njit
def _tile_4x1(
    x: Any, t: Any, w: Any, n: Any, k: Any, stop: Any, out: Any, to: Any, no: Any
) -> None:
    """Do as `_tile_1x1` for four rows."""
    xa = simd.address(x) + t * x.strides[0]
    w0 = simd.address(w) + n * w.strides[0]
    w1 = w0 + w.strides[0]
    w2 = w1 + w.strides[0]
    w3 = w2 + w.strides[0]
    size = w.itemsize
    a0 = a1 = a2 = a3 = simd.splat(0.0)
    for i in range(k, stop, 16):
        xv = simd.load_f32(xa + i * 4)
        a0 = simd.fma(_load16(w, w0 + i * size), xv, a0)
        a1 = simd.fma(_load16(w, w1 + i * size), xv, a1)
        a2 = simd.fma(_load16(w, w2 + i * size), xv, a2)
        a3 = simd.fma(_load16(w, w3 + i * size), xv, a3)
    out[to, no] += simd.sum(a0)
    out[to, no + 1] += simd.sum(a1)
    out[to, no + 2] += simd.sum(a2)
    out[to, no + 3] += simd.sum(a3)


@njit
def _tile_4x4(
    x: Any, t: Any, w: Any, n: Any, k: Any, stop: Any, out: Any, to: Any, no: Any
) -> None:
    """Do as `_tile_1x1` for four rows and four tokens."""
    x0 = simd.address(x) + t * x.strides[0]
    x1 = x0 + x.strides[0]
    x2 = x1 + x.strides[0]
    x3 = x2 + x.strides[0]
    w0 = simd.address(w) + n * w.strides[0]
    w1 = w0 + w.strides[0]
    w2 = w1 + w.strides[0]
    w3 = w2 + w.strides[0]
    size = w.itemsize
    a00 = a01 = a02 = a03 = simd.splat(0.0)
    a10 = a11 = a12 = a13 = simd.splat(0.0)
    a20 = a21 = a22 = a23 = simd.splat(0.0)
    a30 = a31 = a32 = a33 = simd.splat(0.0)
    for i in range(k, stop, 16):
        v0 = _load16(w, w0 + i * size)
        v1 = _load16(w, w1 + i * size)
        v2 = _load16(w, w2 + i * size)
        v3 = _load16(w, w3 + i * size)
        xv = simd.load_f32(x0 + i * 4)
        a00 = simd.fma(v0, xv, a00)
        a01 = simd.fma(v1, xv, a01)
        a02 = simd.fma(v2, xv, a02)
        a03 = simd.fma(v3, xv, a03)
        xv = simd.load_f32(x1 + i * 4)
        a10 = simd.fma(v0, xv, a10)
        a11 = simd.fma(v1, xv, a11)
        a12 = simd.fma(v2, xv, a12)
        a13 = simd.fma(v3, xv, a13)
        xv = simd.load_f32(x2 + i * 4)
        a20 = simd.fma(v0, xv, a20)
        a21 = simd.fma(v1, xv, a21)
        a22 = simd.fma(v2, xv, a22)
        a23 = simd.fma(v3, xv, a23)
        xv = simd.load_f32(x3 + i * 4)
        a30 = simd.fma(v0, xv, a30)
        a31 = simd.fma(v1, xv, a31)
        a32 = simd.fma(v2, xv, a32)
        a33 = simd.fma(v3, xv, a33)
    out[to, no] += simd.sum(a00)
    out[to, no + 1] += simd.sum(a01)
    out[to, no + 2] += simd.sum(a02)
    out[to, no + 3] += simd.sum(a03)
    out[to + 1, no] += simd.sum(a10)
    out[to + 1, no + 1] += simd.sum(a11)
    out[to + 1, no + 2] += simd.sum(a12)
    out[to + 1, no + 3] += simd.sum(a13)
    out[to + 2, no] += simd.sum(a20)
    out[to + 2, no + 1] += simd.sum(a21)
    out[to + 2, no + 2] += simd.sum(a22)
    out[to + 2, no + 3] += simd.sum(a23)
    out[to + 3, no] += simd.sum(a30)
    out[to + 3, no + 1] += simd.sum(a31)
    out[to + 3, no + 2] += simd.sum(a32)
    out[to + 3, no + 3] += simd.sum(a33)


@njit
def _tiles(
    x: Any,
    n_tokens: Any,
    w: Any,
    n: Any,
    n_rows: Any,
    k: Any,
    stop: Any,
    out: Any,
    to: Any,
    no: Any,
) -> None:
    """Add a panel of `n_rows` (1 to 4) rows from row n on for tokens [0, n_tokens) of `x`."""
    t = _plain(0)
    if n_rows == 4:
        while t + 4 <= n_tokens:
            _tile_4x4(x, t, w, n, k, stop, out, to + t, no)
            t += 4
        while t < n_tokens:
            _tile_4x1(x, t, w, n, k, stop, out, to + t, no)
            t += 1
    else:
        for r in range(n_rows):
            for t in range(n_tokens):
                _tile_1x1(x, t, w, n + r, k, stop, out, to + t, no + r)


@njit
def _begin(bias: Any, accumulate: Any, out: Any, start: Any, stop: Any) -> None:
    """Write what the sums are added to: nothing, the bias, the old output, or both."""
    for t in range(out.shape[0]):
        for n in range(start, stop):
            y = bias[n] if len(bias) else np.float32(0.0)
            out[t, n] = out[t, n] + y if accumulate else y


@njit
def _matmul_direct(
    x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any
) -> None:
    """Rows [start, stop) of `w` read in place; the number of columns is a multiple of 16."""
    _begin(bias, accumulate, out, start, stop)
    n_tokens, n_columns = x.shape
    for n in range(start, stop, 4):
        for k in range(0, n_columns, PANEL):
            end = min(k + PANEL, n_columns)
            _tiles(x, n_tokens, w, n, min(4, stop - n), k, end, out, _plain(0), n)


@njit
def _matmul_stream(
    x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any
) -> None:
    """Rows [start, stop) of `w` for one token, as one stream of addresses."""
    _begin(bias, accumulate, out, start, stop)
    xa = simd.address(x)
    size = w.itemsize
    for n in range(start, stop):
        wa = simd.address(w) + n * w.strides[0]
        y = out[0, n]
        for k in range(0, w.shape[1], PANEL):
            a = simd.splat(0.0)
            for i in range(k, min(k + PANEL, w.shape[1]), 16):
                a = simd.fma(_load16(w, wa + i * size), simd.load_f32(xa + i * 4), a)
            y += simd.sum(a)
        out[0, n] = y


@njit
def _matmul_vector(
    x: Any, w: Any, bias: Any, accumulate: Any, out: Any, start: Any, stop: Any
) -> None:
    """Rows [start, stop) of `w` for one token, four at once."""
    xa = simd.address(x)
    size = w.itemsize
    full = stop - (stop - start) % 4
    _begin(bias, accumulate, out, start, full)
    for n in range(start, full, 4):
        w0 = simd.address(w) + n * w.strides[0]
        w1 = w0 + w.strides[0]
        w2 = w1 + w.strides[0]
        w3 = w2 + w.strides[0]
        for k in range(0, w.shape[1], PANEL):
            a0 = a1 = a2 = a3 = simd.splat(0.0)
            for i in range(k, min(k + PANEL, w.shape[1]), 16):
                xv = simd.load_f32(xa + i * 4)
                a0 = simd.fma(_load16(w, w0 + i * size), xv, a0)
                a1 = simd.fma(_load16(w, w1 + i * size), xv, a1)
                a2 = simd.fma(_load16(w, w2 + i * size), xv, a2)
                a3 = simd.fma(_load16(w, w3 + i * size), xv, a3)
            out[0, n] += simd.sum(a0)
            out[0, n + 1] += simd.sum(a1)
            out[0, n + 2] += simd.sum(a2)
            out[0, n + 3] += simd.sum(a3)
    _matmul_stream(x, w, bias, accumulate, out, full, stop)
