"""Masks as bits beyond their cases: wrong arguments, and the order attention reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from paged_sequences import ints

import nbflow_kernels as nk
from nbflow_kernels.errors import UsageError

TRUE = np.ones(9, bool)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nk.packbits(TRUE, "small"), UsageError, "unknown bitorder 'small'.*big, little"),
        (
            lambda: nk.packbits(TRUE.astype(np.float32)),
            TypeError,
            "x must have dtype bool or uint8",
        ),
        (lambda: nk.packbits(TRUE.reshape(3, 3)), UsageError, r"x must have shape \(any\)"),
        (lambda: nk.segment_packbits(TRUE, ints(0, 8)), UsageError, "length of x, 9, got 8"),
        (lambda: nk.segment_packbits(TRUE, ints(0, 8, 7, 9)), UsageError, "never fall"),
        (lambda: nk.segment_packbits(TRUE, ints()), UsageError, "must start at 0"),
        (
            lambda: nk.convert_bsr_mask_layout(TRUE.reshape(1, 3, 3), ints(0, 2)),
            UsageError,
            "number of blocks, 1, got 2",
        ),
    ],
)
def test_wrong_arguments_are_named(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


def test_the_orders_are_each_others_mirror(rng: np.random.Generator) -> None:
    x = rng.random(64) < 0.5
    big, little = nk.packbits(x), nk.packbits(x, bitorder="little")
    assert not np.array_equal(big, little)
    np.testing.assert_array_equal(nk.packbits(x.reshape(8, 8)[:, ::-1].ravel()), little)
