"""Append on a device: fused RoPE, and rows missing in the page table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_sequences import ints, normal

import nbflow_kernels as nk
from nbflow_kernels.kv_cache import cuda as kernels
from nbflow_kernels.kv_cache.cpu_codec import F32, KINDS


@pytest.mark.parametrize("interleave", [False, True])
def test_keys_are_rotated_by_their_positions(xp: Any, interleave: bool) -> None:
    rng = np.random.default_rng(1)
    key, value = normal(rng, 3, 2, 20), normal(rng, 3, 2, 20)
    table = nk.rope_cos_sin_cache(16, 12, theta=1e4)  # the first 12 of 20 columns
    positions = ints(0, 9, 14)
    pages = xp.zeros((4, 2, 2, 4, 20), np.float32)
    places = (ints(0, 0, 0), positions)
    kernels.append_paged_kv_cache(
        xp.asarray(key), xp.asarray(value), *places, pages[:, 0], pages[:, 1],
        ints(2, 0, 1, 3), ints(0, 4), "HND", (F32, F32), cos_sin=xp.asarray(table),
        interleave=interleave,
    )  # fmt: skip
    cos, sin = (part[positions][:, None] for part in (table[:, :6], table[:, 6:]))
    first = np.arange(0, 12, 2) if interleave else np.arange(6)
    second = first + (1 if interleave else 6)
    want = key.copy()
    want[..., first] = key[..., first] * cos - key[..., second] * sin
    want[..., second] = key[..., second] * cos + key[..., first] * sin
    got = pages.get()
    for row, (page, slot) in enumerate([(2, 0), (1, 1), (3, 2)]):
        # one product is rounded here, two in NumPy: of numbers below 4
        np.testing.assert_allclose(got[page, 0, :, slot], want[row], rtol=0, atol=5e-7)
        np.testing.assert_array_equal(got[page, 1, :, slot], value[row])


def test_rotated_keys_are_encoded_as_a_rotation_before_would(xp: Any) -> None:
    rng = np.random.default_rng(2)
    key = normal(rng, 2, 1, 64)
    table = nk.rope_cos_sin_cache(8, 64, theta=1e4)
    row_length = nk.kv_format("q8_0").row_length(64)
    rotated = xp.zeros((1, 2, 1, 8, 64), np.float32)
    encoded, wanted = (xp.zeros((1, 2, 1, 8, row_length), np.uint8) for _ in "ab")
    places = (ints(0, 0), ints(3, 5))

    def append(rows: Any, pages: Any, kind: int, **options: Any) -> None:
        kernels.append_paged_kv_cache(
            rows, xp.asarray(key), *places, pages[:, 0], pages[:, 1], ints(0), ints(0, 1), "HND",
            (kind, kind), **options,
        )  # fmt: skip

    append(xp.asarray(key), rotated, F32, cos_sin=xp.asarray(table))
    append(xp.asarray(key), encoded, KINDS["q8_0"], cos_sin=xp.asarray(table))
    rows = np.ascontiguousarray(rotated.get()[0, 0, 0, [3, 5]])[:, None]
    append(xp.asarray(rows), wanted, KINDS["q8_0"])
    np.testing.assert_array_equal(encoded.get(), wanted.get())


def test_rows_without_a_place_in_a_table_on_the_device_are_left_out(xp: Any) -> None:
    row = xp.asarray(np.ones((5, 1, 4), np.float32))
    pages = xp.zeros((2, 2, 1, 4, 4), np.float32)
    device = [
        xp.asarray(ints(*numbers))
        for numbers in ((0, 1, -1, 0, 0), (1, 0, 0, 4, -3), (1, 7), (0, 2), (2,))
    ]
    nk.append_paged_kv_cache(row, row, *device[:2], pages, *device[2:], "HND")
    written = np.argwhere(pages.get()[..., 0])
    # request 0 at 1: page 1; at 4: entry 1 is page 7, which there is not
    np.testing.assert_array_equal(written, [[1, 0, 0, 1], [1, 1, 0, 1]])
