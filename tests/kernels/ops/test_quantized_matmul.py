"""Quantized matrix product: batch invariance, strided arrays, errors, compiled layouts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import synthetic_formats

from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, dequantize
from nbflow_kernels.formats.layout_cpu import packed_form
from nbflow_kernels.quantized_matmul import ACTIVATIONS, cases, qmatmul, reference
from nbflow_kernels.quantizers import quantize

BLOCK_FORMATS = [name for name, f in FORMATS.items() if f.block_size > 1]


@pytest.fixture
def threads():
    before = get_num_threads()
    yield set_num_threads
    set_num_threads(before)


def make(name: str, T: int, N: int, K: int):
    rng = np.random.default_rng(5)
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(K**0.5)
    return rng.standard_normal((T, K), dtype=np.float32), quantize(w, name, quantizer="reference")


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_kernels_multiply_the_weights_of_dequantize(name):
    # rows of the identity select single weights, without rounding
    _, w = make(name, 1, 37, 100)
    want = dequantize(w).T
    assert np.array_equal(qmatmul(np.eye(100, dtype=np.float32), w), want)
    one = [qmatmul(np.eye(1, 100, k, dtype=np.float32), w)[0] for k in range(100)]
    assert np.array_equal(np.stack(one), want)
    assert np.array_equal(reference.weights(w).T, want.astype(np.float64))


@pytest.mark.parametrize(
    "name",
    [
        *("q8", "q6", "q5", "q4", "q4_b16", "q3h", "q3", "q2", "f16"),
        *("q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    ],
)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(name, activations, threads):
    if name == "f16" and activations == "int8":
        return  # refused, see the test of errors
    x, w = make(name, 71, 203, 330)  # 71 = 64 + 7 tokens; 13 row groups, the last of 11 rows
    bias = np.random.default_rng(6).standard_normal(203, dtype=np.float32)

    def product(x):
        return qmatmul(x, w, bias=bias, activations=activations)

    threads(1)
    alone = np.concatenate([product(x[t : t + 1]) for t in range(71)])
    for n in (1, 2, 3):
        threads(n)
        for T in (7, 64, 71):
            assert np.array_equal(product(x[:T]), alone[:T]), (n, T)
    assert np.array_equal(product(x[60:]), alone[60:])


@pytest.mark.parametrize("name", ["q4_0", "q4_b16", "q3h"])
def test_any_small_number_of_rows(name):
    x, w = make(name, 10, 40, 192)
    want = qmatmul(x, w, activations="int8")
    for T in range(10):
        assert np.array_equal(qmatmul(x[:T], w, activations="int8"), want[:T])


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_bias_and_accumulate_are_added_in_this_order(activations):
    x, w = make("q4", 3, 20, 64)
    bias = np.linspace(-1, 1, 20, dtype=np.float32)
    old = np.full((3, 20), 0.37, np.float32)
    out = old.copy()
    product = functools.partial(qmatmul, x, w, activations=activations)
    assert product(bias=bias, accumulate=True, out=out) is out
    assert np.array_equal(out, (product() + bias) + old)


# layouts that the int8 kernels distinguish and no format above has
SHAPES = ("like_q2_k", "like_q4_k", "like_q6_k", "like_iq4_xs", "like_mxfp4", "zero_and_base")


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_other_integer_forms(name):
    rng = np.random.default_rng(7)
    w = synthetic_formats.FORMATS[name].random(rng, 37, 600)
    x = rng.standard_normal((9, 600), dtype=np.float32)
    want = reference.qmatmul(x, w, activations="int8")
    # 600 / 16 sums, added at most twice: 75 roundings of 2**-24 of partial sums, which are below 4
    # times the result although codes and bases are added separately
    size = np.sqrt(np.square(reference.weights(w)).sum(axis=1)).max()
    limit = 3 * 75**0.5 * 2.0**-24 * 4 * max(size, np.abs(want).max())
    got = qmatmul(x, w, activations="int8")
    assert np.abs(got - want).max() <= limit
    for T in (1, 5):
        assert np.array_equal(qmatmul(x[:T], w, activations="int8"), got[:T])


def test_columns_of_wider_arrays():
    x, w = make("q4", 5, 40, 96)
    wide_x = np.zeros((5, 200), np.float32)
    wide_x[:, 50:146] = x
    wide_out = np.full((5, 100), np.nan, np.float32)
    qmatmul(wide_x[:, 50:146], w, out=wide_out[:, 30:70])
    assert np.array_equal(wide_out[:, 30:70], qmatmul(x, w))
    assert np.isnan(wide_out[:, :30]).all()
    assert np.isnan(wide_out[:, 70:]).all()


def test_every_form_of_a_format_has_a_case():
    forms = {FORMATS[name].name: packed_form(FORMATS[name].integer_form) for name in BLOCK_FORMATS}
    tested = {forms[FORMATS[name].name] for name in (*cases.FORMS, *cases.LARGE_BLOCK_FORMS)}
    missing = [name for name, form in forms.items() if form not in tested]
    assert missing == []


class _OnDevice(np.ndarray):
    __cuda_array_interface__ = {"version": 3}  # noqa: RUF012


def test_errors_name_what_was_wrong():
    x, w = make("q4", 2, 3, 32)
    with pytest.raises(TypeError, match="w must be a QuantTensor, got ndarray; use matmul"):
        qmatmul(x, x)
    with pytest.raises(UsageError, match=r"w must have shape \(N, K\), got \(32,\)"):
        qmatmul(x, quantize(x[0], "q4"))
    with pytest.raises(UsageError, match=r"x must have shape \(any, 32\), got \(2, 30\)"):
        qmatmul(np.ascontiguousarray(x[:, :30]), w)
    with pytest.raises(TypeError, match="x must have dtype float32, got float64"):
        qmatmul(x.astype(np.float64), w)
    with pytest.raises(UsageError, match=r"bias must have shape \(3\)"):
        qmatmul(x, w, bias=np.zeros(4, np.float32))
    with pytest.raises(UsageError, match=r"out must have shape \(2, 3\), got \(3, 2\)"):
        qmatmul(x, w, out=np.zeros((3, 2), np.float32))
    with pytest.raises(UsageError, match="accumulate=True needs out="):
        qmatmul(x, w, accumulate=True)
    with pytest.raises(UsageError, match="unknown kind of activations 'int4'"):
        qmatmul(x, w, activations="int4")
    with pytest.raises(
        UsageError, match="'int8' needs weights in a block format of integers, got f16"
    ):
        qmatmul(x, quantize(x, "f16"), activations="int8")
    with pytest.raises(UsageError, match="out must not overlap x"):
        qmatmul(x, w, out=x[:, :3])
    with pytest.raises(UsageError, match="x is on a CUDA device and w in host memory"):
        qmatmul(x.view(_OnDevice), w)
