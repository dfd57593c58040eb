"""Quantizer "unbiased": blocks with a gain of 1, codes of "search"."""

from __future__ import annotations

import numpy as np
import pytest

import nbflow_kernels as nk
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.quantizers import default_quantizer
from nbflow_kernels.quantizers.gain import takes_gain

SCALED = [name for name, f in FORMATS.items() if takes_gain(f)]
NOT_SCALED = ["f16", "mxfp4", "nvfp4"]


def _weights(n_rows: int = 3, n_columns: int = 512) -> np.ndarray:
    rng = np.random.default_rng(5)
    return rng.standard_t(4, (n_rows, n_columns)).astype(np.float32)


def _block_gains(x: np.ndarray, name: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Return <Q(x), x> / <x, x> of each block, weighed."""
    qt = nk.quantize(x, name, quantizer="unbiased", importance=importance)
    counted = np.ones(x.shape[1]) if importance is None else importance.astype(np.float64)
    values, exact = nk.dequantize(qt).astype(np.float64), x.astype(np.float64)
    starts = np.arange(0, x.shape[1], FORMATS[name].block_size)
    have = np.add.reduceat(values * exact * counted, starts, axis=1)
    return have / np.add.reduceat(exact * exact * counted, starts, axis=1)


# A block's value is d s_i c_i - m t_i.  d and m are rounded to float16, each by 2**-11 of itself at
# most, so the gain is off by 2**-11 of (|d s c| + |m t|) |x| summed over <x, x>: where a minimum is
# subtracted that sum is at most 4 times <x, x> for these weights.
GAIN_TOLERANCE = 4 * 2.0**-11


@pytest.mark.parametrize("name", SCALED)
def test_gain_of_each_block_is_one(name):
    gains = _block_gains(_weights(), name)
    np.testing.assert_allclose(gains, 1, atol=GAIN_TOLERANCE)


@pytest.mark.parametrize("name", ["iq1_m", "iq2_xxs", "q2_k", "q3h_b64t1", "q4_0"])
def test_gain_is_weighed_by_importance(name):
    importance = np.random.default_rng(1).exponential(size=512).astype(np.float32)
    np.testing.assert_allclose(_block_gains(_weights(), name, importance), 1, atol=GAIN_TOLERANCE)


@pytest.mark.parametrize("name", ["q4_0", "q2_b32t1a"])
def test_padding_does_not_count(name):
    x = _weights(2, 48)  # a block and a half
    x[:, 47] = 9  # the padding repeats it
    np.testing.assert_allclose(_block_gains(x, name), 1, atol=GAIN_TOLERANCE)


@pytest.mark.parametrize("name", ["iq1_m", "iq3_s", "q2_k", "q4_1"])
def test_codes_are_those_of_the_search(name):
    x = _weights()
    values = [
        nk.dequantize(nk.quantize(x, name, quantizer=q)).astype(np.float64)
        for q in ("search", "unbiased")
    ]
    size = FORMATS[name].block_size
    search, unbiased = (v.reshape(-1, size) for v in values)
    # one factor per block, but for the rounding of d and m to float16
    factors = (unbiased * search).sum(axis=1) / np.square(search).sum(axis=1)
    largest = np.abs(search).max(axis=1, keepdims=True)
    assert np.all(np.abs(unbiased - factors[:, None] * search) < 8 * 2.0**-11 * largest)


@pytest.mark.parametrize("name", NOT_SCALED)
def test_formats_without_float16_scales_keep_the_search(name):
    x = _weights()
    one, other = (nk.quantize(x, name, quantizer=q).data for q in ("search", "unbiased"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["iq1_m", "q2_k", "q4_0"])
def test_zeros_and_large_weights_stay_finite(name):
    x = _weights(4)
    x[0] = 0
    x[1] *= 6e4 / np.abs(x[1]).max()
    x[2] *= 1e-7
    values = nk.dequantize(nk.quantize(x, name, quantizer="unbiased"))
    assert np.isfinite(values).all()
    assert not values[0].any()


def test_scales_that_would_not_fit_are_kept():
    x = np.full((1, 32), 8.0 * 65504, np.float32)  # q4_0: d = -65504 at the search's best
    x[0, 1:] = 8 * 65504 * 0.94
    one, other = (nk.quantize(x, "q4_0", quantizer=q) for q in ("search", "unbiased"))
    assert np.isfinite(nk.dequantize(other)).all()
    assert np.abs(nk.dequantize(other)).max() <= 8 * 65504
    assert one.data.shape == other.data.shape


@pytest.mark.parametrize(
    ("name", "expected"),
    [("iq1_s", "unbiased"), ("q2_k", "unbiased"), ("q2_b32t1a", "unbiased"), ("iq3_xxs", "search"),
     ("q4_k", "search"), ("f16", "search"), ("q8_0", "search")],
)  # fmt: skip
def test_default_by_bits(name, expected):
    assert default_quantizer(FORMATS[name]) == expected
    x = _weights()
    data = QuantizerOptions().quantize(x, name).data
    np.testing.assert_array_equal(data, nk.quantize(x, name, quantizer=expected).data)


@pytest.mark.parametrize(("name", "quantizer"), [("q2", "unbiased"), ("q4_0", "search")])
def test_auto_is_the_default_quantizer_of_a_format(name: str, quantizer: str) -> None:
    w = np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32)
    found, want = (nk.quantize(w, name, quantizer=q).data for q in ("auto", quantizer))
    np.testing.assert_array_equal(found, want)
