"""Normalization, activations and embedding: properties and errors beyond the cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.families import FAMILIES, load

PLAIN = ["silu", "gelu", "gelu_tanh", "relu"]


@pytest.mark.parametrize("E", [1, 15, 16, 77, 128])
def test_a_row_does_not_depend_on_its_neighbours(rng: np.random.Generator, E: int) -> None:
    x = rng.standard_normal((9, 2 * E), dtype=np.float32)
    w, b = rng.standard_normal((2, 2 * E), dtype=np.float32)
    for function in (
        lambda rows: nk.rmsnorm(rows, w, eps=1e-5),
        lambda rows: nk.layernorm(rows, w, b, eps=1e-5),
        nk.silu_and_mul,
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


def test_gelu_keeps_its_digits_in_the_lower_tail() -> None:
    x = np.linspace(-9, -3, 1001, dtype=np.float32)
    expected = load("activation", "reference").gelu(x)
    # v**2 / 2 <= 40.5 is rounded to 2**-24 of itself, then exp: 2.4e-6, and 5e-7 for the rest
    np.testing.assert_allclose(nk.gelu(x), expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("op", PLAIN)
def test_activation_takes_any_shape(rng: np.random.Generator, op: str) -> None:
    x = rng.standard_normal((2, 3, 5), dtype=np.float32)
    function = getattr(nk, op)
    np.testing.assert_array_equal(function(x)[1, 2], function(x[1, 2]))
    over = x.copy()
    assert function(over, out=over) is over
    np.testing.assert_array_equal(over, function(x))
    for empty in ((0,), (3, 0), (0, 4)):
        assert function(np.empty(empty, np.float32)).shape == empty


@pytest.mark.parametrize("op", PLAIN)
def test_gated_form_is_activation_times_the_other_half(rng: np.random.Generator, op: str) -> None:
    x = rng.standard_normal((3, 40), dtype=np.float32)
    gate, up = np.ascontiguousarray(x[:, :20]), x[:, 20:]
    np.testing.assert_array_equal(getattr(nk, f"{op}_and_mul")(x), getattr(nk, op)(gate) * up)


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
    with pytest.raises(TypeError, match="x must have dtype float32, got float64"):
        nk.silu(np.ones(3))  # type: ignore[arg-type]


def test_embedding_errors_name_the_id_and_the_vocabulary() -> None:
    table = np.ones((5, 2), np.float32)
    for wrong in (5, -1):
        with pytest.raises(nk.UsageError, match=rf"vocabulary has 5 tokens, got {wrong}"):
            nk.embedding(np.array([0, wrong, 7], np.int32), table)
    with pytest.raises(TypeError, match="ids must have dtype int32, got int64"):
        nk.embedding(np.array([1]), table)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"table must have dtype .* got float64"):
        nk.embedding(np.array([1], np.int32), np.ones((5, 2)))
    quantized = nk.quantize(np.ones((5, 32), np.float32), "q8")
    with pytest.raises(nk.UsageError, match="vocabulary has 5 tokens, got 9"):
        nk.embedding(np.array([9], np.int32), quantized)


class _OnDevice:
    """What a CUDA array looks like to the dispatch."""

    def __init__(self, *shape: int) -> None:
        self.host = np.ones(shape, np.float32)
        self.__cuda_array_interface__: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def __getitem__(self, index: Any) -> Any:
        return self.host[index]


def test_arrays_on_a_cuda_device_are_refused_with_advice() -> None:
    rows, weight, out = _OnDevice(2, 4), _OnDevice(4), _OnDevice(2, 4)
    calls = [
        lambda: nk.rmsnorm(rows, weight, eps=0.0, out=out),  # type: ignore[arg-type]
        lambda: nk.layernorm(rows, weight, eps=0.0, out=out),  # type: ignore[arg-type]
        lambda: nk.fused_add_rmsnorm(rows, out, weight, eps=0.0),  # type: ignore[arg-type]
        lambda: nk.silu_and_mul(rows, out=_OnDevice(2, 2)),  # type: ignore[arg-type]
        lambda: nk.matmul(rows, rows, out=_OnDevice(2, 2)),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(nk.MissingExtraError, match=r"no CUDA variant .*cuda12"):
            call()


@pytest.mark.parametrize("family", ["norm", "activation", "embedding", "matmul"])
def test_cuda_functions_have_the_signature_of_the_cpu_ones(family: str) -> None:
    import inspect

    for op in FAMILIES[family]:
        cpu, cuda = (getattr(load(family, part), op) for part in ("cpu", "cuda"))
        assert list(inspect.signature(cpu).parameters) == list(inspect.signature(cuda).parameters)
