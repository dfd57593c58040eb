"""Number formats of the state: float32, float16, or the bits of bfloat16 as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np

F32, F16, BF16 = range(3)
KINDS = {"float32": F32, "float16": F16, "uint16": BF16}
"""Name of the dtype to the code that kernels take."""
DTYPES = tuple(np.dtype(name) for name in KINDS)


def to_floats(state: Any) -> Any:
    """Return stored numbers as floats."""
    if state.dtype != np.uint16:
        return state
    return (state.astype(np.uint32) << 16).view(np.float32)


def to_state(values: Any, dtype: Any) -> Any:
    """Return floats in the dtype of a state; bfloat16 is rounded to nearest, halves to even."""
    if np.dtype(dtype) != np.uint16:
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
