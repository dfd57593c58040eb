"""Checks of options of the key/value cache in an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import nbflow


def error(found: Any, expected: Any) -> float:
    """Return the largest error, relative to the largest number."""
    return float(np.abs(np.subtract(found, expected)).max() / np.abs(expected).max())


def check_partition(checkpoint: Path, ids: list[int], partition: str, **options: Any) -> None:
    """Compare a partition, with a q8_0 cache, with one rank."""
    with nbflow.load(checkpoint, kv="q8_0", **options) as model:
        expected = model.logits(ids)
    with nbflow.load(checkpoint, kv="q8_0", partition=partition, **options) as model:
        found = model.logits(ids)
    if partition == "0;1":
        np.testing.assert_array_equal(found, expected)
    # by tensor the sums of a layer round differently, and a code of 8 bits may fall to either side
    assert error(found, expected) < 5e-3


def check_prompt_in_pieces(checkpoint: Path, ids: list[int], **options: Any) -> None:
    """Compare the bits of a prompt in steps of 7 tokens, with a q4_0 cache, with those of one."""
    with nbflow.load(checkpoint, kv="q4_0", **options) as model:
        expected = model.logits(ids)
    with nbflow.load(checkpoint, kv="q4_0", max_step_tokens=7, **options) as model:
        np.testing.assert_array_equal(model.logits(ids), expected)
