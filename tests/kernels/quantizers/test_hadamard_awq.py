"""Hadamard rotations, AWQ scales and outliers by gain, against matrices and brute force."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers import quantize_calibrated
from nbflow_kernels.quantizers.awq import column_scales, search_scales
from nbflow_kernels.quantizers.hadamard import Rotation, paley_order
from nbflow_kernels.quantizers.outliers import _chosen_steps, delta_rows


def output_error(w: np.ndarray, approximate: np.ndarray, x: np.ndarray) -> float:
    return float(np.square(x @ (approximate.astype(np.float64) - w).T).sum())


@pytest.mark.parametrize("size", [1, 2, 12, 24, 56 * 4, 256])
def test_rotation_is_an_orthogonal_matrix_of_entries_of_one_size(size: int) -> None:
    matrix = Rotation(size, seed=5).apply(np.eye(size))
    # float64 butterflies of log2(size) levels: a few roundings of entries of size**-0.5
    assert np.abs(matrix @ matrix.T - np.eye(size)).max() < 1e-12
    assert np.allclose(np.abs(matrix), size**-0.5, rtol=1e-12)
    x = np.random.default_rng(1).normal(size=(3, 2 * size))
    both = np.kron(np.eye(2), matrix) if size < 300 else None
    turned = Rotation(size, seed=5).apply(x)
    if both is not None:
        assert np.allclose(turned, x @ both, atol=1e-12)
    assert np.allclose(Rotation(size, seed=5).apply(turned, inverse=True), x, atol=1e-12)


def test_rotation_of_four_by_hand() -> None:
    turn = Rotation(4, seed=0)
    turn.signs = np.array([1.0, -1.0, 1.0, 1.0])
    # Sylvester: rows ++++, +-+-, ++--, +--+, over sqrt(4), signs on the inputs
    assert np.allclose(turn.apply(np.array([[1.0, 2.0, 3.0, 4.0]])), [[3, 1, -4, 2]])


def test_moments_turn_with_their_rows() -> None:
    turn, x = Rotation(12, seed=2), np.random.default_rng(3).normal(size=(50, 24))
    y = turn.apply(x)
    assert np.allclose(turn.rotate_moments(x.T @ x), y.T @ y)


def test_sizes_without_a_matrix_are_refused() -> None:
    assert paley_order(5120) == 20
    assert paley_order(3584) == 224
    with pytest.raises(UsageError, match="no Hadamard matrix of order 36"):
        Rotation(36)
    with pytest.raises(UsageError, match="must be a multiple of 8"):
        Rotation(8).apply(np.ones((2, 12)))


def test_rotation_spreads_a_planted_outlier() -> None:
    rng = np.random.default_rng(4)
    w = rng.normal(0, 0.02, (64, 256))
    w[:, ::64] *= 30  # a large column in each block of q4_b64t1
    x, turn = rng.normal(size=(100, 256)), Rotation(256)
    plain = nk.dequantize(nk.quantize(w, "q4_b64t1"))
    rotated = nk.dequantize(nk.quantize(turn.apply(w), "q4_b64t1"))
    back = turn.apply(rotated, inverse=True)
    assert output_error(w, back, x) < 0.5 * output_error(w, plain, x)


def test_scales_by_hand() -> None:
    # sqrt of (1, 16) to the power 1/2 is (1, 2); normalized to inverses: sqrt(2)
    assert np.allclose(column_scales(np.array([1.0, 16.0]), 0.5), [0.5**0.5, 2**0.5])
    assert np.array_equal(column_scales(np.zeros(3), 0.5), np.ones(3))


def test_scales_lower_the_error_of_planted_inputs() -> None:
    rng = np.random.default_rng(5)
    w, x = rng.normal(size=(48, 128)), rng.normal(size=(300, 128)) * np.exp(rng.normal(size=128))
    for statistics in (x.T @ x, np.square(x).sum(axis=0)):
        found = search_scales([(w, nk.FORMATS["q3"])], statistics)
        assert found.exponent > 0
        assert len(found.losses) == 20
        scaled = nk.dequantize(nk.quantize(w * found.scales, "q3")) / found.scales
        best, plain = (
            nk.dequantize(nk.quantize(w, "q3", quantizer=e)) for e in ("search", "reference")
        )
        assert output_error(w, scaled, x) < 0.95 * output_error(w, best, x)
        assert output_error(w, scaled, x) < 0.75 * output_error(w, plain, x)


def test_shared_columns_get_one_scale() -> None:
    rng = np.random.default_rng(6)
    squares = np.exp(2 * rng.normal(size=64))
    shared = np.arange(64) % 32
    found = search_scales([(rng.normal(size=(32, 64)), nk.FORMATS["q3"])], squares, shared)
    assert np.array_equal(found.scales[:32], found.scales[32:])
    assert found.exponent == 0 or len(set(found.scales)) == 32


@pytest.mark.parametrize("name", ["q3h", "q4_0"])
def test_outliers_by_gain_lose_less_than_without(name: str) -> None:
    rng = np.random.default_rng(7)
    w = rng.standard_t(3, size=(16, 256)).astype(np.float32)
    importance = np.exp(rng.normal(size=256))
    qt = quantize_calibrated(w, name, "outliers", importance, outliers=0.02)
    assert qt.outliers is not None
    counts = np.diff(qt.outliers.indptr)
    assert counts.max() == int(0.02 * 256)
    best = nk.dequantize(nk.quantize(w, name, importance=importance))
    error, before = (
        (importance * np.square(d.astype(np.float64) - w)).sum(axis=1)
        for d in (nk.dequantize(qt), best)
    )
    assert (error <= before * (1 + 1e-6)).all()  # float32 sums in another order
    assert error.sum() < 0.8 * before.sum()
    # columns are cut with their outliers
    block = qt.format.block_size
    assert np.array_equal(nk.dequantize(qt.columns(block, 256)), nk.dequantize(qt)[:, block:])


def test_outliers_are_where_they_gain_most() -> None:
    w = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (1, 4))
    w[0, 40] = 100.0
    data, sparse = delta_rows(nk.FORMATS["q4"], w, 128, None, 1)
    assert sparse.indices.tolist() == [40]
    decoded = np.empty_like(w)
    nk.FORMATS["q4"].dequantize_rows(data, decoded)
    assert decoded[0, 40] + sparse.values[0] == 100.0


def test_two_outliers_share_their_gain() -> None:
    # block 0 gains only with two outliers, block 1 with one: two of three places go to block 0
    errors = np.array([[[10.0, 5.0, 3.0]], [[9.9, 4.0, 3.5]], [[1.0, 3.9, 3.0]]])
    assert _chosen_steps(errors, 2).tolist() == [[2, 0, 0]]
    assert _chosen_steps(errors, 3).tolist() == [[2, 1, 0]]
    assert _chosen_steps(errors, 0).tolist() == [[0, 0, 0]]


def test_wrong_use() -> None:
    w = np.ones((2, 64), np.float32)
    for arguments, options, message in (
        (("q4", "outliers"), {}, "needs a block format and outliers"),
        (("f16", "outliers"), {"outliers": 0.01}, "needs a block format"),
        (("q4", "gptq", np.eye(64)), {"outliers": 0.01}, "goes with quantizer 'outliers'"),
        (("q4", "gptq", np.eye(64)), {"damping": 2.0}, r"damping must lie in 0\.\.1"),
    ):
        with pytest.raises(UsageError, match=message):
            quantize_calibrated(w, *arguments, **options)
    with pytest.raises(UsageError, match=r"statistics must have shape \(64,\)"):
        search_scales([(w, nk.FORMATS["q4"])], np.ones(63))
    with pytest.raises(UsageError, match=">= 0"):
        search_scales([(w, nk.FORMATS["q4"])], -np.ones(64))
    with pytest.raises(UsageError, match="between blocks of 32"):
        nk.quantize(w, "q4").columns(8, 64)


def test_damping_and_order_change_gptq() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(200, 8)) @ rng.normal(size=(8, 64)) + 0.3 * rng.normal(size=(200, 64))
    w = rng.normal(size=(16, 64))
    plain, damped, ordered = (
        quantize_calibrated(w, "q3", "gptq", x.T @ x, **options).data
        for options in ({}, {"damping": 0.5}, {"act_order": True})
    )
    assert not np.array_equal(plain, damped)
    assert not np.array_equal(plain, ordered)
