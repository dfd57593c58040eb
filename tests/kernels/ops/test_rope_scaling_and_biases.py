"""RoPE scalings and additive position embeddings against published numbers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import reference
from nbflow_kernels.position.cases import SCALINGS

# Made with transformers 5.23.0, modeling_rope_utils.ROPE_INIT_FUNCTIONS, head size 64, in float32.
GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "golden" / "rope_scalings.json").read_text()
)


def _scaling(case: dict[str, Any]) -> nk.RopeScaling | None:
    return nk.RopeScaling.from_config(case["rope_scaling"], max_position=case["max_position"])


@pytest.mark.parametrize("name", GOLDEN)
def test_frequencies_are_those_of_hugging_face(name: str) -> None:
    case = GOLDEN[name]
    frequencies, factor = nk.rope_frequencies(
        64, theta=case["theta"], scaling=_scaling(case), seq_len=case["seq_len"]
    )
    # theirs are float32: a power of up to e**14, whose exponent is rounded to 2**-24 of itself
    # (14 * 6e-8 = 8e-7), and a handful of roundings
    np.testing.assert_allclose(frequencies, case["frequencies"], rtol=1.5e-6, atol=0)
    assert factor == pytest.approx(case["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_table_holds_the_frequencies_and_the_factor(name: str) -> None:
    scaling = SCALINGS[name]
    table = nk.rope_cos_sin_cache(200, 20, theta=1e4, scaling=scaling)
    frequencies, factor = nk.rope_frequencies(20, theta=1e4, scaling=scaling, seq_len=200)
    np.testing.assert_allclose(table[1, :10], factor * np.cos(frequencies), atol=1.2e-7, rtol=0)
    np.testing.assert_allclose(table[1, 10:], factor * np.sin(frequencies), atol=1.2e-7, rtol=0)


def test_dynamic_scaling_begins_beyond_the_trained_length() -> None:
    scaling = nk.DynamicNtkRopeScaling(factor=4.0, original_max_position=100)
    plain = nk.rope_cos_sin_cache(50, 16, theta=1e4)
    for seq_len in (None, 50, 100):
        same = nk.rope_cos_sin_cache(50, 16, theta=1e4, scaling=scaling, seq_len=seq_len)
        np.testing.assert_array_equal(same, plain)
    longer = nk.rope_cos_sin_cache(50, 16, theta=1e4, scaling=scaling, seq_len=101)
    assert not np.array_equal(longer, plain)


def test_scale_of_a_table_is_linear_scaling() -> None:
    scaling = nk.LinearRopeScaling(factor=4.0)
    np.testing.assert_array_equal(
        nk.rope_cos_sin_cache(9, 8, theta=1e4, scale=4.0),
        nk.rope_cos_sin_cache(9, 8, theta=1e4, scaling=scaling),
    )


def test_softmax_factor_is_deepseeks() -> None:
    # DeepSeek V2: 0.1 * 0.707 * ln(40) + 1 = 1.26080, squared
    scaling = _scaling(GOLDEN["yarn_deepseek_v2_lite"])
    assert scaling is not None
    assert scaling.softmax_factor == pytest.approx((0.0707 * math.log(40) + 1) ** 2, rel=1e-12)
    for name in ("yarn", "llama3_8", "linear"):
        plain = _scaling(GOLDEN[name])
        assert plain is not None
        assert plain.softmax_factor == 1.0


def test_config_entries_become_records() -> None:
    from_config = nk.RopeScaling.from_config
    assert from_config(None) is None
    assert from_config({"rope_type": "default", "rope_theta": 1e4}) is None
    # older names, a list, and Phi-3's numbers outside the entry
    long = from_config(
        {"type": "su", "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0]},
        max_position=131072,
        original_max_position=4096,
    )
    assert long == nk.LongRopeScaling(
        short_factor=(1.0, 1.5), long_factor=(2.0, 8.0), original_max_position=4096, factor=32.0
    )
    assert hash(long) == hash(dataclasses.replace(long))
    assert from_config(
        {"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": 4096}
    ) == nk.LinearRopeScaling(factor=8.0)
    # dynamic scaling begins at max_position_embeddings
    assert from_config(
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 99},
        max_position=2048,
    ) == nk.DynamicNtkRopeScaling(factor=2.0, original_max_position=2048)
    assert from_config(
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}, max_position=512
    ) == nk.YarnRopeScaling(factor=4.0, original_max_position=512)


def test_longrope_factors_on_cosines() -> None:
    """The mscales of short and long sequences, else one factor, given or from the lengths."""
    entry = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0]}
    given = {"original_max_position_embeddings": 16, "attention_factor": 1.5}
    mscales = {"short_mscale": 1.1, "long_mscale": 1.3}
    for more, wanted in (
        ({}, (math.sqrt(1.5), math.sqrt(1.5))),  # f = 4, M = 16: ln f / ln M = 0.5
        ({"attention_factor": 1.5}, (1.5, 1.5)),
        ({"long_mscale": 1.3}, (math.sqrt(1.5), 1.3)),
        ({"attention_factor": 1.5, **mscales}, (1.1, 1.3)),
    ):
        scaling = nk.RopeScaling.from_config(
            {**entry, **given, "attention_factor": None, **more}, max_position=64
        )
        for seq_len, factor in zip((16, 17), wanted, strict=True):
            options: dict[str, Any] = {"theta": 1e4, "scaling": scaling, "seq_len": seq_len}
            assert nk.rope_frequencies(4, **options)[1] == pytest.approx(factor, rel=1e-12)
            assert reference.rope_frequencies(4, **options)[1] == pytest.approx(factor, rel=1e-12)
    with pytest.raises(UsageError, match="long_mscale must be positive, got -1"):
        nk.RopeScaling.from_config({**entry, **given, "long_mscale": -1.0}, max_position=64)
    with pytest.raises(UsageError, match="original_max_position must be at least 2"):
        nk.RopeScaling.from_config(
            {**entry, "original_max_position_embeddings": 1}, max_position=64
        )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_type": "yarm"}, "unknown rope_type 'yarm'; did you mean 'yarn'"),
        ({"factor": 2.0}, "unknown rope_type None"),
        ({"rope_type": "linear", "facter": 2.0}, "'facter'; did you mean 'factor'"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
            "needs low_freq_factor and high_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 4.0}, "needs the length the model was trained for"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must not be 0, nor infinite, got 0.0"),
        ({"rope_type": "proportional", "factor": -2.0}, "factor must be positive, got -2.0"),
    ],
)
def test_wrong_config_entries_are_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        nk.RopeScaling.from_config(config)


def test_wrong_scalings_are_named() -> None:
    with pytest.raises(UsageError, match="high_freq_factor must be at least low_freq_factor 4"):
        nk.Llama3RopeScaling(low_freq_factor=4.0, high_freq_factor=3.0)
    with pytest.raises(UsageError, match=r"least long_factor must be positive, got 0\.0"):
        nk.LongRopeScaling(short_factor=(1.0,), long_factor=(0.0,), original_max_position=8)
    long = nk.LongRopeScaling(short_factor=(1.0,), long_factor=(2.0,), original_max_position=8)
    with pytest.raises(UsageError, match="short_factor must have a number for each of the 4"):
        nk.rope_frequencies(8, theta=1e4, scaling=long)
    with pytest.raises(UsageError, match="long_factor must have a number for each of the 4"):
        nk.rope_frequencies(8, theta=1e4, scaling=long, seq_len=9)
    with pytest.raises(UsageError, match="a rotary_dim above 2, got 2"):
        nk.rope_frequencies(2, theta=1e4, scaling=SCALINGS["dynamic"])
    with pytest.raises(UsageError, match="a theta above 1, got 1"):
        nk.rope_frequencies(8, theta=1.0, scaling=SCALINGS["yarn"])
    with pytest.raises(NotImplementedError):
        nk.rope_frequencies(8, theta=1e4, scaling=nk.RopeScaling())


# ---- FlashInfer's RoPE functions -------------------------------------------------------------


def _rows(seed: int, T: int, H: int, D: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((T, H, D)).astype(np.float32)


def test_flashinfers_positional_calls() -> None:
    q, k = _rows(0, 3, 2, 32), _rows(1, 3, 1, 32)
    positions, indptr, offsets = ints(5, 6, 7), ints(0, 3), ints(5)
    want = nk.apply_rope_pos_ids(q, k, positions, rope_scale=2.0, rope_theta=1e5)
    cache = nk.rope_cos_sin_cache(8, 32, theta=1e5, scale=2.0)
    flat = q.reshape(3, 64), k.reshape(3, 32)
    for got in (
        nk.apply_rope(q, k, indptr, offsets, 32, False, 2.0, 1e5),
        nk.apply_rope_pos_ids(q, k, positions, 32, False, 2.0, 1e5),
        nk.apply_rope_with_cos_sin_cache(positions, q, k, 32, cache, True),
        nk.apply_rope_with_cos_sin_cache(positions, *flat, 32, cache),
    ):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.reshape(b.shape), b)


@pytest.mark.parametrize("interleave", [False, True])
def test_forms_in_place_change_bands_of_a_wider_matrix(interleave: bool) -> None:
    wide = _rows(2, 4, 5, 32).reshape(4, 160)
    before = wide.copy()
    q, k = wide[:, :96].reshape(4, 3, 32), wide[:, 96:128].reshape(4, 1, 32)
    assert np.shares_memory(q, wide)
    positions, indptr, offsets = ints(2, 3, 0, 1), ints(0, 2, 4), ints(2, 0)
    options: dict[str, Any] = {"interleave": interleave, "rope_theta": 1e4}
    for plain, inplace, arguments in (
        (nk.apply_rope_pos_ids, nk.apply_rope_pos_ids_inplace, (positions,)),
        (nk.apply_rope, nk.apply_rope_inplace, (indptr, offsets)),
        (nk.apply_llama31_rope_pos_ids, nk.apply_llama31_rope_pos_ids_inplace, (positions,)),
        (nk.apply_llama31_rope, nk.apply_llama31_rope_inplace, (indptr, offsets)),
    ):
        want = plain(q, k, *arguments, **options)
        assert inplace(q, k, *arguments, **options) is None
        np.testing.assert_array_equal(q, want[0])
        np.testing.assert_array_equal(k, want[1])
        np.testing.assert_array_equal(wide[:, 128:], before[:, 128:])
        wide[:] = before


def test_llama31_form_is_the_scaling() -> None:
    q = _rows(3, 2, 1, 64)
    positions = ints(0, 100_000)
    cache = nk.rope_cos_sin_cache(100_001, 64, theta=5e5, scaling=nk.Llama3RopeScaling())
    want = nk.apply_rope_with_cos_sin_cache(positions, q, q, cos_sin_cache=cache)[0]
    np.testing.assert_array_equal(nk.apply_llama31_rope_pos_ids(q, q, positions)[0], want)


def test_rows_without_heads_need_a_head_size() -> None:
    flat, cache = _rows(4, 2, 1, 12).reshape(2, 12), nk.rope_cos_sin_cache(4, 4, theta=1e4)
    with pytest.raises(UsageError, match=r"query of shape \(2, 12\) needs head_size.*got None"):
        nk.apply_rope_with_cos_sin_cache(ints(0, 1), flat, flat, cos_sin_cache=cache)
    with pytest.raises(UsageError, match="needs head_size, a divisor of its columns, got 8"):
        nk.apply_rope_with_cos_sin_cache(ints(0, 1), flat, flat, 8, cache)
    heads = flat.reshape(2, 3, 4)
    with pytest.raises(UsageError, match=r"query must have shape \(any, any, 6\)"):
        nk.apply_rope_with_cos_sin_cache(ints(0, 1), heads, heads, 6, cache)
    with pytest.raises(TypeError, match="cos_sin_cache must be a NumPy array"):
        nk.apply_rope_with_cos_sin_cache(ints(0, 1), heads, heads)


# ---- additive position embeddings ----------------------------------------------------------------

# First distances (key minus query) of each bucket, and the bucket: T5Attention of
# transformers 5.23.0.
T5_ENCODER = (
    "-260:15 -90:14 -63:13 -45:12 -31:11 -22:10 -15:9 -11:8 -7:7 -6:6 -5:5 -4:4 -3:3 -2:2 -1:1 0:0 "
    "1:17 2:18 3:19 4:20 5:21 6:22 7:23 8:24 12:25 16:26 23:27 32:28 46:29 64:30 91:31"
)
T5_DECODER = (
    "-260:31 -112:30 -98:29 -86:28 -76:27 -66:26 -58:25 -51:24 -45:23 -39:22 -34:21 -30:20 -26:19 "
    "-23:18 -20:17 -18:16 -15:15 -14:14 -13:13 -12:12 -11:11 -10:10 -9:9 -8:8 -7:7 -6:6 -5:5 -4:4 "
    "-3:3 -2:2 -1:1 0:0"
)
FEW = (
    "-260:9 -54:8 -30:7 -16:6 -9:5 -4:4 -3:3 -2:2 -1:1 0:0 1:11 2:12 3:13 4:14 5:15 10:16 17:17 "
    "31:18 55:19"
)


@pytest.mark.parametrize(
    ("bidirectional", "num_buckets", "max_distance", "limits"),
    [(True, 32, 128, T5_ENCODER), (False, 32, 128, T5_DECODER), (True, 20, 100, FEW)],
)
def test_buckets_are_those_of_t5(
    bidirectional: bool, num_buckets: int, max_distance: int, limits: str
) -> None:
    distances = np.arange(-260, 261, dtype=np.int32)
    want = np.empty(521, np.int32)
    for limit in limits.split():
        first, bucket = map(int, limit.split(":"))
        want[first + 260 :] = bucket
    got = nk.relative_position_bucket(
        distances,
        bidirectional=bidirectional,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )
    np.testing.assert_array_equal(got, want)


def test_bias_of_a_decoding_step_is_the_last_row() -> None:
    table = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    slopes = nk.alibi_slopes(3)
    for bias in (
        lambda Tq, Tk: nk.relative_position_bias(table, Tq, Tk, bidirectional=False),
        lambda Tq, Tk: nk.alibi_bias(slopes, Tq, Tk),
    ):
        whole = bias(40, 40)
        np.testing.assert_array_equal(bias(1, 40), whole[:, -1:])
        np.testing.assert_array_equal(bias(5, 40), whole[:, -5:])
        assert bias(0, 40).shape == (3, 0, 40)


def test_slopes_of_12_heads_are_those_of_bloom() -> None:
    # build_alibi_tensor of transformers 5.23.0, whose powers are float32: 8 times 2**-24
    want = [2.0**-h for h in range(1, 9)]
    want += [0.7071067690849304, 0.3535533845424652, 0.1767766773700714, 0.0883883386850357]
    np.testing.assert_allclose(nk.alibi_slopes(12), want, rtol=8 * 2.0**-24, atol=0)


def test_sinusoids_of_m2m_100() -> None:
    """M2M-100: padding is row 1, positions start at 2."""
    got = nk.sinusoidal_position_embedding(ints(-1, 0, 1), 8, offset=2, padding_idx=1)
    np.testing.assert_array_equal(got[0], 0.0)
    angles = np.outer([2, 3], 1e4 ** (-np.arange(4) / 3))
    # results in -1..1 rounded to float32
    np.testing.assert_allclose(got[1:, :4], np.sin(angles), atol=6e-8, rtol=0)
    np.testing.assert_allclose(got[1:, 4:], np.cos(angles), atol=6e-8, rtol=0)


def test_arrangements_hold_the_same_columns() -> None:
    positions = np.arange(9, dtype=np.int32)
    order = np.arange(12).reshape(2, 6).T.ravel()  # 0, 6, 1, 7, ...
    for form in ("fairseq", "paper"):
        halves, pairs = (
            nk.sinusoidal_position_embedding(positions, 12, form=form, interleave=i)
            for i in (False, True)
        )
        np.testing.assert_array_equal(halves[:, order], pairs)


def test_learned_positions_may_be_added_in_place() -> None:
    x = np.ones((2, 3), np.float32)
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert nk.add_learned_positions(x, ints(1, 0), table, offset=2, out=x) is x
    np.testing.assert_array_equal(x, table[[3, 2]] + 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nk.alibi_slopes(0), "n_heads must be positive, got 0"),
        (lambda: nk.alibi_bias(nk.alibi_slopes(2), -1, 3), "must not be negative, got -1 and 3"),
        (
            lambda: nk.relative_position_bucket(ints(1), num_buckets=33),
            "even if bidirectional, got 33",
        ),
        (
            lambda: nk.relative_position_bucket(ints(1), max_distance=8),
            "max_distance must be above 8, got 8",
        ),
        (
            lambda: nk.sinusoidal_position_embedding(ints(1), 8, form="fairsek"),
            "unknown form 'fairsek'; did you mean 'fairseq'",
        ),
        (lambda: nk.sinusoidal_position_embedding(ints(1), 3), "dim must be at least 4"),
        (
            lambda: nk.sinusoidal_position_embedding(ints(1), 7, form="paper"),
            "even to interleave, got 7",
        ),
        (
            lambda: nk.sinusoidal_position_embedding(ints(1), 8, base=0.0),
            "base must be positive, got 0",
        ),
        (
            lambda: nk.add_learned_positions(
                np.ones((2, 3), np.float32), ints(0, 3), np.ones((4, 3), np.float32), offset=1
            ),
            r"positions plus offset 1 must be rows 0\.\.3 of the table, got 4",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()
