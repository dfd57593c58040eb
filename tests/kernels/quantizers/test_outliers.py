"""Outliers of a quantized tensor: exact in every decoding and product."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from nbflow_kernels.cpu.parallel_for import capture
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantTensor, dequantize, dequantize_rows
from nbflow_kernels.moe import grouped_matmul
from nbflow_kernels.quantized_matmul import cpu, qmatmul, reference
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.quantizers.outliers import SAMPLE, sample_rows, soft_range
from nbflow_kernels.sparse import CsrMatrix


def planted(rows=90, columns=500, share=0.002):
    """Return Gaussian weights, some of them times 20, and the mask of those."""
    rng = np.random.default_rng(11)
    x = rng.normal(0, 0.02, (rows, columns)).astype(np.float32)
    where = rng.random(x.shape) < share
    x[where] = np.sign(x[where]) * np.float32(0.4) + x[where]
    return x, where


def error(qt, x):
    return float(np.sqrt(np.square(dequantize(qt) - x, dtype=np.float64).mean()))


@pytest.mark.parametrize("name", ["q4", "q3h", "q4_0"])
def test_planted_weights_are_found_and_kept_exactly(name):
    x, where = planted()
    qt = quantize(x, name, outliers=0.005, quantizer="reference")
    assert qt.outliers is not None
    kept = qt.outliers.to_dense() != 0
    assert kept[where].all()
    assert np.array_equal(dequantize(qt)[kept], x[kept])
    # they stretched the range of every fifteenth block by a factor of 5 to 10
    assert error(qt, x) < 0.75 * error(quantize(x, name, quantizer="reference"), x)


@pytest.mark.parametrize("name", ["q4", "q2"])
def test_more_outliers_less_error_more_bytes(name):
    x, _ = planted()
    tensors = [
        quantize(x, name, outliers=r, quantizer="reference") for r in (0, 0.001, 0.005, 0.02)
    ]
    errors = [error(qt, x) for qt in tensors]
    assert errors == sorted(errors, reverse=True)
    assert [qt.nbytes for qt in tensors] == sorted(qt.nbytes for qt in tensors)
    for qt in tensors[1:]:
        dense = QuantTensor(qt.format, qt.shape, qt.data)
        assert qt.nbytes == dense.nbytes + 8 * qt.outliers.nnz + 4 * (len(x) + 1)


@pytest.mark.parametrize("name", ["q4_b16", "q3h", "q4", "q4_0"])
def test_no_block_becomes_worse(name):
    format = FORMATS[name]
    size = format.block_size
    rng = np.random.default_rng(12)
    x = rng.standard_t(3, (12, 4 * size)).astype(np.float32)  # outliers of every size
    if name == "q4_b16":
        x = np.clip(0.1 * x, -1, 1.5)
    quantizer = "search" if name == "q3h" else "reference"
    with_outliers = dequantize(quantize(x, name, outliers=0.05, quantizer=quantizer))
    without = dequantize(quantize(x, name, quantizer=quantizer))
    a, b = (
        np.square(v - x.astype(np.float64)).reshape(-1, size).sum(1)
        for v in (with_outliers, without)
    )
    # a stored difference is rounded to float32: 2**-24 of the weight
    assert (a <= b + size * (2.0**-24 * np.abs(x).max()) ** 2).all()


def test_every_product_adds_them():
    x, _ = planted(37, 330)
    w = quantize(x, "q4", outliers=0.01)
    dense = QuantTensor(w.format, w.shape, w.data)
    activations = np.random.default_rng(13).standard_normal((7, 330), dtype=np.float32)
    bias = np.linspace(-1, 1, 37, dtype=np.float32)
    extra = np.abs(activations) @ np.abs(w.outliers.to_dense()).T
    assert (
        np.abs(reference.qmatmul(activations, w) - reference.qmatmul(activations, dense)).max() > 1
    )
    for kind in ("f32", "int8"):
        y = qmatmul(activations, w, bias=bias, activations=kind)
        wanted = reference.qmatmul(activations, w, bias=bias, activations=kind)
        # float32 sums of 330 products of numbers below 4 and 0.06, and a few of 0.5
        assert np.abs(y - wanted).max() < 1e-5 + 4e-7 * extra.max()
        alone = [qmatmul(activations[t : t + 1], w, bias=bias, activations=kind) for t in range(7)]
        assert np.array_equal(np.concatenate(alone), y)
        out = np.full((7, 37), 2.0, np.float32)
        qmatmul(activations, w, bias=bias, activations=kind, accumulate=True, out=out)
        assert np.allclose(out, wanted + 2, rtol=0, atol=1e-5)


def test_launchers_with_outliers_can_be_captured():
    x, _ = planted(20, 64)
    w = quantize(x, "q4", outliers=0.01)
    w.drop_storage()
    activations = np.ones((1, 64), np.float32)
    rows = cpu.Int8Rows.empty(1, 64)
    cpu.quantize_activations(activations, rows)
    for launch in (
        lambda out: cpu.matmul(activations, w, None, False, out),
        lambda out: cpu.matmul_int8(rows, w, None, False, out),
    ):
        wanted, out = np.zeros((1, 20), np.float32), np.full((1, 20), np.nan, np.float32)
        launch(wanted)
        with capture() as seen:
            launch(out)
        assert seen.complete
        assert len(seen.calls) == 2
        for call in seen.calls:
            call()
        assert np.array_equal(out, wanted)


def test_experts_add_theirs_after_their_products():
    x, _ = planted(3 * 40, 96)
    w = quantize(x.reshape(3, 40, 96), "q4", outliers=0.02)
    activations = np.random.default_rng(14).standard_normal((300, 96), dtype=np.float32)
    indptr = np.array([0, 120, 121, 300], np.int32)
    y = grouped_matmul(activations, w, indptr)
    for i, one in enumerate(w.matrices()):
        part = slice(indptr[i], indptr[i + 1])
        assert np.array_equal(y[part], qmatmul(activations[part], one))


def test_rows_gather_pickle_and_parts_keep_them():
    x, _ = planted(40, 96)
    w = quantize(x, "q3h", outliers=0.01)
    values = dequantize(w)
    assert np.array_equal(dequantize(w.rows(7, 30)), values[7:30])
    ids = np.array([39, 0, 5, 5])
    assert np.array_equal(dequantize_rows(w, ids), values[ids])
    packed = QuantTensor(w.format, w.shape, w.data, w.outliers)
    packed.drop_storage()
    assert np.array_equal(dequantize(packed), values)
    assert np.array_equal(dequantize_rows(packed, ids), values[ids])
    back = pickle.loads(pickle.dumps(w))
    assert np.array_equal(dequantize(back), values)
    assert back.nbytes == w.nbytes
    parts = QuantTensor.concatenate([w.rows(0, 13), w.rows(13, 40)])
    assert np.array_equal(dequantize(parts), values)
    assert "outliers=" in repr(w)
    mixed = QuantTensor.concatenate([QuantTensor(w.format, w.shape, w.data), w])
    assert np.array_equal(dequantize(mixed)[40:], values)
    with pytest.raises(UsageError, match="no place for the outliers"):
        w.tobytes()
    with pytest.raises(UsageError, match="of one format and number of columns"):
        QuantTensor.concatenate([w, quantize(x, "q4")])
    with pytest.raises(UsageError, match=r"outliers must have shape \(rows, columns\)"):
        QuantTensor(w.format, (40, 95), w.data, w.outliers)


def test_three_axes_and_padded_rows():
    x, _ = planted(12, 50)
    w = quantize(x.reshape(3, 4, 50), "q4", outliers=0.02)
    flat = quantize(x, "q4", outliers=0.02)
    assert np.array_equal(dequantize(w), dequantize(flat).reshape(3, 4, 50))
    assert np.array_equal(dequantize(w.matrices()[1]), dequantize(flat)[4:8])


def test_importance_decides_what_is_worse():
    x, _ = planted(8, 64)
    importance = np.where(np.arange(64) % 2 == 0, 1, 0).astype(np.float32)
    w = quantize(x, "q4", outliers=0.05, importance=importance)
    plain = quantize(x, "q4", importance=importance)
    a, b = (np.square(dequantize(v) - x)[:, ::2].sum() for v in (w, plain))
    assert a <= b


def test_nothing_to_keep():
    assert quantize(np.ones((4, 64), np.float32), "q4", outliers=0.05).outliers is None
    assert quantize(np.zeros((0, 64), np.float32), "q4", outliers=0.05).outliers is None


def test_soft_range_leaves_the_ratio_outside():
    x = np.random.default_rng(1).normal(size=(100, 1000)).astype(np.float32)
    low, high = soft_range(x, 0.01)
    assert ((x < low) | (x > high)).mean() == pytest.approx(0.01, abs=2e-5)
    assert soft_range(np.zeros((0, 4)), 0.01) == (0.0, 0.0)
    assert sample_rows(100, 1000).step == 1
    assert len(sample_rows(11008, 4096)) * 4096 <= SAMPLE


def test_a_given_range_makes_parts_equal_to_the_whole():
    x, _ = planted(60, 128)
    limits = soft_range(x, 0.01)
    whole = quantize(x, "q4", outliers=0.01)
    parts = [
        quantize(x[a:b], "q4", outliers=0.01, outlier_range=limits) for a, b in ((0, 25), (25, 60))
    ]
    assert np.array_equal(np.concatenate([dequantize(p) for p in parts]), dequantize(whole))
    left = quantize(np.ascontiguousarray(x[:, :64]), "q4", outliers=0.01, outlier_range=limits)
    assert np.array_equal(dequantize(left), dequantize(whole)[:, :64])


@pytest.mark.parametrize(
    ("ratio", "kind", "message"),
    [
        (0.06, UsageError, r"outliers must lie in 0..0.05 .*got 0.06"),
        (-0.1, UsageError, "outliers must lie in"),
        (float("nan"), UsageError, "outliers must lie in"),
        ("many", TypeError, "outliers must be a number, got str"),
    ],
)
def test_wrong_ratios(ratio, kind, message):
    with pytest.raises(kind, match=message):
        quantize(np.ones((1, 32), np.float32), "q4", outliers=ratio)


def test_float_formats_have_none():
    with pytest.raises(UsageError, match="outliers are for block formats; f16 stores each"):
        quantize(np.ones((1, 32), np.float32), "f16", outliers=0.01)


def test_sparse_matrices_one_below_the_other():
    a = CsrMatrix.from_dense(np.float32([[0, 2, 0], [1, 0, 3]]))
    both = CsrMatrix.concatenate([a, CsrMatrix.empty((2, 3)), a])
    zeros = np.zeros((2, 3), np.float32)
    assert np.array_equal(both.to_dense(), np.concatenate([a.to_dense(), zeros, a.to_dense()]))
    with pytest.raises(UsageError, match=r"one number of columns, got \[2, 3\]"):
        CsrMatrix.concatenate([a, CsrMatrix.empty((1, 2))])
