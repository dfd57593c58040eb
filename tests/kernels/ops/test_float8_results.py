"""Norms and rotations with float8 results: bits, saturation, strides, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.float8 import FLOAT8, encode_float8

FORMATS = tuple(FLOAT8)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _encoded(numbers: np.ndarray, factor: float, name: str) -> np.ndarray:
    """Return the codes of float32 numbers times a float32 factor, a product rounded once."""
    return encode_float8(numbers * np.float32(factor), name)


@pytest.mark.parametrize("out_format", FORMATS)
@pytest.mark.parametrize("shape", [(4, 1), (3, 33), (2, 3, 80), (5, 256)])
def test_norms_encode_the_bits_of_their_float32_results(
    rng: np.random.Generator, shape: tuple[int, ...], out_format: str
) -> None:
    """Any scale, also such that numbers overflow and that they are subnormal."""
    x, (w, b) = _normal(rng, *shape), _normal(rng, 2, shape[-1])
    for scale in (1e-4, 0.37, 3e3):
        out, factor = np.full(shape, 0xFF, np.uint8), 1.0 / scale
        nk.rmsnorm_quant(out, x, w, scale, 1e-6, out_format=out_format)
        np.testing.assert_array_equal(out, _encoded(nk.rmsnorm(x, w), factor, out_format))
        nk.layernorm_quant(out, x, w, b, scale, 1e-6, out_format=out_format)
        np.testing.assert_array_equal(out, _encoded(nk.layernorm(x, w, b), factor, out_format))
        residual = _normal(rng, *shape)
        total, before = residual + x, x.copy()
        nk.fused_add_rmsnorm_quant(out, x, residual, w, scale, out_format=out_format)
        np.testing.assert_array_equal(out, _encoded(nk.rmsnorm(total, w), factor, out_format))
        np.testing.assert_array_equal(residual, total)
        np.testing.assert_array_equal(x, before)


def test_rows_of_codes_may_be_strided_and_columns_beside_them_stay(
    rng: np.random.Generator,
) -> None:
    wide = np.full((4, 50), 7, np.uint8)
    x = _normal(rng, 4, 40)
    nk.rmsnorm_quant(wide[:, :40], x, None, 1.0, out_format="f8_e4m3")
    np.testing.assert_array_equal(wide[:, 40:], 7)
    np.testing.assert_array_equal(wide[:, :40], _encoded(nk.rmsnorm(x, None), 1.0, "f8_e4m3"))


def test_a_nan_makes_its_row_nan() -> None:
    x = np.ones((2, 40), np.float32)
    x[0, 3] = np.nan
    out = np.zeros((2, 40), np.uint8)
    nk.rmsnorm_quant(out, x, None, 1.0, out_format="f8_e5m2")
    assert (out[0] & 0x7F == 0x7F).all()
    assert (out[1] == encode_float8(np.ones(1), "f8_e5m2")).all()


X, CODES = np.ones((2, 4), np.float32), np.zeros((2, 4), np.uint8)
READ_ONLY = CODES.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nk.rmsnorm_quant(CODES, X, None, 1.0), "unknown float8 format 'None'"),
        (
            lambda: nk.rmsnorm_quant(CODES, X, None, 1.0, out_format="q8_0"),
            "unknown float8 format 'q8_0'.*available: f8_e4m3, f8_e5m2",
        ),
        (
            lambda: nk.rmsnorm_quant(CODES, X, None, 0.0, out_format="f8_e4m3"),
            "scale must be positive and finite, got 0.0",
        ),
        (
            lambda: nk.layernorm_quant(
                CODES, X, None, None, np.ones(2, np.float32), out_format="f8_e4m3"
            ),
            r"scale must be a scalar tensor or a number, got an array of shape \(2,\)",
        ),
        (
            lambda: nk.rmsnorm_quant(CODES[:1], X, None, 1.0, out_format="f8_e4m3"),
            r"out must have shape \(2, 4\), got \(1, 4\)",
        ),
        (
            lambda: nk.rmsnorm_quant(READ_ONLY, X, None, 1.0, out_format="f8_e4m3"),
            "out is written to and must not be read-only",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()
