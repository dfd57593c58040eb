"""GEMV and GEMM in register tiles: order of additions, batch invariance, formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.cpu import parallel_for
from nbflow_kernels.formats import QuantTensor, dequantize
from nbflow_kernels.formats.floats import interleave
from nbflow_kernels.matmul import cpu_packed_tiles
from nbflow_kernels.quantized_matmul import qmatmul
from nbflow_kernels.quantized_matmul.reference import to_bf16
from nbflow_kernels.quantizers import quantize

FLOATS = ("f32", "f16", "bf16")


def _tensor(rng: np.random.Generator, format: str, N: int, K: int) -> QuantTensor:
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(K**0.5)
    return quantize(w, format, quantizer="reference")


def _rounded(x: Any) -> Any:
    return x.astype(np.float32).astype(np.float64)


def _in_order(x: Any, w: Any, bias: Any, old: Any, width: int) -> Any:
    """Add in the documented order, in float32; `x` and `w` have few bits, so float64 rounds once.

    A unit is `width` columns, of which the last is added first.
    """
    units = -(-x.shape[1] // width)
    pad = ((0, 0), (0, units * width - x.shape[1]))
    x, w = (np.pad(a.astype(np.float64), pad) for a in (x, w))
    chains = np.zeros((4, len(x), len(w)))
    for unit in range(units):
        for k in reversed(range(unit * width, (unit + 1) * width)):
            chains[unit % 4] = _rounded(chains[unit % 4] + np.outer(x[:, k], w[:, k]))
    low, high = _rounded(chains[0] + chains[1]), _rounded(chains[2] + chains[3])
    return _rounded(_rounded(_rounded(low + high) + bias) + old)


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("T", [1, 8])
@pytest.mark.parametrize("K", [7, 203, 2 * cpu_packed_tiles.PANEL + 2 * 64 + 5])
def test_additions_are_made_in_the_stated_order(
    rng: np.random.Generator, T: int, K: int, activations: str
) -> None:
    x = to_bf16(rng.standard_normal((T, K), dtype=np.float32)).astype(np.float32)
    w = to_bf16(rng.standard_normal((18, K), dtype=np.float32)).astype(np.float32)
    bias, old = rng.standard_normal((2, 18), dtype=np.float32)
    out = np.repeat(old[None], T, axis=0)
    tensor = quantize(w, "bf16")
    nk.qmatmul(x, tensor, activations=activations, bias=bias, accumulate=True, out=out)
    want = _in_order(x, w, bias, old, 2 if activations == "bf16" else 1)
    np.testing.assert_array_equal(out, want)


@pytest.mark.usefixtures("split_everything")
@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("format", ["f16", "f32", "q8_0", "q3h"])
def test_a_row_depends_on_nothing_else(
    rng: np.random.Generator, format: str, activations: str
) -> None:
    """Tiles of 6, 4, 2 and 1 tokens, several blocks of tokens, any number of threads."""
    T = cpu_packed_tiles.BLOCK_TOKENS + 21
    x, w = rng.standard_normal((T, 203), dtype=np.float32), _tensor(rng, format, 37, 203)
    bias = rng.standard_normal(37, dtype=np.float32)
    parallel_for.set_num_threads(1)
    every = qmatmul(x, w, activations=activations, bias=bias)
    for n in (1, 2, 3):
        parallel_for.set_num_threads(n)
        for count in (1, 2, 3, 5, 7, 64, T):
            for first in (0, T - count):
                part = qmatmul(x[first : first + count], w, activations=activations, bias=bias)
                np.testing.assert_array_equal(part, every[first : first + count])


@pytest.mark.parametrize("activations", ["f32", "bf16"])
@pytest.mark.parametrize("T", [1, 9])
def test_all_formats_with_the_same_weights_give_the_same_bits(
    rng: np.random.Generator, T: int, activations: str
) -> None:
    x = rng.standard_normal((T, 320), dtype=np.float32)
    for format in ("q8", "q4_0", "q3h", "f16"):
        w = _tensor(rng, format, 21, 320)
        plain = quantize(dequantize(w), "f32")
        np.testing.assert_array_equal(
            qmatmul(x, w, activations=activations), qmatmul(x, plain, activations=activations)
        )


@pytest.mark.parametrize("format", ["f16", "q8"])
def test_bfloat16_costs_this_much(rng: np.random.Generator, format: str) -> None:
    """Check the error of about 2.3e-3 of the result.

    A number m * 2**e, 1 <= m < 2, is rounded to steps of 2**-7 * 2**e: the root mean square of the
    error is 2**-7 / sqrt(12) = 2.26e-3 in units of 2**e.  That of m is 1.4 to 1.53, so the relative
    error is 1.5e-3 to 1.6e-3, and sqrt(2) times that for a product of two rounded factors.
    """
    x, w = rng.standard_normal((16, 2048), dtype=np.float32), _tensor(rng, format, 64, 2048)
    exact = x.astype(np.float64) @ dequantize(w).astype(np.float64).T
    error = qmatmul(x, w, activations="bf16") - exact
    share = np.sqrt((error**2).mean() / (exact**2).mean())
    assert 1.9e-3 < share < 2.6e-3
    plain = qmatmul(x, w) - exact
    assert np.sqrt((plain**2).mean() / (exact**2).mean()) < 1e-6


def test_nan_stays_in_its_row_and_its_output(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 100), dtype=np.float32)
    weights = rng.standard_normal((20, 100), dtype=np.float32)
    x[2, 99], weights[17, 98] = np.nan, np.inf
    tensor = QuantTensor("f32", (20, 100), weights.view(np.uint8).reshape(20, 400))
    for activations in ("f32", "bf16"):
        bad = ~np.isfinite(qmatmul(x, tensor, activations=activations))
        want = np.zeros((8, 20), bool)
        want[2], want[:, 17] = True, True
        np.testing.assert_array_equal(bad, want)


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("shape", [(37, 203), (16, 64), (1, 1), (0, 8)])
def test_float_weights_are_packed_sixteen_rows_interleaved(
    rng: np.random.Generator, format: str, shape: tuple[int, int]
) -> None:
    w = quantize(rng.standard_normal(shape, dtype=np.float32), format)
    packed, (N, K) = w.packed(), shape
    assert packed is w.packed()
    assert packed.n_rows == N
    assert w.packed_nbytes == packed.nbytes
    groups, columns = -(-N // 16), -(-K // 8) * 8
    assert packed.data.shape == (groups, columns, 16)
    rows = packed.data.transpose(0, 2, 1).reshape(groups * 16, columns)
    np.testing.assert_array_equal(rows[:N, :K], w.array.view(rows.dtype))
    assert not rows[N:].any()
    assert not rows[:, K:].any()


@pytest.mark.usefixtures("split_everything")
def test_interleaving_is_shared_by_threads(rng: np.random.Generator) -> None:
    rows = rng.integers(0, 2**15, (100, 70)).astype(np.int16)
    args = (lambda start, stop: rows[start:stop], *rows.shape, rows.dtype)
    parallel_for.set_num_threads(1)
    one = interleave(*args)
    parallel_for.set_num_threads(2)
    np.testing.assert_array_equal(interleave(*args), one)


@pytest.mark.parametrize("format", FLOATS)
def test_storage_of_float_weights_can_be_dropped(rng: np.random.Generator, format: str) -> None:
    x, w = rng.standard_normal((3, 41), dtype=np.float32), _tensor(rng, format, 20, 41)
    before, ids = qmatmul(x, w), np.array([19, 3, 3], np.int32)
    decoded, rows = dequantize(w), nk.embedding(ids, w)
    w.drop_storage()
    np.testing.assert_array_equal(qmatmul(x, w), before)
    np.testing.assert_array_equal(dequantize(w), decoded)
    np.testing.assert_array_equal(nk.embedding(ids, w), rows)
    with pytest.raises(nk.UsageError, match="storage bytes of this tensor were dropped"):
        _ = w.array


def test_unknown_activations_are_named(rng: np.random.Generator) -> None:
    w = _tensor(rng, "q4", 3, 32)
    with pytest.raises(
        nk.UsageError, match="unknown kind of activations 'bf6'; did you mean 'bf16'"
    ):
        qmatmul(np.zeros((1, 32), np.float32), w, activations="bf6")
