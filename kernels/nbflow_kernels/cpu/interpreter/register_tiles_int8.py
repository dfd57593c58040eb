"""NumPy fallbacks of `nbflow_kernels.cpu.register_tiles_int8`: a tile is an array (R, T, 16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter import simd, simd_int8
from nbflow_kernels.cpu.interpreter.memory import LANES, read_at_steps, write

Int8Tile = NDArray[Any]


def _each(tile: Int8Tile, new: Callable[[int, int], Any], dtype: Any = np.float32) -> Int8Tile:
    """Return the tile of ``new(r, t)``."""
    rows, tokens = tile.shape[:2]
    lines = [np.stack([new(r, t) for t in range(tokens)]) for r in range(rows)]
    return np.stack(lines).astype(dtype, copy=False)


def _weights(tile: Int8Tile, w: Any, w_step: Any, dtype: Any) -> Int8Tile:
    """Return the vectors of all row groups: `w` is an address, or the vector of the only one."""
    if isinstance(w, np.ndarray):
        return w[None]
    return read_at_steps(w, w_step, tile.shape[0], dtype, 64 // np.dtype(dtype).itemsize)


def zeros(rows: int, tokens: int) -> Int8Tile:
    """Return sums that are 0."""
    return np.zeros((rows, tokens, LANES), np.float32)


def outer(sums: Int8Tile, w: Any, w_step: Any, x: Any, x_step: Any) -> Int8Tile:
    """Return sums[r, t] + w[r] * x[t]."""
    weights = _weights(sums, w, w_step, np.float32)
    xs = read_at_steps(x, x_step, sums.shape[1], np.float32, 1)
    return _each(sums, lambda r, t: simd.fma(weights[r], xs[t].repeat(LANES), sums[r, t]))


def starts(rows: int, tokens: int, n: Any, n_step: Any, factor: Any) -> Int8Tile:
    """Return int32 sums: factor * n[t] in all lanes."""
    first = read_at_steps(n, n_step, tokens, np.int32, 1) * np.int32(factor)
    return np.broadcast_to(first, (rows, tokens, LANES)).copy()


def dots(ints: Int8Tile, w: Any, w_step: Any, x: Any, x_step: Any, bits: int) -> Int8Tile:
    """Return ints[r, t] + w[r] . x[t]."""
    dot = simd_int8.dot_u7_i8 if bits < 8 else simd_int8.dot_u8_i8
    weights = _weights(ints, w, w_step, np.uint8)
    xs = read_at_steps(x, x_step, ints.shape[1], np.uint8, 4)
    return _each(ints, lambda r, t: dot(ints[r, t], weights[r], np.tile(xs[t], LANES)), np.int32)


def scaled(sums: Int8Tile, ints: Int8Tile, w: Any, w_step: Any, x: Any, x_step: Any) -> Int8Tile:
    """Return sums[r, t] + ints[r, t] * (w[r] * x[t])."""
    scales = _weights(sums, w, w_step, np.float32)
    xs = read_at_steps(x, x_step, sums.shape[1], np.float32, 1)
    whole = ints.astype(np.float32)
    return _each(sums, lambda r, t: simd.fma(whole[r, t], scales[r] * xs[t], sums[r, t]))


def floats(ints: Int8Tile) -> Int8Tile:
    """Return ints[r, t] as float32."""
    return ints.astype(np.float32)


def add_by_row(sums: Int8Tile, factors: Int8Tile, w: Any, w_step: Any) -> Int8Tile:
    """Return sums[r, t] + factors[r, t] * w[r]."""
    weights = _weights(sums, w, w_step, np.float32)
    return _each(sums, lambda r, t: simd.fma(factors[r, t], weights[r], sums[r, t]))


def add_by_token(sums: Int8Tile, factors: Int8Tile, x: Any, x_step: Any) -> Int8Tile:
    """Return sums[r, t] + factors[r, t] * x[t]."""
    xs = read_at_steps(x, x_step, sums.shape[1], np.float32, 1)
    return _each(sums, lambda r, t: simd.fma(factors[r, t], xs[t].repeat(LANES), sums[r, t]))


def add(a: Int8Tile, b: Int8Tile) -> Int8Tile:
    """Return a + b."""
    return a + b


def store(addr: Any, sums: Int8Tile) -> None:
    """Write the vectors to an address."""
    write(addr, sums)


def load_strided(rows: int, tokens: int, addr: Any, row_step: Any, token_step: Any) -> Int8Tile:
    """Return the tile of vectors at addr + row_step * r + token_step * t."""
    lines = [
        read_at_steps(addr + row_step * r, token_step, tokens, np.float32, LANES)
        for r in range(rows)
    ]
    return np.stack(lines)


def store_strided(addr: Any, row_step: Any, token_step: Any, sums: Int8Tile) -> None:
    """Write the vectors to addr + row_step * r + token_step * t."""
    for r, t in np.ndindex(*sums.shape[:2]):
        write(addr + row_step * r + token_step * t, sums[r, t])
