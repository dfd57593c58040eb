"""Errors of the quantizers: published ones as published, searches never worse."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from nbflow_kernels.cpu.parallel_for import get_num_threads, set_num_threads
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, dequantize
from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.quantizers.codebook_formats import RULE_MXFP4, RULE_NVFP4
from nbflow_kernels.quantizers.reference.ggml_iq2_iq3 import MOST_TRIALS, RECIPES
from nbflow_kernels.quantizers.search.two_level_scales import nearest_stored
from nbflow_kernels.testing.format_table import relative_rmse, sample

BLOCK_FORMATS = [name for name, f in FORMATS.items() if isinstance(f, AffineFormat)]

# Relative root mean square error of the published quantizers on N(0, 0.02), 4.2 million samples,
# three digits.
PUBLISHED = {
    "q8_b32t1": 0.00465,
    "q8_b32t2": 0.00535,
    "q6_b64t1": 0.0217,
    "q5_b64t1": 0.0448,
    "q5_b32t1": 0.0379,
    "q5h_b64t1": 0.0306,
    "q4_b64t1": 0.0960,
    "q4_b32t1a": 0.0782,
    "q4_b32t1b": 0.0803,
    "q4_b16": 0.148,
    "q3h_b64t1": 0.1344,
    "q3_b32t1a": 0.1678,
    "q3_b32t1b": 0.1605,
    "q2_b32t1a": 0.393,
    "q2_b32t1b": 0.320,
    "q8_0": 0.00535,
    "q5_1": 0.0379,
    "q5_0": 0.0426,
    "q4_1": 0.0782,
    "q4_0": 0.0859,
}


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_reference_loses_what_was_published(name):
    # 256 * 1024 samples in blocks of 64: the range of a block varies by 12 %, so the root mean
    # square over 4096 blocks by 0.2 %; 1 % is five times that, and covers the published rounding
    assert relative_rmse(sample(256), name, "reference") == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", ["q8_b32t1", "q8_b32t2"])
def test_reference_cuts_tiny_weights_off_and_search_does_not(name):
    x = np.random.default_rng(0).normal(0, 0.0005, (64, 1024)).astype(np.float32)
    published = {"q8_b32t1": 2.16, "q8_b32t2": 0.80}[name]
    # every block has codes 0; only some escape the cutoff with q8_b32t2: 1 % for 2048 blocks
    assert relative_rmse(x, name, "reference") == pytest.approx(published, rel=0.01)
    assert relative_rmse(x, name, "search") < 1.05 * PUBLISHED[name]


def distributions(rng: np.random.Generator, columns: int) -> dict[str, np.ndarray]:
    normal = rng.normal(0, 1, (12, columns)).astype(np.float32)
    outlier = normal * np.float32(0.02)
    outlier[:, 5] = 3
    return {
        "normal": normal * np.float32(0.02),
        "wide": normal,
        "tiny": normal * np.float32(0.0005),
        "subnormal": normal * np.float32(5e-7),
        "below_float16": normal * np.float32(1e-20),
        "far_from_zero": normal * np.float32(0.001) + 100,
        "constant": np.full((2, columns), 0.3, np.float32),
        "zeros": np.zeros((2, columns), np.float32),
        "negative_zero": np.full((2, columns), -0.0, np.float32),
        "one_outlier": outlier,
        "skewed": np.exp(normal),
        "two_values": np.where(normal > 0, np.float32(0.7), np.float32(-0.1)),
        "large": normal * np.float32(3e4),
        "beyond_float16": normal * np.float32(1e7),
        "near_float32_max": np.sign(normal) * np.float32(3.4e38),
    }


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("columns", [128, 150])
def test_search_never_loses_more_than_reference_in_any_block(name, columns):
    for what, x in distributions(np.random.default_rng(3), columns).items():
        best = block_errors(x, dequantize(quantize(x, name)), FORMATS[name].block_size)
        plain_weights = dequantize(quantize(x, name, quantizer="reference"))
        plain = block_errors(x, plain_weights, FORMATS[name].block_size)
        assert np.isfinite(best).all(), what
        # the search compares float32 sums of up to 64 squares: 64 * 6e-8 = 4e-6 of the error;
        # the codes are nearest up to a float32 quotient, 255 steps * 6e-8: 2e-5 of it
        assert np.all(best <= plain * (1 + 3e-5)), what


def block_errors(x: np.ndarray, y: np.ndarray, block: int) -> np.ndarray:
    """Return the squared error of each block, inf where decoded values are not finite."""
    with np.errstate(all="ignore"):
        error = np.square(y.astype(np.float64) - x)
    error = np.where(np.isnan(error), np.inf, error)
    return np.add.reduceat(error, np.arange(0, x.shape[1], block), axis=1)


@pytest.mark.parametrize(("name", "at_most"), [("q4", 0.070), ("q3h", 0.120), ("q2", 0.297)])
def test_search_is_clearly_better(name, at_most):
    # plain: 0.0782, 0.1344, 0.320; measured for best: 0.0691, 0.119, 0.295
    assert relative_rmse(sample(64), name, "search") < at_most


@pytest.mark.parametrize("name", ["q4", "q8", "q4_b16"])
def test_padding_does_not_count(name):
    # the short row's block must be as good as a search over its five weights alone can make it:
    # five weights and 16 or more codes, so two of them are exact up to float16
    x = np.float32([[0.5, -0.25, 0.125, 0.0, 0.25]])
    y = dequantize(quantize(x, name))
    # step 0.05 (q4), 0.004 (q8), 0.05 and base steps of 0.01 (q4_b16): half a step at most
    assert np.abs(y - x).max() <= {"q4": 0.025, "q8": 0.002, "q4_b16": 0.03}[name]
    plain = dequantize(quantize(x, name, quantizer="reference"))
    assert np.square(y - x).sum() <= np.square(plain - x).sum() * (1 + 1e-5)


def test_number_of_threads_and_repetition_do_not_matter():
    x = sample(8)
    before = get_num_threads()
    try:
        set_num_threads(1)
        one = quantize(x, "q3").tobytes()
        set_num_threads(2)
        assert quantize(x, "q3").tobytes() == one
        assert quantize(x, "q3").tobytes() == one
    finally:
        set_num_threads(before)


def test_the_first_of_zeros_with_two_signs_is_the_published_minimum():
    """A base of zero has the sign of the first zero in the block, as in GGML's code."""
    x = np.zeros((2, 32), np.float32)
    x[0, 0], x[1, 1:] = -0.0, -0.0
    data = quantize(x, "q4_1", quantizer="reference").data
    assert data[:, 2:4].view(np.uint16)[:, 0].tolist() == [0x8000, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named_wherever_it_is(value):
    x = np.zeros((5, 4096), np.float32)  # more than one part of the check
    x[4, 4095] = value
    with pytest.raises(UsageError, match=r"got -?(nan|inf) at \[4, 4095\] \(1 such values\)"):
        quantize(x, "q4")


def test_all_trial_scales_of_the_grid_formats_have_a_lane():
    assert max(2 * recipe.tries + 1 for recipe in RECIPES.values()) <= MOST_TRIALS


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_scale_buckets_lead_to_the_nearest_storable_scale(name):
    """The nearest number is found from a bucket of float32 bits, not by a search in the table."""
    rule = {"mxfp4": RULE_MXFP4, "nvfp4": RULE_NVFP4}[name]
    values = np.concatenate([rule.stored.astype(float), 10 ** np.arange(-40, 39, 0.37)])
    values = np.unique(np.concatenate([values, np.nextafter(values, 0), values * 1.06]))
    values = values[values < np.finfo(np.float32).max].astype(np.float32)
    found = np.zeros(len(values), np.int64)

    @njit
    def all_of(values, stored, buckets, found):
        for i in range(len(values)):
            found[i] = nearest_stored(values[i], stored, buckets)

    all_of(values, rule.stored, rule.buckets, found)
    distance = np.abs(values.astype(np.float64)[:, None] - rule.stored)
    assert np.array_equal(distance[np.arange(len(values)), found], distance.min(axis=1))
