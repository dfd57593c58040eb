"""Masks as bits in plain NumPy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np


def packbits(x: np.ndarray, bitorder: str = "big") -> np.ndarray:
    """See `nbflow_kernels.packbits`."""
    return np.packbits(x, bitorder=cast(Literal["big", "little"], bitorder))


def segment_packbits(
    x: np.ndarray, indptr: np.ndarray, bitorder: str = "big"
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.segment_packbits`."""
    parts: list[Any] = [packbits(x[a:b], bitorder) for a, b in pairwise(indptr)]
    lengths = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    return np.concatenate([np.zeros(0, np.uint8), *parts]), lengths


def convert_bsr_mask_layout(mask: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """See `nbflow_kernels.convert_bsr_mask_layout`."""
    rows = [mask[a:b].transpose(1, 0, 2).ravel() for a, b in pairwise(indptr)]
    return np.concatenate([np.zeros(0, bool), *rows])
