"""Register tiles against NumPy, and the forms of the same operation on other processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from nbflow_kernels.cpu import register_tiles, register_tiles_lower, register_tiles_sums, simd
from nbflow_kernels.quantized_matmul.reference import to_bf16

INF, NAN = np.float32(np.inf), np.float32(np.nan)


def _whole(rng: np.random.Generator, *shape: int) -> Any:
    """Whole numbers: products and sums of a few of them are exact in any order."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def _bits(x: Any) -> Any:
    """The bits of the nearest bfloat16."""
    return (to_bf16(x).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@njit
def _steps(w: Any, x: Any, out: Any) -> None:
    tile = register_tiles.load(2, 3, simd.address(out))
    for k in range(w.shape[1]):
        at = simd.address(w) + k * w.strides[1]
        tile = register_tiles.step(
            tile, w, at, w.strides[0], simd.address(x) + k * x.strides[1], x.strides[0]
        )
    register_tiles.store(simd.address(out), register_tiles.add(tile, register_tiles.zero(2, 3)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_steps_add_outer_products(rng: np.random.Generator, dtype: str) -> None:
    w, x = _whole(rng, 2, 5, 16), _whole(rng, 3, 5)
    out = _whole(rng, 3, 2, 16)
    want = out + np.einsum("gkr,tk->tgr", w, x)
    held = {
        "float32": w,
        "float16": w.astype(np.float16).view(np.int16),
        "bfloat16": _bits(w),
    }[dtype]
    _steps(held, x, out)
    np.testing.assert_array_equal(out, want)


@njit
def _lower(m: Any, x: Any, u: Any, out: Any) -> None:
    at, row = simd.address(m), m.strides[0]
    tile = register_tiles.load(2, 3, simd.address(x))
    register_tiles.store(simd.address(out), register_tiles_lower.substitute(tile, at, row))
    tile = register_tiles_lower.add_lower(tile, at, row, simd.address(u))
    register_tiles.store(simd.address(out) + 384, tile)


def test_lower_triangular_matrices(rng: np.random.Generator) -> None:
    m, x, u = _whole(rng, 3, 4), _whole(rng, 3, 2, 16), _whole(rng, 3, 2, 16)
    m[np.triu_indices(3, 1)] = NAN  # not read
    out = np.full((2, 3, 2, 16), NAN, np.float32)
    _lower(m, x, u, out)
    lower = np.tril(m[:, :3])
    first = out[0] - np.einsum("ts,sgl->tgl", np.tril(lower, -1), out[0])
    np.testing.assert_array_equal(first, x)
    np.testing.assert_array_equal(out[1], x + np.einsum("ts,sgl->tgl", lower, u))


def _pair_words(rng: np.random.Generator, *shape: int) -> Any:
    """Pairs of bfloat16 as int32, and their values (..., 2)."""
    values = to_bf16(rng.standard_normal((*shape, 2), dtype=np.float32)).astype(np.float32)
    return _bits(values).view(np.int32)[..., 0], values


def _compiled_steps() -> Any:
    return njit(_steps.py_func)


@pytest.mark.parametrize("instruction", [True, False])
def test_pair_steps_add_the_odd_product_first(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, instruction: bool
) -> None:
    if not instruction:
        monkeypatch.setattr(register_tiles, "has_pair_products", lambda: False)
    w_words, w = _pair_words(rng, 2, 7, 16)
    x_words, x = _pair_words(rng, 3, 7)
    out = np.zeros((3, 2, 16), np.float32)
    _compiled_steps()(w_words, x_words, out)
    want = np.zeros((3, 2, 16))
    for k in range(7):
        for i in (1, 0):  # products of 16 bits, so that float64 sums are exact and round once
            product = np.einsum("gr,t->tgr", w[:, k, :, i], x[:, k, i]).astype(np.float64)
            want = (want + product).astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(out, want)


@njit
def _blocks(like: Any, w: Any, x: Any, outer: Any, inner: Any) -> None:
    at, unit = simd.address(w), register_tiles.unit_bytes(like)
    tile = register_tiles.step(register_tiles.zero(4, 3), like, at, unit, simd.address(x), 4)
    register_tiles.store(simd.address(outer), tile)
    tile = register_tiles.zero(2, 3)
    for k in range(2):
        tile = register_tiles.step_lanes(
            tile, like, at + k * unit, w.strides[0], simd.address(x) + 128 * k, x.strides[0]
        )
    register_tiles.store(simd.address(inner), tile)


def test_steps_on_blocks_of_int8(rng: np.random.Generator) -> None:
    codes, x = rng.integers(-8, 9, (2, 2, 32)).astype(np.int8), _whole(rng, 3, 64)
    scales = np.array([[1, -2], [0.5, 2.0**-20]], np.float16)
    w = np.concatenate([scales[..., None].view(np.uint8), codes.view(np.uint8)], -1)
    outer, inner = np.full((3, 4, 16), NAN, np.float32), np.full((3, 2, 16), NAN, np.float32)
    _blocks(np.int8(0), w.reshape(2, 68), x, outer, inner)
    wide = (scales[..., None].astype(np.float32) * codes).reshape(2, 4, 16)
    np.testing.assert_array_equal(outer, x[0, :3, None, None] * wide[0])
    want = np.zeros((3, 2, 16), np.float32)  # in order: the second row's sums are rounded
    for k in range(4):
        products = wide[:, k].astype(np.float64) * x[:, None, 16 * k : 16 * k + 16]
        want = (want + products).astype(np.float32)
    np.testing.assert_array_equal(inner, want)


@njit
def _lanes(w: Any, x: Any, out: Any) -> None:
    tile = register_tiles.zero(4, 4)
    for k in range(0, w.shape[1], 16):
        tile = register_tiles.step_lanes(
            tile, w, simd.address(w) + k * w.itemsize, w.strides[0],
            simd.address(x) + 4 * k, x.strides[0],
        )  # fmt: skip
    simd.store_f32(simd.address(out), register_tiles.lane_sums(tile))


def test_lane_sums_are_products_of_rows(rng: np.random.Generator) -> None:
    w, x = _whole(rng, 4, 48), _whole(rng, 4, 48)
    out = np.empty((4, 4), np.float32)
    _lanes(w, x, out)
    np.testing.assert_array_equal(out, x @ w.T)


@njit
def _sums(tiles: Any, out: Any) -> None:
    at = simd.address(tiles)
    half = register_tiles_sums.half_lanes()
    first = register_tiles_sums.fold_lanes(register_tiles.load(2, 8, at), half)
    second = register_tiles_sums.fold_lanes(register_tiles.load(2, 8, at + 1024), half)
    register_tiles_sums.store_sums(simd.address(out), out.strides[0], first, second)


@njit
def _sum(tiles: Any, out: Any) -> None:
    for i in range(32):
        out[i] = simd.sum(simd.load_f32(simd.address(tiles) + 64 * i))


def test_folded_tiles_have_the_sums_of_single_vectors(rng: np.random.Generator) -> None:
    tiles = rng.standard_normal((2, 8, 2, 16)).astype(np.float32)
    out, want = np.full((8, 5), NAN, np.float32), np.full(32, NAN, np.float32)
    _sums(tiles, out)
    _sum(tiles, want)  # bit for bit
    by_token = want.reshape(2, 8, 2).transpose(1, 0, 2).reshape(8, 4)
    np.testing.assert_array_equal(out[:, :4], by_token)
    assert np.isnan(out[:, 4]).all()


@njit
def _transpose(source: Any, plain: Any, quarters: Any) -> None:
    at, row = simd.address(source), source.strides[0]
    register_tiles.transpose(source, at, row, simd.address(plain))
    register_tiles.transpose_f32(source, at, row, simd.address(quarters), quarters.strides[0])


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_transpose(rng: np.random.Generator, dtype: Any) -> None:
    wide = _whole(rng, 16, 20)
    source = wide if dtype == np.float32 else wide.astype(np.float16).view(np.int16)
    plain, quarters = np.empty((16, 16), dtype), np.full((4, 5, 16), np.nan, np.float32)
    _transpose(source, plain, quarters)
    np.testing.assert_array_equal(plain, source[:, :16].T)
    for column in range(16):
        np.testing.assert_array_equal(quarters[column % 4, column // 4], wide[:, column])
    assert np.isnan(quarters[:, 4]).all()


def _round(x: Any, halves: Any, pairs: Any) -> None:
    low, high = simd.load_f32(simd.address(x)), simd.load_f32(simd.address(x) + 64)
    simd.store_i32(simd.address(halves), register_tiles.to_bf16(low, high))
    simd.store_i32(simd.address(pairs), register_tiles.to_pairs(low, high))


@pytest.mark.parametrize("instruction", [True, False])
def test_rounding_to_bfloat16(monkeypatch: pytest.MonkeyPatch, instruction: bool) -> None:
    if not instruction:
        monkeypatch.setattr(register_tiles, "has_pair_products", lambda: False)
    # ties to even both ways, just above and below a tie, the largest number, infinity
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0xFF800000, 0x80000000]
    x = np.zeros(32, np.float32)
    x[: len(bits)] = np.array(bits, np.uint32).view(np.float32)
    x[8:] = np.random.default_rng(0).standard_normal(24, dtype=np.float32) * 1e5
    halves, pairs = np.empty(32, np.uint16), np.empty(32, np.uint16)
    njit(_round)(x, halves, pairs)
    np.testing.assert_array_equal(halves, _bits(x))
    np.testing.assert_array_equal(pairs.reshape(16, 2), halves.reshape(2, 16).T)
    x[:] = np.uint32(0x7FFFFFFF).view(np.float32)  # a NaN whose bits would round to -0
    njit(_round)(x, halves, pairs)
    assert np.isnan((halves.astype(np.uint32) << 16).view(np.float32)).all()
