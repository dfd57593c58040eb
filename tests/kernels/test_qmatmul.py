"""The quantized product beyond its cases: invariance, bands, errors, what is compiled."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba import njit

from nbflow_kernels import simd
from nbflow_kernels.errors import MissingExtraError, UsageError
from nbflow_kernels.qmatmul import cases, cpu, qmatmul, reference
from nbflow_kernels.qmatmul.layouts import pair_pairs, split_pair
from nbflow_kernels.quants import FORMATS, dequantize, quantize
from nbflow_kernels.quants.linear import LinearFormat
from nbflow_kernels.threads import get_num_threads, set_num_threads

BLOCK_FORMATS = [name for name, f in FORMATS.items() if isinstance(f, LinearFormat)]


@pytest.fixture
def threads():
    before = get_num_threads()
    yield set_num_threads
    set_num_threads(before)


def make(name: str, T: int, N: int, K: int):
    rng = np.random.default_rng(5)
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(K**0.5)
    return rng.standard_normal((T, K), dtype=np.float32), quantize(w, name, encoder="plain")


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_kernels_compute_from_what_dequantize_gives(name):
    # rows of the identity pick single weights: one product by 1, the others by 0, no rounding
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
def test_a_row_does_not_depend_on_the_others_nor_on_threads(name, threads):
    x, w = make(name, 71, 203, 330)  # 71 = 64 + 7 tokens; 13 row groups, the last of 11 rows
    bias = np.random.default_rng(6).standard_normal(203, dtype=np.float32)
    threads(1)
    alone = np.concatenate([qmatmul(x[t : t + 1], w, bias=bias) for t in range(71)])
    for n in (1, 2, 3):
        threads(n)
        for T in (7, 64, 71):
            assert np.array_equal(qmatmul(x[:T], w, bias=bias), alone[:T]), (n, T)
    assert np.array_equal(qmatmul(x[60:], w, bias=bias), alone[60:])


def test_bias_and_accumulate_are_added_in_this_order():
    x, w = make("q4", 3, 20, 64)
    bias = np.linspace(-1, 1, 20, dtype=np.float32)
    old = np.full((3, 20), 0.37, np.float32)
    out = old.copy()
    assert qmatmul(x, w, bias=bias, accumulate=True, out=out) is out
    assert np.array_equal(out, (qmatmul(x, w) + bias) + old)


def test_bands_of_wider_arrays():
    x, w = make("q4", 5, 40, 96)
    wide_x = np.zeros((5, 200), np.float32)
    wide_x[:, 50:146] = x
    wide_out = np.full((5, 100), np.nan, np.float32)
    qmatmul(wide_x[:, 50:146], w, out=wide_out[:, 30:70])
    assert np.array_equal(wide_out[:, 30:70], qmatmul(x, w))
    assert np.isnan(wide_out[:, :30]).all()
    assert np.isnan(wide_out[:, 70:]).all()


@njit
def _split(codes, x, y):
    for i in range(0, 128, 16):
        a, b = split_pair(simd.load_i32(simd.address(codes) + 4 * i))
        simd.store_f32(simd.address(x) + 4 * i, a)
        simd.store_f32(simd.address(y) + 4 * i, b)


@njit
def _pair(word):
    v = simd.load_i32(simd.address(word))
    first, second = pair_pairs(v, v, 1, simd.splat(0.0), simd.splat(1.0))
    return simd.sum(simd.add(first, second))


def test_vector_pair_codes_all_121_without_division():
    codes = np.arange(128, dtype=np.int32)
    x, y = np.zeros(128, np.float32), np.zeros(128, np.float32)
    _split(codes, x, y)
    assert np.array_equal(x[:121], codes[:121] % 11)
    assert np.array_equal(y[:121], codes[:121] // 11)
    _pair(np.zeros(16, np.int32))
    for text in _pair.inspect_llvm().values():
        assert not re.search(r"\b(udiv|sdiv|urem|srem|fdiv)\b", text)
    for text in _pair.inspect_asm().values():
        assert not re.search(r"^\s*(v?div|idiv)", text, re.MULTILINE)


def test_packed_layout_takes_no_more_than_storage():
    for name in BLOCK_FORMATS:
        _, w = make(name, 1, 32, 128)
        assert w.packed().nbytes == w.nbytes, name
        assert w.packed() is w.packed()


def test_every_layout_has_kernels():
    used = {FORMATS[name].layout.name for name in BLOCK_FORMATS}
    assert used == set(cpu._KERNELS)
    tested = {FORMATS[name].layout.name for name in cases._LAYOUTS}
    assert tested == used


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
    with pytest.raises(UsageError, match="out must not overlap x"):
        qmatmul(x, w, out=x[:, :3])
    with pytest.raises(MissingExtraError, match="no CUDA variant of qmatmul"):
        qmatmul(x.view(_OnDevice), w)
