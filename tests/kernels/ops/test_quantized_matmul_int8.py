"""GEMV and GEMM with int8 activations: quantization, error, launches, batch invariance."""

from __future__ import annotations

import numpy as np
import pytest

from nbflow_kernels.cpu.parallel_for import capture
from nbflow_kernels.quantized_matmul import cpu, cpu_gemm_int8, cpu_gemv_int8, qmatmul, reference
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows, quantize_activations
from nbflow_kernels.quantizers import quantize


def quantized(x: np.ndarray) -> Int8Rows:
    rows = Int8Rows.empty(*x.shape)
    quantize_activations(x, rows)
    return rows


@pytest.mark.parametrize("n_columns", [32, 300, 17, 1])
def test_activations_are_quantized_as_the_formula_says(n_columns):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, n_columns), dtype=np.float32)
    x[1] *= 1e-20
    x[2] *= 1e-36  # below 2 ** -100
    x[3] = np.round(x[3] * 4) / 2  # halves
    x[4] = 0
    rows = quantized(x)
    codes, scales = reference.int8_codes(x)
    assert np.array_equal(rows.codes[:6, :n_columns], codes)
    assert not rows.codes[:, n_columns:].any()
    assert np.array_equal(rows.scales[:6, : scales.shape[1]], scales)
    halves = rows.codes.reshape(8, -1, 16).sum(axis=2)
    assert np.array_equal(rows.half_sums, halves)
    assert np.array_equal(rows.sums, halves[:, ::2] + halves[:, 1::2])
    assert not rows.scales[2].any()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_make_their_row_nan(broken):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 96), dtype=np.float32)
    w = quantize(rng.standard_normal((20, 96), dtype=np.float32), "q4_0")
    want = qmatmul(x, w, activations="int8")
    x[1, 40] = broken
    got = qmatmul(x, w, activations="int8")
    assert np.isnan(got[1]).all()
    assert np.array_equal(got[::2], want[::2])


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q3h"])
def test_error_of_int8_activations(name):
    """Check the documented error: 0.5 % of the result's root mean square, in any format.

    The largest of 32 normal numbers is 2.07 on average (mean square 4.5), a step is 1/127 of it,
    and the error is uniform: sqrt(4.5 / 12) / 127 = 4.8e-3.  The bounds are 15 % either way.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((32, 1024), dtype=np.float32)
    w = quantize(rng.standard_normal((256, 1024), dtype=np.float32), name, quantizer="reference")
    exact = reference.qmatmul(x, w)
    error = qmatmul(x, w, activations="int8") - exact
    relative = np.sqrt(np.square(error).mean() / np.square(exact).mean())
    assert 4.1e-3 < relative < 5.5e-3
    float_error = qmatmul(x, w) - exact
    assert np.sqrt(np.square(float_error).mean() / np.square(exact).mean()) < 1e-6


def test_one_quantization_serves_several_products_in_one_call_each():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((9, 320), dtype=np.float32)
    rows = quantized(x)
    for name in ("q8_0", "q4_b16"):
        w = quantize(rng.standard_normal((50, 320), dtype=np.float32), name, quantizer="reference")
        want = qmatmul(x, w, activations="int8")
        out = np.full((9, 50), np.nan, np.float32)
        with capture() as seen:
            cpu.matmul_int8(rows, w, None, False, out)
        assert seen.complete
        assert len(seen.calls) == 1
        assert np.isnan(out).all()
        seen.calls[0]()
        assert np.array_equal(out, want)
    with capture() as seen:
        quantize_activations(x, rows)
    assert seen.complete
    assert len(seen.calls) == 1


@pytest.mark.parametrize("name", ["nvfp4", "q2_k"])
def test_sub_blocks_of_16_have_the_same_bits_in_gemv_and_gemm(name):
    """A row alone, and among 33 or 9: scales folded into codes, and d per sub-block."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((9, 512), dtype=np.float32)
    w = quantize(rng.standard_normal((37, 512), dtype=np.float32), name, quantizer="reference")
    n = 33 if name == "q2_k" else 9
    x = np.resize(x, (n, 512))
    old, bias = rng.standard_normal((n, 37), np.float32), rng.standard_normal(37, np.float32)
    whole = old.copy()
    qmatmul(x, w, bias=bias, accumulate=True, activations="int8", out=whole)
    for row in (0, n - 1):
        one = old[row : row + 1].copy()
        qmatmul(x[row : row + 1], w, bias=bias, accumulate=True, activations="int8", out=one)
        assert np.array_equal(one[0], whole[row])


def test_a_row_has_the_same_bits_in_any_batch():
    """Every kernel and tile: GEMV of 1 to 4 and 8 rows, once and repeated, and GEMM."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((36, 512), dtype=np.float32)
    w = quantize(rng.standard_normal((50, 512), dtype=np.float32), "q4_0", quantizer="reference")
    whole = qmatmul(x, w, activations="int8")
    for n in (1, 2, 3, 4, 5, 8, 9, 10, 13, 17):
        assert np.array_equal(qmatmul(x[:n], w, activations="int8"), whole[:n]), n
    form = w.packed().form
    gemv = {n: cpu_gemv_int8.gemv(form, n) for n in (1, 2, 3, 4, 8)}
    chosen = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 3), (8, 8), (9, 3), (10, 4), (13, 8), (16, 8)]
    assert all(cpu.int8_kernel(form, n) is gemv[tile] for n, tile in chosen)
    assert cpu.int8_kernel(form, 17) is cpu_gemm_int8.gemm(form)
    halves = quantize(np.ones((16, 256), np.float32), "q3_k", quantizer="reference").packed().form
    assert all(cpu.int8_kernel(halves, n) is cpu_gemv_int8.gemv(halves, 4) for n in (4, 7, 8))
