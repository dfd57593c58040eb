"""The paged cache beyond its cases: strided rows, untouched neighbours, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    convert_paged_kv_cache,
    gather_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)


def arguments(T: int = 3, D: int = 20, dtype: Any = np.float32) -> dict[str, Any]:
    """Return a call that appends T rows to request 1 of two, pages of 4 tokens, 2 heads."""
    rng = np.random.default_rng(0)
    return {
        "append_key": rng.standard_normal((T, 2, D)).astype(np.float32),
        "append_value": rng.standard_normal((T, 2, D)).astype(np.float32),
        "batch_indices": np.full(T, 1, np.int32),
        "positions": np.arange(6 - T, 6, dtype=np.int32),
        "paged_kv_cache": tuple(np.full((5, 4, 2, D), 7, dtype) for _ in "kv"),
        "kv_indices": ints(3, 0, 4),
        "kv_indptr": ints(0, 1, 3),
        "kv_last_page_len": ints(4, 2),
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_only_the_named_places_change(dtype: Any) -> None:
    call = arguments(dtype=dtype)
    append_paged_kv_cache(**call)
    want = np.full((5, 4, 2, 20), 7, dtype)
    want[0, 3] = call["append_key"][0]  # position 3: last slot of the request's first page
    want[4, :2] = call["append_key"][1:]
    np.testing.assert_array_equal(call["paged_kv_cache"][0], want)


def test_rows_may_be_far_apart() -> None:
    call, plain = arguments(), arguments()
    fused = np.concatenate([call["append_key"], call["append_value"]], axis=1)  # (T, 4, D)
    call["append_key"], call["append_value"] = fused[:, :2], fused[:, 2:]
    append_paged_kv_cache(**call)
    append_paged_kv_cache(**plain)
    for got, want in zip(call["paged_kv_cache"], plain["paged_kv_cache"], strict=True):
        np.testing.assert_array_equal(got, want)


def test_half_rounds_like_numpy_and_overflows_to_infinity() -> None:
    call = arguments(T=1, D=35, dtype=np.float16)  # two vectors and a tail of 3
    values = np.float32(2.0) ** np.linspace(-26, 17, 70, dtype=np.float32)
    call["append_key"][:] = values.reshape(1, 2, 35)
    append_paged_kv_cache(**call)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).reshape(2, 35)
    np.testing.assert_array_equal(call["paged_kv_cache"][0][4, 1], want)
    assert np.isinf(want).any()


def test_what_was_appended_is_gathered_in_order() -> None:
    for format, bound in (("f32", 0.0), ("bf16", 2.0**-8), ("q8_0", 1 / 126), ("q4_0", 1 / 7)):
        stored = nk.kv_format(format)
        call = arguments(T=6)
        shape = (5, 4, 2, stored.row_length(20))
        call["paged_kv_cache"] = tuple(np.zeros(shape, stored.dtype) for _ in "kv")
        append_paged_kv_cache(**call, kv_format=format)
        tables = ints(0, 4), ints(0, 0, 2), ints(0, 2)  # request 1 alone, on pages 0 and 4
        out = tuple(np.full((6, 2, 20), np.nan, np.float32) for _ in "kv")
        got = gather_paged_kv_cache(
            call["paged_kv_cache"], *tables, head_dim=20, kv_format=format, out=out
        )
        assert got is out
        # half a step of the coarsest grid, relative to the largest number of the head vector
        for found, name in zip(got, ("append_key", "append_value"), strict=True):
            error = np.abs(found - call[name]) / np.abs(call[name]).max(axis=2, keepdims=True)
            assert error.max() <= bound
            assert (error.max() > 0) == (bound > 0)


def test_values_may_have_another_size_than_keys() -> None:
    call = arguments()
    call["append_value"] = call["append_value"][:, :, :12].copy()
    keys, values = np.zeros((5, 4, 2, 20), np.float32), np.zeros((5, 4, 2, 12), np.float32)
    append_paged_kv_cache(**call | {"paged_kv_cache": (keys, values)})
    np.testing.assert_array_equal(keys[4, :2], call["append_key"][1:])
    np.testing.assert_array_equal(values[4, :2], call["append_value"][1:])


def test_rows_of_padding_are_not_written() -> None:
    """Their positions are not checked either."""
    call = arguments()
    whole = {**call, "paged_kv_cache": tuple(a.copy() for a in call["paged_kv_cache"])}
    padding = {"batch_indices": ints(1, -1, 1), "positions": ints(3, 999, 5)}
    append_paged_kv_cache(**{**call, **padding})
    append_paged_kv_cache(**whole)
    for found, wanted in zip(call["paged_kv_cache"], whole["paged_kv_cache"], strict=True):
        assert (found[4, 0] == 7).all()  # position 4
        assert (wanted[4, 0] != 7).any()
        found[4, 0] = wanted[4, 0]
        np.testing.assert_array_equal(found, wanted)


def mla_arguments() -> dict[str, Any]:
    """Return a call that appends two tokens of 16 + 4 numbers to one request."""
    both = np.zeros((2, 4, 20), np.float32)
    return {
        "append_ckv": np.ones((2, 16), np.float32),
        "append_kpe": np.full((2, 4), 2, np.float32),
        "batch_indices": ints(0, 0),
        "positions": ints(3, 4),
        "ckv_cache": both[..., :16],
        "kpe_cache": both[..., 16:],
        "kv_indices": ints(1, 0),
        "kv_indptr": ints(0, 2),
        "kv_last_page_len": ints(1),
    }


def test_mla_caches_may_be_slices_of_one_array() -> None:
    call = mla_arguments()
    append_paged_mla_kv_cache(**call)
    both = call["ckv_cache"].base
    want = np.zeros((2, 4, 20), np.float32)
    want[1, 3] = want[0, 0] = [1.0] * 16 + [2.0] * 4
    np.testing.assert_array_equal(both, want)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"append_kpe": np.zeros((3, 4), np.float32)}, UsageError, "append_kpe must have shape"),
        ({"ckv_cache": np.zeros((2, 4, 15), np.float32)}, UsageError, r"\(pages, page_size, 16\)"),
        ({"kpe_cache": np.zeros((2, 4, 4), np.float16)}, TypeError, "kpe_cache must have dtype"),
        ({"kpe_cache": np.zeros((3, 4, 4), np.float32)}, UsageError, "the same pages"),
        ({"kpe_cache": np.zeros((2, 4, 8), np.float32)[..., ::2]}, UsageError, "contiguous"),
        ({"positions": ints(3, 5)}, UsageError, r"positions\[1\] must be below .* 5 .* got 5"),
        ({"kv_format": "q8_0"}, TypeError, "in format q8_0 must have dtype uint8, got float32"),
        ({"kv_format": "f32/f16"}, UsageError, "a latent cache has one format"),
    ],
)
def test_wrong_mla_arguments_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        append_paged_mla_kv_cache(**{**mla_arguments(), **change})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dtype": "float64"}, UsageError, "unknown dtype 'float64'"),
        ({"kv_layout": "DNH"}, UsageError, "unknown kv_layout 'DNH'"),
        ({"head_dim": 21}, UsageError, r"paged_kv_cache \(keys\) must have shape .* 21\)"),
        ({"kv_indices": ints(3, 0, 9)}, UsageError, "must name pages 0..4"),
        ({"paged_kv_cache": (np.zeros(4, np.float32),) * 2}, UsageError, "4 axes"),
        ({"out": (np.zeros((1, 2, 20), np.float32),) * 2}, UsageError, r"out \(keys\) must"),
    ],
)
def test_wrong_gather_arguments_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    names = ("paged_kv_cache", "kv_indices", "kv_indptr", "kv_last_page_len")
    call = {name: value for name, value in arguments().items() if name in names}
    with pytest.raises(error, match=words):
        gather_paged_kv_cache(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_format": "q8_0"}, TypeError, "in format q8_0 must have dtype uint8, got float32"),
        ({"kv_format": "f32/f16"}, TypeError, "in format f16 must have dtype float16, got float32"),
        ({"kv_format": "q5_k"}, UsageError, "unknown kv_format|cannot hold"),
        (
            {"paged_kv_cache": tuple(np.zeros((5, 4, 2, 20), np.uint8) for _ in "kv")},
            TypeError,
            "got uint8; pass kv_format= for quantized pages",
        ),
        (
            {
                "paged_kv_cache": tuple(np.zeros((5, 4, 2, 20), np.uint8) for _ in "kv"),
                "kv_format": "q8_0",
            },
            UsageError,
            r"must have shape \(any, any, 2, 34\), got \(5, 4, 2, 20\)",
        ),
        ({"append_key": np.zeros((3, 2, 20))}, TypeError, "append_key must have dtype float32"),
        ({"append_value": np.zeros((2, 2, 20), np.float32)}, UsageError, "append_value must have"),
        ({"positions": ints(3, 4, 6)}, UsageError, r"positions\[2\] must be below .* 6 .* got 6"),
        ({"positions": ints(-1, 4, 5)}, UsageError, r"positions\[0\] must be .* got -1"),
        ({"positions": np.arange(3)}, TypeError, "positions must have dtype int32, got int64"),
        ({"batch_indices": ints(1, 1, 2)}, UsageError, "must name requests 0..1, got 2"),
        ({"batch_indices": ints(1, -2, 1)}, UsageError, "must be -1 for padding, got -2"),
        ({"kv_indices": ints(3, 0, 5)}, UsageError, "must name pages 0..4 of the cache, got 5"),
        ({"kv_indices": ints(3, 0)}, UsageError, r"end within kv_indices \(2 entries\), got 3"),
        ({"kv_last_page_len": ints(4, 5)}, UsageError, "request 1 must be 1..4"),
        ({"kv_layout": "hnd"}, UsageError, "unknown kv_layout 'hnd'"),
        ({"kv_layout": "HND"}, UsageError, r"paged_kv_cache \(keys\) must have shape"),
        ({"paged_kv_cache": (np.zeros(1),)}, UsageError, r"a pair \(keys, values\), got 1 arrays"),
        ({"cos_sin": np.zeros((6, 22), np.float32)}, UsageError, "even number of columns .* 20"),
        ({"cos_sin": np.zeros((6, 3), np.float32)}, UsageError, "even number of columns .* got 3"),
        ({"cos_sin": np.zeros((5, 8), np.float32)}, UsageError, "row for position 5, got 5 rows"),
        ({"cos_sin": np.zeros((6, 8))}, TypeError, "cos_sin must have dtype float32"),
        ({"interleave": True}, UsageError, "interleave is for cos_sin"),
    ],
)
def test_wrong_arguments_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        append_paged_kv_cache(**{**arguments(), **change})


def test_lengths_and_positions_are_checked() -> None:
    with pytest.raises(UsageError, match=r"nnz must be at least append_indptr\[-1\] = 3, got 2"):
        get_batch_indices_positions(ints(0, 1, 3), ints(9, 9), 2)
    with pytest.raises(UsageError, match=r"positions must have shape .*3.* got .*2"):
        get_batch_indices_positions(ints(0, 1, 3), ints(9, 9), 3, None, ints(0, 0))
    with pytest.raises(UsageError, match="seq_lens of request 1 must count its 2 new rows too"):
        get_batch_indices_positions(ints(0, 1, 3), ints(9, 1), 3)
    with pytest.raises(UsageError, match="append_indptr must start at 0"):
        get_batch_indices_positions(ints(), ints(), 0)
    with pytest.raises(UsageError, match="page_size must be positive"):
        get_seq_lens(ints(0, 1), ints(1), 0)
    with pytest.raises(UsageError, match=r"kv_indptr must start at 0 and never fall, got \[\]"):
        get_seq_lens(ints(), ints(), 4)


def test_positions_fit_the_lengths_of_the_table() -> None:
    lens = get_seq_lens(ints(0, 1, 3), ints(4, 2), 4)
    assert lens.tolist() == [4, 6]
    rows, positions = get_batch_indices_positions(ints(0, 1, 4), lens, 4)
    given = ints(9, 9, 9, 9), ints(9, 9, 9, 9)
    found = get_batch_indices_positions(ints(0, 1, 4), lens, 4, *given)
    assert found[0] is given[0]
    assert found[1] is given[1]
    assert (given[0] == rows).all()
    assert (given[1] == positions).all()
    assert rows.tolist() == [0, 1, 1, 1]
    assert positions.tolist() == [3, 3, 4, 5]
    assert rows.dtype == positions.dtype == np.int32


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("format", ["f32", "f16", "q8_0", "f8_e4m3"])
def test_fused_rotation_has_the_bytes_of_a_rotation_before(format: str, interleave: bool) -> None:
    stored = nk.kv_format(format)
    table = nk.rope_cos_sin_cache(6, 18, theta=1e4)  # 9 pairs of 20 columns
    caches = []
    for fused in (False, True):
        call = arguments()
        shape = (5, 4, 2, stored.row_length(20))
        call["paged_kv_cache"] = tuple(np.zeros(shape, stored.dtype) for _ in "kv")
        given = call["append_key"].copy()
        if fused:
            call |= {"cos_sin": table, "interleave": interleave}
        else:
            key = call["append_key"].reshape(3, 40)
            query = np.zeros((3, 20), np.float32)
            nk.apply_rope_with_cos_sin_cache_inplace(
                call["positions"], query, key, 20, table, not interleave
            )
        append_paged_kv_cache(**call, kv_format=format)
        assert (call["append_key"] == given).all() == fused  # the argument does not change
        caches.append(call["paged_kv_cache"])
    for found, want in zip(*caches, strict=True):
        np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))


def conversion() -> dict[str, Any]:
    """Return a call that converts requests of 6 and 1 tokens, 2 heads of 8."""
    return {
        "paged_kv_cache": tuple(np.ones((3, 4, 2, 8), np.float32) for _ in "kv"),
        "page_table": (ints(2, 0, 1), ints(0, 2, 3), ints(2, 1)),
        "out": tuple(np.zeros((3, 2, 3, 8), np.float16) for _ in "kv"),
        "out_page_table": (ints(0, 1, 2), ints(0, 2, 3), ints(3, 1)),
        "out_kv_layout": "HND",
    }


def test_conversion_changes_only_its_slots() -> None:
    call = conversion()
    convert_paged_kv_cache(**call)
    want = np.ones((3, 2, 3, 8), np.float16)
    want[2, :, 1:] = 0
    for found in call["out"]:
        np.testing.assert_array_equal(found, want)
    convert_paged_kv_cache(
        **call
        | {"page_table": (ints(), ints(0), ints()), "out_page_table": (ints(), ints(0), ints())}
    )  # no requests


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"page_table": (ints(2, 0, 1), ints(0, 2, 3))}, UsageError, "page_table must be a tuple"),
        ({"page_table": (ints(2, 0, 3), ints(0, 2, 3), ints(2, 1))}, UsageError, "pages 0..2"),
        ({"page_table": (ints(2, 0, 1), ints(0, 2, 3), ints(5, 1))}, UsageError, "must be 1..4"),
        (
            {"out_page_table": (ints(0, 1, 2), ints(0, 2, 3), ints(2, 1))},
            UsageError,
            r"lengths of page_table in tokens, \[6, 1\], got \[5, 1\]",
        ),
        (
            {"out_page_table": (ints(0, 1, 1), ints(0, 2, 3), ints(3, 1))},
            UsageError,
            "every page at most once",
        ),
        ({"out_page_table": ([0], [0, 1], [1])}, TypeError, "out_page_table: kv_indices must be"),
        ({"out_kv_layout": "NHD"}, UsageError, r"paged_kv_cache \(keys\) must have shape"),
        ({"out_kv_format": "q8_0"}, TypeError, "q8_0 must have dtype uint8"),
        ({"head_dim": 9}, UsageError, "must have shape"),
    ],
)
def test_wrong_conversions_are_named(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        convert_paged_kv_cache(**{**conversion(), **change})


def test_a_conversion_in_place_is_refused() -> None:
    call = conversion()
    call |= {
        "out": call["paged_kv_cache"],
        "out_kv_layout": "NHD",
        "out_page_table": call["page_table"],
    }
    with pytest.raises(UsageError, match="must not share memory"):
        convert_paged_kv_cache(**call)
