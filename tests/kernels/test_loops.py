"""The readable loops give what the kernels give."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.attention.loops import attend
from nbflow_kernels.cpu.scalar_math import fma
from nbflow_kernels.formats import codec_spec as integers
from nbflow_kernels.formats.layout_cpu import FIELDS
from nbflow_kernels.matmul import loops as matmul_loops
from nbflow_kernels.norm import loops as norm_loops
from nbflow_kernels.product_keys import loops as product_key_loops
from nbflow_kernels.quantized_matmul import loops as qmatmul_loops
from nbflow_kernels.quantized_matmul.cpu import Int8Rows, quantize_activations
from nbflow_kernels.row_statistics import loops as row_loops
from nbflow_kernels.state_space import loops as state_space_loops


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def test_fused_product_and_sum_are_rounded_once(rng: np.random.Generator) -> None:
    """Just off the middle of two float32, by less than float64 keeps of the sum."""
    ties = [
        (2.0**-12 * (1 + 2.0**-k), sign * 2.0**-12 * (1 - 2.0**-k), 1 + 2.0**-23)
        for k in range(8, 24)
        for sign in (1, -1)
    ]
    random = rng.standard_normal((200, 2), dtype=np.float32).astype(float)
    near = [(a, b, -a * b * (1 + 2.0 ** -float(rng.integers(40)))) for a, b in random]
    for terms in ties + near:
        a, b, c = (np.float32(t) for t in terms)
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        found = fma(a, b, c)
        below, above = (np.nextafter(np.float32(found), np.float32(x)) for x in (-np.inf, np.inf))
        off = [abs(Fraction(float(y)) - exact) for y in (below, found, above)]
        assert off[1] == min(off)
    infinite = np.float32(np.inf)
    assert fma(infinite, np.float32(1), np.float32(1)) == np.inf
    assert np.isnan(fma(infinite, np.float32(1), -infinite))


@pytest.mark.parametrize("E", [64, 320, 100])
def test_norms(rng: np.random.Generator, E: int) -> None:
    x, weight, bias = _normal(rng, 3, E), _normal(rng, E), _normal(rng, E)
    rms, layer = np.empty_like(x), np.empty_like(x)
    norm_loops.rmsnorm(x, weight, 1e-5, rms)
    norm_loops.layernorm(x, weight, bias, 1e-5, layer)
    found = nk.rmsnorm(x, weight, eps=1e-5), nk.layernorm(x, weight, bias, eps=1e-5)
    if E % 64 == 0:
        assert np.array_equal(found[0], rms)
        assert np.array_equal(found[1], layer)
    # the compiler may fuse the products of the ragged end: 36 of 100 terms, one rounding less each
    np.testing.assert_allclose(found[0], rms, rtol=40 * 2.0**-24)
    np.testing.assert_allclose(found[1], layer, rtol=40 * 2.0**-24, atol=40 * 2.0**-24)


@pytest.mark.parametrize("n_tokens", [1, 5, 70])
@pytest.mark.parametrize("K", [100, 2100])
def test_row_major_products(rng: np.random.Generator, n_tokens: int, K: int) -> None:
    x, w, bias = _normal(rng, n_tokens, K), _normal(rng, 19, K), _normal(rng, 19)
    out = _normal(rng, n_tokens, 19)
    expected = out.copy()
    matmul_loops.row_major(x, w, bias, True, expected)
    nk.matmul(x, w, bias=bias, accumulate=True, out=out)
    assert np.array_equal(out, expected)


def _side_by_side(w: np.ndarray) -> np.ndarray:
    padded = np.zeros((-(-len(w) // 16) * 16, w.shape[1]), np.float32)
    padded[: len(w)] = w
    return np.ascontiguousarray(padded.reshape(-1, 16, w.shape[1]).transpose(0, 2, 1))


@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("name", ["q4_0", "q3h", "f16"])
def test_products_of_decoded_weights(rng: np.random.Generator, n_tokens: int, name: str) -> None:
    x, bias = _normal(rng, n_tokens, 192), _normal(rng, 21)
    w = nk.quantize(_normal(rng, 21, 192), name, quantizer="reference")
    expected = np.empty((n_tokens, 21), np.float32)
    decoded = _side_by_side(nk.dequantize(w))
    matmul_loops.interleaved(x, decoded, bias, False, expected)
    found = nk.qmatmul(x, w, bias=bias)
    if name != "f16":
        assert np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_tokens", [1, 7, 20])
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q3h"])
def test_products_of_integers(rng: np.random.Generator, n_tokens: int, name: str) -> None:
    x = _normal(rng, n_tokens, 192)
    w = nk.quantize(_normal(rng, 21, 192), name, quantizer="reference")
    rows = Int8Rows.empty(n_tokens, 192)
    quantize_activations(x, rows)
    codes, d = np.zeros(192, np.int8), np.zeros(6, np.float32)
    qmatmul_loops.quantize_row(x[0], codes, d)
    assert np.array_equal(rows.codes[0, :192], codes)
    assert np.array_equal(rows.scales[0, :6], d)
    form, whole = w.format.integer_form, w.format.integers(w.data)
    values = whole.codes.astype(np.int32) - form.zero
    scales = whole.d.repeat(form.block // 32, 1)
    bases = np.zeros_like(scales) if whole.m is None else whole.m.repeat(form.block // 32, 1)
    out = np.empty((n_tokens, 21), np.float32)
    qmatmul_loops.int8(values, scales, bases, rows.codes[:n_tokens, :192], rows.scales, out)
    assert np.array_equal(out, nk.qmatmul(x, w, activations="int8"))


D_BYTES = {"q2_k": 80, "q3_k": 108, "q6_k": 208}
"""Offset of a block's float16 `d`, and of `dmin`, two bytes further, in q2_k."""


@pytest.mark.parametrize(
    ("name", "n_tokens"), [("q2_k", 70), ("q3_k", 1), ("q3_k", 7), ("q3_k", 70), ("q6_k", 9)]
)
def test_products_of_sub_blocks_of_16(rng: np.random.Generator, n_tokens: int, name: str) -> None:
    """Random bytes have every code and scale; the GEMM folds the scales of q2_k and q3_k in."""
    K = 512
    x = _normal(rng, n_tokens, K)
    w = nk.quantize(_normal(rng, 37, K), name, quantizer="reference")
    blocks = rng.integers(0, 256, (37 * K // 256, w.format.block_bytes), np.uint8)
    at = D_BYTES[name]
    width = 4 if name == "q2_k" else 2
    blocks[:, at : at + width] = w.data.reshape(blocks.shape)[:, at : at + width]
    w = nk.QuantTensor(name, w.shape, blocks.reshape(w.data.shape))
    rows = Int8Rows.empty(n_tokens, K)
    quantize_activations(x, rows)
    form, whole = w.format.integer_form, w.format.integers(w.data)
    assert whole.scales is not None
    values, scales = whole.codes.astype(np.int32) - form.zero, whole.scales.astype(np.float32)
    bases = np.zeros_like(scales)
    if whole.m is not None and whole.mins is not None:
        bases = -whole.m.repeat(16, 1) * whole.mins.astype(np.float32)
    out = np.full((n_tokens, 37), np.nan, np.float32)
    qmatmul_loops.int8_sub_blocks_of_16(
        values, scales, whole.d, bases, rows.codes[:n_tokens], rows.scales, out
    )
    assert np.array_equal(out, nk.qmatmul(x, w, activations="int8"))


@pytest.mark.parametrize("name", ["q8_0", "q6", "q5_0", "q4_0", "q3", "q2"])
def test_codes_of_the_packed_layout(rng: np.random.Generator, name: str) -> None:
    w = nk.quantize(_normal(rng, 16, 64), name, quantizer="reference")
    packed, whole = w.packed(), w.format.integers(w.data)
    form = packed.form
    unit = packed.data[form.d_bytes + form.codes_at :]  # the first unit of the first block
    fields = np.array(FIELDS[form.bits])
    found = [
        [qmatmul_loops.read_code(unit, fields, row, column) for column in range(form.unit)]
        for row in range(16)
    ]
    assert np.array_equal(found, whole.codes[:, : form.unit])
    assert integers.weights(w.format.integer_form, whole).shape == (16, 64)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(rng: np.random.Generator, causal: bool) -> None:
    q, k, v = _normal(rng, 3, 4, 20), _normal(rng, 150, 2, 20), _normal(rng, 150, 2, 20)
    out = np.empty_like(q)
    attend(q, k, v, 20**-0.5, causal, out)
    found = nk.single_prefill_with_kv_cache(q, k, v, causal=causal)
    # exp of the kernel: relative error 2e-7 for each weight; 150 weights are added either way
    np.testing.assert_allclose(found, out, rtol=1e-5, atol=150 * 2.0**-24)


def test_loops_of_mamba2(rng: np.random.Generator) -> None:
    """A chunk of 32 tokens, then three single ones."""
    T, P, N = 35, 5, 21
    x, b, c = _normal(rng, T, 1, P), _normal(rng, T, 1, N), _normal(rng, T, 1, N)
    a, d, state = -np.ones(1, np.float32), _normal(rng, 1), _normal(rng, 1, 1, P, N)
    dt = rng.uniform(0.01, 1.0, (T, 1)).astype(np.float32)
    loop_state, y = state[0, 0].copy(), np.empty((T, P), np.float32)
    for function, part in (
        (state_space_loops.chunk, slice(0, 32)),
        (state_space_loops.steps, slice(32, T)),
    ):
        arrays = [np.ascontiguousarray(v[part, 0]) for v in (x, dt, b, c)]
        function(arrays[0], arrays[1], a[0], *arrays[2:], loop_state, d[0], y[part])
    batch = np.array([0, T], np.int32), np.zeros(1, np.int32)
    found = nk.mamba2_scan(x, dt, a, b, c, state, *batch, d=d, dt_softplus=False)
    np.testing.assert_array_equal(found[:, 0], y)
    np.testing.assert_array_equal(state[0, 0], loop_state)


def test_row_statistics(rng: np.random.Generator) -> None:
    """Sums of 100 terms in another order: at most 100 roundings of 2**-24 of their magnitude."""
    x, like = _normal(rng, 3, 100), _normal(rng, 3, 100)
    scaled, moments, kept = np.empty_like(x), np.empty((3, 2), np.float32), np.empty_like(x)
    row_loops.match_rms(x, like, 1e-5, scaled)
    row_loops.row_moments(x, moments)
    row_loops.gaussian_topk(x, moments, 100.0, 0.5, kept)
    np.testing.assert_allclose(nk.match_rms(x, like), scaled, rtol=100 * 2.0**-24)
    np.testing.assert_allclose(
        nk.row_moments(x), moments, rtol=100 * 2.0**-24, atol=100 * 2.0**-24 * np.abs(x).sum()
    )
    found = nk.gaussian_topk(x, 0.5, moments=moments)
    np.testing.assert_allclose(found, kept, rtol=2.0**-23, atol=2.0**-22)
    assert (
        0.6 < np.mean(found == 0) < 0.8
    )  # the normal distribution has 69 % below half a deviation


def test_product_keys(rng: np.random.Generator) -> None:
    """The same experts; sums of 100 terms in another order."""
    scores, x, table = _normal(rng, 3, 14), _normal(rng, 3, 100), _normal(rng, 49, 100)
    weights, ids, dots = (np.empty((3, 6), dtype) for dtype in (np.float32, np.int32, np.float32))
    product_key_loops.product_key_routing(scores, 10, 30, weights, ids)
    found = nk.product_key_routing(scores, 6, first=10, n_experts=30)
    np.testing.assert_array_equal(found[1], ids)
    np.testing.assert_allclose(found[0], weights, rtol=2.0**-22)
    product_key_loops.gathered_dot(x, table, ids, dots)
    np.testing.assert_allclose(
        nk.gathered_dot(x, table, ids), dots, atol=10 * 2.0**-24 * np.abs(x).sum(axis=1).max()
    )
