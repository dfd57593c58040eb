"""NumPy fallbacks of `nbflow_kernels.cpu.register_tiles`; tiles are (tokens, groups, 16)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu.interpreter import simd
from nbflow_kernels.cpu.interpreter.memory import LANES, bf16_to_f32, f32_to_bf16, read, write

Vector = NDArray[Any]
FloatTile = NDArray[Any]


def _widened(like: Any, stored: Vector) -> Vector:
    """Return the bits of weights as float32; of the type of `like`."""
    if like.dtype == np.int16:
        return stored.view(np.float16).astype(np.float32)
    if like.dtype == np.uint16:
        return bf16_to_f32(stored)
    return stored


def _vectors(like: Any, at: Any) -> list[Vector]:
    """Return the weights of a unit: 16, or the 32 of a block."""
    if like.dtype != np.int8:
        return [_widened(like, read(at, like.dtype, LANES))]
    codes = read(at + 2, np.int8, 2 * LANES).astype(np.float32)
    return list((codes * read(at, np.float16, 1).astype(np.float32)).reshape(2, LANES))


def unit_columns(like: Any) -> int:
    """Return the columns that `step_lanes` adds."""
    return 2 * LANES if like.dtype == np.int8 else LANES


def unit_bytes(like: Any) -> int:
    """Return the bytes of the columns that `step_lanes` adds."""
    return 2 + 2 * LANES if like.dtype == np.int8 else LANES * int(like.dtype.itemsize)


def zero(groups: int, tokens: int) -> FloatTile:
    """Return a tile of zeros."""
    return np.zeros((tokens, groups, LANES), np.float32)


def load(groups: int, tokens: int, at: Any) -> FloatTile:
    """Return the tile at an address."""
    return read(at, np.float32, tokens * groups * LANES).reshape(tokens, groups, LANES)


def store(at: Any, tile: FloatTile) -> None:
    """Write a tile to an address."""
    write(at, tile)


def load_strided(groups: int, tokens: int, at: Any, token: Any) -> FloatTile:
    """Return the tile at an address, its tokens `token` bytes apart."""
    return np.stack([load(groups, 1, at + token * t)[0] for t in range(tokens)])


def store_strided(at: Any, token: Any, tile: FloatTile) -> None:
    """Write a tile to an address, its tokens `token` bytes apart."""
    for t, vectors in enumerate(tile):
        write(at + token * t, vectors)


def scale(tile: FloatTile, at: Any, token: Any) -> FloatTile:
    """Return a tile with each token multiplied by its own float32."""
    factors: Vector = np.stack([read(at + token * t, np.float32, 1) for t in range(len(tile))])
    result: FloatTile = tile * factors[:, :, None]
    return result


def add(a: FloatTile, b: FloatTile) -> FloatTile:
    """Return the sum of two tiles."""
    return a + b


def step(tile: FloatTile, like: Vector, w: Any, group: Any, x: Any, token: Any) -> FloatTile:
    """Add the products of one unit."""
    tokens, groups, _ = tile.shape
    pairs, n = like.dtype == np.int32, unit_columns(like) // LANES
    weights = [v for r in range(groups // n) for v in _vectors(like, w + group * r)]
    new = np.empty_like(tile)
    for t in range(tokens):
        unit = read(x + token * t, np.int32 if pairs else np.float32, 1).repeat(LANES)
        for r in range(groups):
            if pairs:
                new[t, r] = add_pairs(tile[t, r], weights[r], unit)
            else:
                new[t, r] = simd.fma(weights[r], unit, tile[t, r])
    return new


def step_chains(tile: FloatTile, like: Vector, w: Any, x: Any, token: Any) -> FloatTile:
    """Add one unit to each group: unit i of one weight group to group i."""
    size = LANES * like.dtype.itemsize
    chains = [
        step(tile[:, g : g + 1], like, w + size * g, 0, x + 4 * g, token)
        for g in range(tile.shape[1])
    ]
    return np.concatenate(chains, 1)


def step_lanes(tile: FloatTile, like: Vector, w: Any, row: Any, x: Any, token: Any) -> FloatTile:
    """Add 16 columns, lane by lane; a group is a row."""
    tokens, rows, _ = tile.shape
    for i, vectors in enumerate(
        zip(*(_vectors(like, w + row * r) for r in range(rows)), strict=True)
    ):
        xs = [read(x + token * t + 64 * i, np.float32, LANES) for t in range(tokens)]
        new = [simd.fma(v, xs[t], tile[t, r]) for t in range(tokens) for r, v in enumerate(vectors)]
        tile = np.stack(new).reshape(tile.shape)
    return tile


def step_first(
    tile: FloatTile, like: Vector, w: Any, row: Any, x: Any, token: Any, n: Any
) -> FloatTile:
    """Add the first `n` of 16 columns, lane by lane; a group is a row."""
    tokens, rows, _ = tile.shape
    n = max(0, min(int(n), LANES))
    if n == 0:
        return tile
    weights, xs = np.zeros((rows, LANES), np.float32), np.zeros((tokens, LANES), np.float32)
    for r in range(rows):
        weights[r, :n] = _widened(like, read(w + row * r, like.dtype, n))
    for t in range(tokens):
        xs[t, :n] = read(x + token * t, np.float32, n)
    new = [simd.fma(v, xs[t], tile[t, r]) for t in range(tokens) for r, v in enumerate(weights)]
    return np.stack(new).reshape(tile.shape)


def lane_sums(tile: FloatTile) -> Vector:
    """Return the vector of the sums of 16 vectors."""
    return np.array([simd.sum(v) for v in tile.reshape(LANES, LANES)], np.float32)


def lane_magnitudes(tile: FloatTile) -> Vector:
    """Return the vector of the largest magnitudes of 16 vectors."""
    found: Vector = np.abs(tile.reshape(LANES, LANES)).max(axis=1)  # NaN if there is one
    return found


def add_pairs(total: Vector, a: Vector, b: Vector) -> Vector:
    """Return `total` plus the two products of each lane, the odd column first."""
    x, y = (bf16_to_f32(v.view(np.uint16)) for v in (a, b))
    return simd.fma(x[::2], y[::2], simd.fma(x[1::2], y[1::2], total))


def load_widened(like: Vector, at: Any) -> Vector:
    """Return 16 weights as float32."""
    return _widened(like, read(at, like.dtype, LANES))


def _columns(like: Vector, at: Any, row_bytes: Any) -> Vector:
    return np.stack([read(at + row_bytes * i, like.dtype, LANES) for i in range(LANES)]).T


def transpose(like: Vector, at: Any, row_bytes: Any, to: Any) -> None:
    """Copy 16 rows x 16 columns, columns first."""
    write(to, _columns(like, at, row_bytes))


def transpose_f32(like: Vector, at: Any, row_bytes: Any, to: Any, distance: Any) -> None:
    """Transpose to float32: columns 0, 4, 8, 12 to `to`, 1, 5, ... `distance` bytes further."""
    wide = _widened(like, np.ascontiguousarray(_columns(like, at, row_bytes)))
    for i in range(4):
        write(to + distance * i, wide[i::4])


def to_bf16(low: Vector, high: Vector) -> Vector:
    """Return 32 lanes rounded to bfloat16, as int32."""
    return f32_to_bf16(np.concatenate([low, high])).view(np.int32)


def to_pairs(even: Vector, odd: Vector) -> Vector:
    """Return pairs of bfloat16, as int32."""
    return f32_to_bf16(np.stack([even, odd], 1)).reshape(2 * LANES).view(np.int32)
