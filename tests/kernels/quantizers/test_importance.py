"""Importance weights in every format: weighted errors, and input checks."""

from __future__ import annotations

import numpy as np
import pytest
from golden_weights import bell

from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, dequantize
from nbflow_kernels.quantizers import quantize

FLOATS = ["f32", "f16", "bf16"]
BLOCKS = [name for name in FORMATS if name not in FLOATS]
GGML = [n for n in BLOCKS if n.endswith("_k") or n in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")]
# one scale for 128 weights and more, or scales that are powers of two: there is little to choose
RIGID = ("mxfp4", "tq2_0", "tq1_0", "q1_0")
COLUMNS = 600  # no multiple of 256: the last block is padded

X = bell(1, (8, COLUMNS)) / np.float32(4)  # q4_b16 reaches from -1 to 1.55
# a tenth of the columns matters a hundred times as much
SOME = np.where(np.arange(COLUMNS) % 10 == 3, np.float32(100), np.float32(1))


def errors(name: str, counts: np.ndarray, **options) -> np.ndarray:
    """Return the weighted squared error of each block."""
    squares = np.square(dequantize(quantize(X, name, **options)).astype(np.float64) - X)
    starts = np.arange(0, COLUMNS, FORMATS[name].block_size)
    return np.add.reduceat(squares * counts, starts, axis=1)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in RIGID])
def test_important_columns_lose_less(name):
    without, weighted = errors(name, SOME), errors(name, SOME, importance=SOME)
    # 10 % of the weights have 92 % of the importance (measured: 0.18 for q2_k to 0.65 for q8)
    assert weighted.sum() < 0.7 * without.sum()


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("per_weight", [False, True])
def test_search_never_loses_more_than_reference_in_any_block(name, per_weight):
    importance = np.abs(bell(2, X.shape)) if per_weight else SOME
    plain, best = (
        errors(name, importance, importance=importance, quantizer=e)
        for e in ("reference", "search")
    )
    # as without importance: float32 sums and quotients in the search
    assert np.all(best <= plain * (1 + 3e-5))
    assert best.sum() < plain.sum()


@pytest.mark.parametrize("name", BLOCKS)
def test_one_row_for_all_is_the_same_as_each_row_its_own(name):
    columns = quantize(X, name, importance=SOME)
    rows = quantize(X, name, importance=np.broadcast_to(SOME, X.shape))
    assert np.array_equal(columns.data, rows.data)
    own = np.abs(bell(2, X.shape))
    whole = quantize(X, name, importance=own).data
    assert np.array_equal(quantize(X[5], name, importance=own[5]).data[0], whole[5])
    assert not np.array_equal(whole, rows.data)


@pytest.mark.parametrize("name", BLOCKS)
def test_only_ratios_matter_to_best(name):
    data = quantize(X, name, importance=SOME).data
    # Powers of two: nothing is rounded differently.  Plain, where GGML's best starts, multiplies up
    # to four importances, which must stay float32 numbers.
    for factor in (2.0**-16, 2.0**16) if name in GGML else (2.0**-90, 2.0**90):
        scaled = quantize(X, name, importance=SOME * np.float32(factor))
        assert np.array_equal(scaled.data, data)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in RIGID])
def test_columns_without_importance_are_free(name):
    # two columns of each block of 16 count, or four of 32: few enough to be hit well
    importance = np.zeros(COLUMNS, np.float32)
    importance[::8] = 1
    free, bound = errors(name, importance, importance=importance), errors(name, importance)
    assert free.sum() < 0.9 * bound.sum()
    nothing = dequantize(quantize(X, name, importance=np.zeros(COLUMNS, np.float32)))
    assert np.isfinite(nothing).all()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_to_nearest_for_any_importance(name):
    for quantizer in ("reference", "search"):
        weighted = quantize(X, name, quantizer=quantizer, importance=SOME)
        assert np.array_equal(weighted.data, quantize(X, name).data)


def test_reference_of_q8_0_is_the_published_one_which_uses_no_importance():
    weighted = quantize(X, "q8_0", quantizer="reference", importance=SOME)
    assert np.array_equal(weighted.data, quantize(X, "q8_0", quantizer="reference").data)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"importance": SOME[:5]}, UsageError, r"shape \(600,\) \(columns\) or \(8, 600\).*\(5,\)"),
        ({"importance": -SOME}, UsageError, r"finite and >= 0 in float32, got -1.0 at \[0\]"),
        ({"importance": SOME * np.inf}, UsageError, r"got inf at \[0\]"),
        ({"importance": np.full(COLUMNS, 1e39)}, UsageError, r"in float32, got 1e\+39 at \[0\]"),
        (
            {"importance": np.ones(COLUMNS, int)},
            TypeError,
            "float32, float16 or float64, got int64",
        ),
        (
            {"importance": SOME, "quantizer": "reference"},
            UsageError,
            "q4_b32t1a .* knows no importance",
        ),
    ],
)
def test_errors_name_what_was_wrong(options, error, message):
    with pytest.raises(error, match=message):
        quantize(X, "q4", **options)
