"""Normalization, activations and embedding: properties and errors beyond the cases."""

from __future__ import annotations

import inspect
import math
import weakref

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.op_registry import FAMILIES, load

PLAIN = ["silu", "gelu", "gelu_tanh", "gelu_quick", "relu"]
ALL = [*PLAIN, "relu2", "sigmoid"]


@pytest.mark.parametrize("E", [1, 15, 16, 77, 128])
def test_a_row_does_not_depend_on_its_neighbours(rng: np.random.Generator, E: int) -> None:
    x = rng.standard_normal((9, 2 * E), dtype=np.float32)
    w, b = rng.standard_normal((2, 2 * E), dtype=np.float32)
    for function in (
        lambda rows: nk.rmsnorm(rows, w, eps=1e-5),
        lambda rows: nk.layernorm(rows, w, b, eps=1e-5),
        nk.l2norm,
        nk.silu_and_mul,
        nk.swigluoai_and_mul,
        nk.sigmoid,
        nk.gelu_and_mul,
        nk.gelu_tanh_and_mul,
        nk.relu_and_mul,
        nk.gelu,
    ):
        all_rows = function(x)
        for t in range(9):
            np.testing.assert_array_equal(function(x[t : t + 1]), all_rows[t : t + 1])


def test_fused_norm_is_an_addition_and_a_norm(rng: np.random.Generator) -> None:
    x, residual = rng.standard_normal((2, 5, 100), dtype=np.float32)
    w = rng.standard_normal(100, dtype=np.float32)
    total = residual + x
    expected = nk.rmsnorm(total, w, eps=1e-6, offset=1.0)
    nk.fused_add_rmsnorm(x, residual, w, eps=1e-6, offset=1.0)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_array_equal(x, expected)


def test_fused_layer_norm_is_an_addition_and_a_norm(rng: np.random.Generator) -> None:
    x, residual = rng.standard_normal((2, 5, 100), dtype=np.float32)
    w, b = rng.standard_normal((2, 100), dtype=np.float32)
    total = residual + x
    expected = nk.layernorm(total, w, b, 1e-5)
    nk.fused_add_layernorm(x, residual, w, b, 1e-5)
    np.testing.assert_array_equal(residual, total)
    np.testing.assert_array_equal(x, expected)


def test_gemmas_norms_add_one_to_the_weight(rng: np.random.Generator) -> None:
    x, residual = rng.standard_normal((2, 3, 40), dtype=np.float32)
    w = rng.standard_normal(40, dtype=np.float32)
    np.testing.assert_array_equal(nk.gemma_rmsnorm(x, w), nk.rmsnorm(x, w, offset=1.0))
    y, again = x.copy(), residual.copy()
    nk.gemma_fused_add_rmsnorm(x, residual, w, 1e-5)
    nk.fused_add_rmsnorm(y, again, w, 1e-5, offset=1.0)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(residual, again)


@pytest.mark.parametrize("D", [20, 64, 80, 100])
def test_heads_are_normalized_as_rows_of_their_own(rng: np.random.Generator, D: int) -> None:
    """Queries and keys are bands of one wide matrix, normalized in place."""
    wide = rng.standard_normal((4, 5 * D), dtype=np.float32)
    before = wide.copy()
    w, b = rng.standard_normal((2, D), dtype=np.float32)
    for norm in (
        lambda x, out: nk.rmsnorm(x, w, 1e-6, out),
        lambda x, out: nk.layernorm(x, w, b, 1e-6, out),
        lambda x, out: nk.l2norm(x, 1e-6, out),
    ):
        band = wide[:, D : 4 * D].reshape(4, 3, D)
        rows = np.ascontiguousarray(band).reshape(12, D)
        expected = norm(rows, None).reshape(4, 3, D)
        assert norm(band, band) is band
        np.testing.assert_array_equal(wide[:, D : 4 * D].reshape(4, 3, D), expected)
        for untouched in (np.s_[:, :D], np.s_[:, 4 * D :]):
            np.testing.assert_array_equal(wide[untouched], before[untouched])
        wide[:] = before


def test_a_weight_for_each_head(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3, 50), dtype=np.float32)
    w = rng.standard_normal((3, 50), dtype=np.float32)
    for h in range(3):
        one = np.ascontiguousarray(x[:, h])
        np.testing.assert_array_equal(nk.rmsnorm(x, w)[:, h], nk.rmsnorm(one, w[h]))
        np.testing.assert_array_equal(nk.layernorm(x, w, w)[:, h], nk.layernorm(one, w[h], w[h]))


def test_norms_without_a_weight_are_those_with_ones(rng: np.random.Generator) -> None:
    x, ones = rng.standard_normal((4, 77), dtype=np.float32), np.ones(77, np.float32)
    np.testing.assert_array_equal(nk.rmsnorm(x, None), nk.rmsnorm(x, ones))
    np.testing.assert_array_equal(nk.layernorm(x, None), nk.layernorm(x, ones, 0 * ones))


def test_length_of_a_vector_is_one() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    # eps**0.5 = 1e-12 takes the part of PyTorch's least length
    np.testing.assert_allclose(nk.l2norm(x, 1e-24), [[0.6, 0.8], [0.0, 0.0]], rtol=2e-7)


def test_norms_may_write_over_their_input(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 50), dtype=np.float32)
    w = rng.standard_normal(50, dtype=np.float32)
    for function in (nk.rmsnorm, nk.layernorm):
        expected = function(x, w, eps=1e-5)
        over = x.copy()
        assert function(over, w, eps=1e-5, out=over) is over
        np.testing.assert_array_equal(over, expected)


def test_layernorm_of_a_large_mean(rng: np.random.Generator) -> None:
    """The variance is taken after the mean is gone: E[x**2] - E[x]**2 would be all rounding."""
    x = (1000.0 + rng.standard_normal((2, 256))).astype(np.float32)
    ones = np.ones(256, np.float32)
    expected = load("norm", "reference").layernorm(x, ones, eps=1e-5)
    # the mean of 1000 is off by up to (256 / 16 + 6) * 2**-24 * 1000 = 1.3e-3
    np.testing.assert_allclose(nk.layernorm(x, ones, eps=1e-5), expected, atol=1.4e-3)


@pytest.mark.parametrize("op", PLAIN)
def test_activation_of_special_values(op: str) -> None:
    x = np.array([0.0, np.nan, -np.nan, 50.0, -50.0, 1e30, np.inf, -80.0], np.float32)
    y = getattr(nk, op)(x)
    assert y[0] == 0
    assert np.isnan(y[1])
    assert np.isnan(y[2])
    np.testing.assert_array_equal(y[[3, 5, 6]], x[[3, 5, 6]])
    # x * e**-50 for SiLU, nothing for the others
    np.testing.assert_allclose(y[[4, 7]], 0.0, atol=50 * math.exp(-50))


@pytest.mark.parametrize("op", ["silu", "gelu", "gelu_tanh", "gelu_quick"])
def test_activation_of_large_negative_numbers_is_nothing(op: str) -> None:
    """The divisor must not end where `exp` does; -inf gives NaN, as in the reference."""
    large = np.array([-100.0, -1e4, -1e30, -3e38], np.float32)
    np.testing.assert_allclose(getattr(nk, op)(large), 0.0, atol=4e-38)
    infinite = np.full(3, -np.inf, np.float32)
    with np.errstate(invalid="ignore"):
        expected = getattr(load("activation", "reference"), op)(infinite)
    np.testing.assert_array_equal(getattr(nk, op)(infinite), expected.astype(np.float32))


@pytest.mark.parametrize("n", [3, 16, 21])
def test_logistic_and_squared_relu_of_special_values(n: int) -> None:
    for value, logistic, square in (
        (np.nan, np.nan, np.nan),
        (np.inf, 1.0, np.inf),
        (-np.inf, 0.0, 0.0),
        (-50.0, math.exp(-50.0), 0.0),
        (200.0, 1.0, 40_000.0),
    ):
        x = np.full(n, value, np.float32)
        # exp 2e-7, and 50 is exact; 4e-38 where the true value is below 1e-38
        np.testing.assert_allclose(nk.sigmoid(x), np.float32(logistic), rtol=4e-7, atol=4e-38)
        np.testing.assert_array_equal(nk.relu2(x), np.float32(square))


def test_gelu_keeps_its_digits_in_the_lower_tail() -> None:
    x = np.linspace(-9, -3, 1001, dtype=np.float32)
    expected = load("activation", "reference").gelu(x)
    # v**2 / 2 <= 40.5 is rounded to 2**-24 of itself, then exp: 2.4e-6, and 5e-7 for the rest
    np.testing.assert_allclose(nk.gelu(x), expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("op", ALL)
def test_activation_takes_any_shape(rng: np.random.Generator, op: str) -> None:
    x = rng.standard_normal((2, 3, 5), dtype=np.float32)
    function = getattr(nk, op)
    np.testing.assert_array_equal(function(x)[1, 2], function(x[1, 2]))
    over = x.copy()
    assert function(over, out=over) is over
    np.testing.assert_array_equal(over, function(x))
    for empty in ((0,), (3, 0), (0, 4)):
        assert function(np.empty(empty, np.float32)).shape == empty


@pytest.mark.parametrize("op", ALL)
def test_gated_form_is_activation_times_the_other_half(rng: np.random.Generator, op: str) -> None:
    x = rng.standard_normal((3, 40), dtype=np.float32)
    gate, up = np.ascontiguousarray(x[:, :20]), x[:, 20:]
    np.testing.assert_array_equal(getattr(nk, f"{op}_and_mul")(x), getattr(nk, op)(gate) * up)


def test_gated_forms_take_any_shape(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3, 10), dtype=np.float32)
    np.testing.assert_array_equal(nk.silu_and_mul(x)[1, 2], nk.silu_and_mul(x[1, 2]))
    for empty in ((0,), (3, 0), (0, 4)):
        shape = (*empty[:-1], empty[-1] // 2)
        assert nk.silu_and_mul(np.empty(empty, np.float32)).shape == shape


@pytest.mark.parametrize("op", ALL)
def test_glu_has_both_orders_of_the_halves(rng: np.random.Generator, op: str) -> None:
    x = rng.standard_normal((3, 40), dtype=np.float32)
    swapped = np.ascontiguousarray(np.concatenate([x[:, 20:], x[:, :20]], axis=1))
    want = getattr(nk, f"{op}_and_mul")(x)
    np.testing.assert_array_equal(nk.glu(x, op, gate_first=True), want)
    np.testing.assert_array_equal(nk.glu(swapped, op), want)


@pytest.mark.parametrize("width", [1, 16, 37])
def test_clamped_swiglu(rng: np.random.Generator, width: int) -> None:
    x = 8.0 * rng.standard_normal((3, 2 * width), dtype=np.float32)
    halves = np.ascontiguousarray(np.concatenate([x[:, ::2], x[:, 1::2]], axis=1))
    want = nk.swigluoai_and_mul(halves, interleaved=False)
    np.testing.assert_array_equal(nk.swigluoai_and_mul(x), want)
    # without a limit it is quick GELU of the gate times up + 1
    plain = nk.swigluoai_and_mul(halves, limit=np.inf, interleaved=False)
    product = nk.gelu_quick(np.ascontiguousarray(x[:, ::2])) * (x[:, 1::2] + np.float32(1))
    np.testing.assert_array_equal(plain, product)
    x[0, :2] = np.nan, 1.0
    x[1, :2] = 1.0, np.nan
    assert np.isnan(nk.swigluoai_and_mul(x)[:2, 0]).all()


def test_embedding_rows_may_be_scaled(rng: np.random.Generator) -> None:
    table, ids = rng.standard_normal((5, 32), dtype=np.float32), np.array([3, 0, 3], np.int32)
    quantized = nk.quantize(table, "q8")
    for t in (table, table.astype(np.float16), quantized):
        scaled = nk.embedding(ids, t, scale=32**0.5)
        np.testing.assert_array_equal(scaled, nk.embedding(ids, t) * np.float32(32**0.5))
    # embedding and linear_norm are the same product
    np.testing.assert_array_equal(
        nk.linear_norm(table[ids]), nk.embedding(ids, table, scale=32**0.5)
    )


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("n", [1, 2])
def test_captured_calls_hold_on_to_their_arrays(rng: np.random.Generator, n: int) -> None:
    """The kernels get addresses: the arrays must live as long as the call."""
    parallel_for.set_num_threads(n)
    for launch in (
        lambda x, w, out: load("norm", "cpu").rmsnorm(x, w, 1e-5, 0.0, out),
        lambda x, w, out: load("norm", "cpu").layernorm(x, w, None, 1e-5, out),
        lambda x, w, out: load("activation", "cpu").elementwise(x, "silu", out),
        lambda x, w, out: load("activation", "cpu").glu(x, "silu", True, out[:, :40]),
        lambda x, w, out: load("logits", "cpu").soft_cap(x, 3.0, out),
    ):
        arrays = [rng.standard_normal(s, dtype=np.float32) for s in ((4, 80), (80,), (4, 80))]
        watches = [weakref.ref(array) for array in arrays]
        with parallel_for.capture() as captured:
            launch(*arrays)
        (call,) = captured.calls
        launch(*arrays)
        expected = arrays[2].copy()
        arrays[2][:] = np.nan
        call()
        np.testing.assert_array_equal(arrays[2][:, :40], expected[:, :40])
        del arrays, captured
        assert watches[0]() is not None
        del call
        assert watches[0]() is None


def test_errors_name_the_parameter() -> None:
    x, w = np.ones((2, 4), np.float32), np.ones(4, np.float32)
    short = np.ones(3, np.float32)
    with pytest.raises(nk.UsageError, match=r"weight must have shape \(4\), got \(3,\)"):
        nk.rmsnorm(x, short, eps=0.0)
    with pytest.raises(nk.UsageError, match=r"out must have shape \(2, 4\), got \(4,\)"):
        nk.rmsnorm(x, w, eps=0.0, out=w)
    with pytest.raises(nk.UsageError, match=r"bias must have shape \(4\), got \(3,\)"):
        nk.layernorm(x, w, short, eps=0.0)
    with pytest.raises(nk.UsageError, match=r"residual must have shape \(2, 4\), got \(4,\)"):
        nk.fused_add_rmsnorm(x, w, w, eps=0.0)
    with pytest.raises(nk.UsageError, match=r"x must have shape \(\.\.\., 2 \* I\).* got \(2, 3\)"):
        nk.silu_and_mul(np.ones((2, 3), np.float32))
    with pytest.raises(nk.UsageError, match=r"out must have shape \(2, 2\), got \(2, 4\)"):
        nk.silu_and_mul(x, out=x.copy())
    with pytest.raises(nk.UsageError, match=r"weight must have shape \(2, 4\), got \(4, 4\)"):
        nk.rmsnorm(np.ones((3, 2, 4), np.float32), np.ones((4, 4), np.float32))
    with pytest.raises(nk.UsageError, match=r"offset is added .* must be 0, got 1\.0"):
        nk.rmsnorm(x, None, offset=1.0)
    with pytest.raises(nk.UsageError, match="unknown activation 'sillu'; did you mean 'silu'"):
        nk.glu(x, "sillu")
    with pytest.raises(nk.UsageError, match=r"limit must be positive, got 0\.0"):
        nk.swigluoai_and_mul(x, limit=0.0)
    with pytest.raises(TypeError, match="x must have dtype float32, got float64"):
        nk.silu(np.ones(3))  # type: ignore[arg-type]


def test_embedding_errors_name_the_id_and_the_vocabulary() -> None:
    table = np.ones((5, 2), np.float32)
    for wrong in (5, -1):
        with pytest.raises(nk.UsageError, match=rf"vocabulary has 5 tokens, got {wrong}"):
            nk.embedding(np.array([0, wrong, 7], np.int32), table)
    with pytest.raises(TypeError, match="ids must have dtype int32, got uint8"):
        nk.embedding(np.array([1], np.uint8), table)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"table must have dtype .* got float64"):
        nk.embedding(np.array([1], np.int32), np.ones((5, 2)))
    quantized = nk.quantize(np.ones((5, 32), np.float32), "q8")
    with pytest.raises(nk.UsageError, match="vocabulary has 5 tokens, got 9"):
        nk.embedding(np.array([9], np.int32), quantized)


@pytest.mark.parametrize(
    "family", ["norm", "activation", "embedding", "position", "matmul", "logits"]
)
def test_cuda_functions_have_the_signature_of_the_cpu_ones(family: str) -> None:
    cpu, cuda = (load(family, part) for part in ("cpu", "cuda"))
    names = [
        name
        for name, value in vars(cpu).items()
        if inspect.isfunction(value) and value.__module__ == cpu.__name__ and name[0] != "_"
    ]
    assert set(names) & set(FAMILIES[family])
    for name in names:
        want, found = (inspect.signature(getattr(part, name)) for part in (cpu, cuda))
        more = list(found.parameters.values())[len(want.parameters) :]  # for grouped products
        assert list(found.parameters)[: len(want.parameters)] == list(want.parameters), name
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more), name
