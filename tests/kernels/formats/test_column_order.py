"""Weights whose columns are stored in another order: `nbflow_kernels.formats.column_order`."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.column_order import gather_columns, inverse, order_by_group
from nbflow_kernels.moe.reference import grouped_matmul
from nbflow_kernels.quantized_matmul import reference
from nbflow_kernels.quantized_matmul.cases import weights


def reordered(N: int = 37, K: int = 203, format: str = "uint4_g32") -> nk.QuantTensor:
    return weights(np.random.default_rng([N, K]), N, K, format, reordered=True)


def expected(w: nk.QuantTensor) -> np.ndarray:
    """Return the weights in their own order, column by column."""
    stored, found = reference.weights(w), np.full(w.shape, np.nan)
    for j, k in enumerate(w.column_order):
        if k >= 0:
            found[:, k] = stored[:, j]
    return found


@pytest.mark.parametrize("n_groups", [1, 5])
@pytest.mark.parametrize("block", [1, 16])
def test_blocks_have_one_group_each(n_groups: int, block: int) -> None:
    groups = np.random.default_rng(0).integers(0, n_groups, 90)
    order, of_blocks = order_by_group(groups, n_groups + 1, block)  # the last group is empty
    assert len(order) == block * len(of_blocks)
    for group, columns in zip(of_blocks, order.reshape(-1, block), strict=True):
        kept = columns[columns >= 0]
        assert (groups[kept] == group).all()
        assert (np.diff(kept) > 0).all()  # a stable order
    np.testing.assert_array_equal(np.sort(order[order >= 0]), np.arange(90))
    np.testing.assert_array_equal(order[inverse(order)], np.arange(90))
    assert n_groups not in of_blocks


def test_gather_of_strided_rows() -> None:
    x = np.arange(40, dtype=np.float32).reshape(4, 10)[::2, 1:]
    order = np.array([8, -1, 0, 3], np.int32)
    out = np.full((2, 4), np.nan, np.float32)
    gather_columns(x, order, out)
    assert out.tolist() == [[9, 0, 1, 4], [29, 0, 21, 24]]


def test_weights_come_in_their_own_order() -> None:
    w = reordered()
    assert w.n_stored_columns > 203  # groups are filled up to whole blocks
    wanted = expected(w)
    np.testing.assert_array_equal(nk.dequantize(w), wanted)
    ids = np.array([36, 0, 7])
    np.testing.assert_array_equal(nk.embedding(ids.astype(np.int32), w), wanted[ids])
    np.testing.assert_array_equal(nk.dequantize(w.rows(5, 9)), wanted[5:9])
    again = pickle.loads(pickle.dumps(w))
    both = nk.QuantTensor.concatenate([w.rows(0, 20), again.rows(20, 37)])
    np.testing.assert_array_equal(nk.dequantize(both), wanted)
    assert w.nbytes == w.data.nbytes + w.column_order.nbytes
    assert "reordered" in repr(w)
    w.drop_storage()
    np.testing.assert_array_equal(nk.dequantize(w), wanted)


def test_columns_have_factors() -> None:
    """A decoded weight is multiplied by the factor of its column, in its own order or another."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 203), dtype=np.float32)
    for reorder in (False, True):
        w = weights(rng, 37, 203, "uint4_g32", reorder, scaled=True)
        plain = nk.QuantTensor(w.format, w.shape, w.data, None, w.column_order)
        wanted = nk.dequantize(plain) * w.column_scales
        for some in (w, pickle.loads(pickle.dumps(w)), nk.QuantTensor.concatenate([w])):
            np.testing.assert_array_equal(nk.dequantize(some), wanted)
        np.testing.assert_array_equal(nk.dequantize(w.rows(5, 9)), wanted[5:9])
        # products multiply the activations, rounded as they are
        np.testing.assert_array_equal(
            nk.qmatmul(x, w, activations="int8"),
            nk.qmatmul(x * w.column_scales, plain, activations="int8"),
        )
        assert w.nbytes == w.data.nbytes + w.column_order.nbytes + 4 * 203
        assert "scaled columns" in repr(w)
        w.drop_storage()
        np.testing.assert_array_equal(nk.dequantize(w), wanted)


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_experts_have_orders_of_their_own(activations: str) -> None:
    rng = np.random.default_rng(3)
    experts = [weights(rng, 24, 203, "int4_g16", reordered=True) for _ in range(3)]
    assert not np.array_equal(experts[0].column_order, experts[1].column_order)
    x = rng.standard_normal((9, 203), dtype=np.float32)
    indptr = np.array([0, 4, 4, 9], np.int32)
    found = nk.grouped_matmul(x, experts, indptr, activations=activations)
    if activations == "f32":
        dense = [expected(w).astype(np.float32) for w in experts]
        wanted = grouped_matmul(x, dense, indptr)
        # 3 * sqrt(K + 8) roundings, see `quantized_matmul.cases`
        assert np.abs(found - wanted).max() < 3 * 211**0.5 * 1.4e-7
    else:
        for e in (0, 2):
            part = slice(indptr[e], indptr[e + 1])
            alone = nk.qmatmul(x[part], experts[e], activations="int8")
            np.testing.assert_array_equal(found[part], alone)


def make(
    order: object,
    shape: tuple[int, int] = (2, 32),
    format: str = "int4_g32",
    scales: object = None,
) -> None:
    n_blocks = -(-len(np.atleast_1d(order)) // nk.FORMATS[format].block_size)
    data = np.zeros((2, n_blocks * nk.FORMATS[format].block_bytes), np.uint8)
    nk.QuantTensor(format, shape, data, column_order=order, column_scales=scales)


ORDER = np.arange(32, dtype=np.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(ORDER.astype(np.int64)), TypeError, r"int32 of one dimension, got int64"),
        (lambda: make(list(range(32))), TypeError, "got list"),
        (lambda: make(ORDER + 1), UsageError, r"must lie in -1\.\.31, got 1\.\.32"),
        (lambda: make(ORDER - 2), UsageError, r"must lie in -1\.\.31, got -2\.\.29"),
        (lambda: make(np.maximum(ORDER, 1)), UsageError, "each of the 32 columns once"),
        (lambda: make(ORDER, (2, 33)), UsageError, "each of the 33 columns once"),
        (lambda: make(ORDER, format="f32"), UsageError, "a block format that has a packed layout"),
        (lambda: reordered().columns(0, 32), UsageError, "cannot be cut"),
        (lambda: reordered().tobytes(), UsageError, "no place for the column_order"),
        (
            lambda: nk.QuantTensor.concatenate([reordered(37), reordered(36)]),
            UsageError,
            "the same column_order",
        ),
        (lambda: make(ORDER, scales=np.ones(32)), TypeError, "float32, got float64"),
        (lambda: make(ORDER, scales=np.ones(8, np.float32)), UsageError, r"shape \(32,\), got"),
    ],
)
def test_wrong_orders(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
