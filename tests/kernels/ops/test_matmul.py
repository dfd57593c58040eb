"""Matrix product: batch invariance, the same bits from every kernel, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.matmul import cpu
from nbflow_kernels.matmul.cpu_gemm import PANEL
from nbflow_kernels.matmul.cpu_packed_tiles import BLOCK_TOKENS

# K: one panel, panels and a partial one, less than a vector
COLUMNS = [64, PANEL + 35, 7]


def _weights(rng: np.random.Generator, N: int, K: int, dtype: str) -> Any:
    w = rng.standard_normal((N, K), dtype=np.float32)
    return (w.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else w.astype(dtype)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("K", COLUMNS)
def test_a_row_does_not_depend_on_batch_or_threads(
    rng: np.random.Generator, K: int, dtype: str
) -> None:
    x = rng.standard_normal((70, K), dtype=np.float32)
    w = _weights(rng, 11, K, dtype)
    parallel_for.set_num_threads(1)
    all_rows = nk.matmul(x, w)
    for T in (1, 2, 5, 7, 63, 64):
        for first in (0, 70 - T):
            part = nk.matmul(np.ascontiguousarray(x[first : first + T]), w)
            np.testing.assert_array_equal(part, all_rows[first : first + T])
    for n in (2, 3):
        parallel_for.set_num_threads(n)
        np.testing.assert_array_equal(nk.matmul(x, w), all_rows)
        np.testing.assert_array_equal(nk.matmul(x[:1], w), all_rows[:1])
        np.testing.assert_array_equal(nk.matmul(x[3:10], w), all_rows[3:10])


@pytest.mark.parametrize("K", [512, 1600, PANEL + 37, 2 * PANEL + 7])
def test_the_three_kernels_add_in_the_same_order(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, K: int
) -> None:
    x = rng.standard_normal((7, K), dtype=np.float32)
    w = rng.standard_normal((18, K), dtype=np.float32)
    tiles = nk.matmul(x, w)
    one = nk.matmul(x[:1], w)
    monkeypatch.setattr(cpu, "MIN_GEMV_BYTES", 0)
    stream = nk.matmul(x[:1], w)
    monkeypatch.setattr(cpu, "MIN_TRANSPOSED_TOKENS", 1)
    np.testing.assert_array_equal(nk.matmul(x, w), tiles)
    np.testing.assert_array_equal(one, tiles[:1])
    np.testing.assert_array_equal(stream, tiles[:1])


@pytest.mark.parametrize("T", [cpu.MIN_TRANSPOSED_TOKENS - 1, BLOCK_TOKENS + 3])
def test_blocks_of_rows_and_tokens(rng: np.random.Generator, T: int) -> None:
    """More than one block of rows and of tokens, partial ones at the end."""
    x = rng.integers(-4, 5, (T, PANEL + 18)).astype(np.float32)
    w = rng.integers(-4, 5, (37, PANEL + 18)).astype(np.float32)
    y = nk.matmul(x, w)
    np.testing.assert_array_equal(y, x @ w.T)  # whole numbers below 2**24: exact in float32


def test_an_output_depends_on_its_row_of_weights_only(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 96), dtype=np.float32)
    w = rng.standard_normal((10, 96), dtype=np.float32)
    all_rows = nk.matmul(x, w)
    for n in range(10):
        np.testing.assert_array_equal(nk.matmul(x, w[n : n + 1]), all_rows[:, n : n + 1])


def test_nan_and_infinity_reach_the_output() -> None:
    x = np.ones((1, 20), np.float32)
    w = np.ones((3, 20), np.float32)
    w[0, 19], w[1, 3], w[2, 0] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(nk.matmul(x, w), [[np.nan, np.inf, -np.inf]])


def test_accumulate_adds_bias_once() -> None:
    x, w = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    out = np.full((2, 3), 100.0, np.float32)
    bias = np.array([1, 2, 3], np.float32)
    assert nk.matmul(x, w, bias=bias, accumulate=True, out=out) is out
    np.testing.assert_array_equal(out, [[105, 106, 107]] * 2)


def test_quantized_weights_are_refused() -> None:
    x = np.ones((2, 64), np.float32)
    with pytest.raises(TypeError, match="got a QuantTensor of format q8_b32t2; call qmatmul"):
        nk.matmul(x, nk.quantize(x, "q8"))  # type: ignore[arg-type]


def test_errors_name_the_parameter() -> None:
    x, w = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    with pytest.raises(nk.UsageError, match=r"w must have shape \(any, 4\), got \(3, 5\)"):
        nk.matmul(x, np.ones((3, 5), np.float32))
    with pytest.raises(TypeError, match=r"w must have dtype float32 or float16 or .* got float64"):
        nk.matmul(x, w.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x must be a NumPy array .* got list"):
        nk.matmul([[1.0]], w)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"w must be a NumPy array .* got str"):
        nk.matmul(x, "q4")  # type: ignore[arg-type]
    with pytest.raises(nk.UsageError, match=r"bias must have shape \(3\), got \(4,\)"):
        nk.matmul(x, w, bias=np.ones(4, np.float32))
    with pytest.raises(nk.UsageError, match=r"out must have shape \(2, 3\), got \(3, 2\)"):
        nk.matmul(x, w, out=np.ones((3, 2), np.float32))
    with pytest.raises(nk.UsageError, match="accumulate=True needs out="):
        nk.matmul(x, w, accumulate=True)
    with pytest.raises(nk.UsageError, match="x must be C-contiguous"):
        nk.matmul(np.ones((4, 2), np.float32).T, w)
    square = np.ones((4, 4), np.float32)
    with pytest.raises(nk.UsageError, match="out must not overlap x"):
        nk.matmul(square, square.copy(), out=square)
