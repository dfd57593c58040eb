"""RoPE beyond its cases: invariants of rotations, agreement of variants, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import (
    apply_rope,
    apply_rope_pos_ids,
    apply_rope_with_cos_sin_cache_inplace,
    rope_cos_sin_cache,
)
from nbflow_kernels.position.cases import ATOL


def rows(seed: int, T: int, H: int, D: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((T, H, D)).astype(np.float32)


@pytest.mark.parametrize("interleave", [False, True])
def test_dot_products_depend_on_the_distance_only(interleave: bool) -> None:
    q, k = rows(0, 1, 2, 64), rows(1, 1, 2, 64)
    products = []
    for shift in (0, 13, 400):
        q_out, _ = apply_rope_pos_ids(q, k, ints(7 + shift), interleave=interleave)
        _, k_out = apply_rope_pos_ids(q, k, ints(3 + shift), interleave=interleave)
        products.append((q_out * k_out).sum(-1))
    # 64 products of elements off by ATOL, each times a number of size 1: sqrt(64) * 2 * ATOL
    np.testing.assert_allclose(products[1], products[0], rtol=0, atol=16 * ATOL)
    np.testing.assert_allclose(products[2], products[0], rtol=0, atol=16 * ATOL)


def test_position_0_changes_nothing() -> None:
    q = rows(2, 1, 3, 20)
    got, _ = apply_rope_pos_ids(q, q, ints(0))
    np.testing.assert_array_equal(got, q)


@pytest.mark.parametrize("is_neox", [False, True])
def test_rest_of_a_partial_rotation_is_untouched(is_neox: bool) -> None:
    q, k = rows(3, 4, 2, 80), rows(4, 4, 1, 80)
    before = q.copy(), k.copy()
    cache = rope_cos_sin_cache(10, 32, theta=1e4)
    apply_rope_with_cos_sin_cache_inplace(
        ints(1, 2, 3, 9), q, k, cos_sin_cache=cache, is_neox=is_neox
    )
    for now, old in zip((q, k), before, strict=True):
        np.testing.assert_array_equal(now[..., 32:], old[..., 32:])
        assert (now[..., :32] != old[..., :32]).mean() > 0.9


def test_the_two_pairings_are_the_same_up_to_the_order_of_elements() -> None:
    q, k = rows(5, 3, 2, 40), rows(6, 3, 2, 40)
    order = np.arange(40).reshape(2, 20).T.ravel()  # 0, 20, 1, 21, ...
    halves, _ = apply_rope_pos_ids(q, k, ints(4, 5, 6))
    shuffled = np.ascontiguousarray(q[..., order])
    pairs, _ = apply_rope_pos_ids(shuffled, k, ints(4, 5, 6), interleave=True)
    np.testing.assert_allclose(pairs, halves[..., order], rtol=0, atol=2 * ATOL)


@pytest.mark.parametrize("is_neox", [False, True])
def test_rows_do_not_depend_on_the_batch(is_neox: bool) -> None:
    q, k = rows(7, 30, 4, 36), rows(8, 30, 2, 36)
    positions = np.arange(30, dtype=np.int32) * 7
    cache = rope_cos_sin_cache(300, 36, theta=1e4)
    whole = q.copy(), k.copy()
    apply_rope_with_cos_sin_cache_inplace(positions, *whole, cos_sin_cache=cache, is_neox=is_neox)
    for i in (0, 11, 29):
        one = q[i : i + 1].copy(), k[i : i + 1].copy()
        apply_rope_with_cos_sin_cache_inplace(
            positions[i : i + 1], *one, cos_sin_cache=cache, is_neox=is_neox
        )
        np.testing.assert_array_equal(one[0][0], whole[0][i])
        np.testing.assert_array_equal(one[1][0], whole[1][i])


def test_ragged_form_is_the_position_form() -> None:
    q, k = rows(9, 5, 2, 32), rows(10, 5, 2, 32)
    got = apply_rope(q, k, ints(0, 3, 3, 5), ints(100, 7, 0), rope_scale=2.0)
    want = apply_rope_pos_ids(q, k, ints(100, 101, 102, 0, 1), rope_scale=2.0)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_angles_are_exact_at_high_positions() -> None:
    cache = rope_cos_sin_cache(200_000, 4, theta=1e4)
    # cos(199999): an angle in float32 would be off by 8e-3; 6e-8 is half an ulp of the result
    assert abs(float(cache[-1, 0]) - np.cos(199_999.0)) < 6e-8


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"positions": ints(0, 5)}, UsageError, r"positions must be 0..4, the rows of .* got 5"),
        ({"positions": ints(0, -1)}, UsageError, "positions must be 0..4, .* got -1"),
        ({"positions": ints(0)}, UsageError, r"positions must have shape \(2\)"),
        ({"positions": np.arange(2)}, TypeError, "positions must have dtype int32"),
        ({"key": rows(0, 3, 1, 8)}, UsageError, r"key must have shape \(2, any, 8\)"),
        ({"query": rows(0, 2, 1, 8)[..., ::2]}, UsageError, "query must be C-contiguous"),
        ({"cos_sin_cache": np.zeros((5, 10), np.float32)}, UsageError, "up to the head size 8"),
        ({"cos_sin_cache": np.zeros((5, 3), np.float32)}, UsageError, "even number of columns"),
    ],
)
def test_wrong_arguments_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: dict[str, Any] = {
        "positions": ints(0, 1),
        "query": rows(0, 2, 2, 8),
        "key": rows(1, 2, 1, 8),
        "cos_sin_cache": rope_cos_sin_cache(5, 8, theta=1e4),
        **change,
    }
    with pytest.raises(error, match=words):
        apply_rope_with_cos_sin_cache_inplace(**arguments)


def test_wrong_numbers_are_named() -> None:
    q = rows(0, 2, 1, 8)
    with pytest.raises(UsageError, match=r"rotary_dim must be even and 2\.\.8, got 10"):
        apply_rope_pos_ids(q, q, ints(0, 1), rotary_dim=10)
    with pytest.raises(UsageError, match="rope_theta and rope_scale must be positive"):
        apply_rope_pos_ids(q, q, ints(0, 1), rope_scale=0.0)
    with pytest.raises(UsageError, match="indptr must end at the number of rows, 2, got 3"):
        apply_rope(q, q, ints(0, 3), ints(0))
    with pytest.raises(UsageError, match="rotary_dim must be even and positive, got 3"):
        rope_cos_sin_cache(4, 3, theta=1e4)
    with pytest.raises(UsageError, match="theta and scale must be positive"):
        rope_cos_sin_cache(4, 4, theta=0.0)
    with pytest.raises(UsageError, match="max_pos must not be negative"):
        rope_cos_sin_cache(-1, 4, theta=1e4)
