"""Storage formats of recurrent states: float32, float16, bfloat16 and q8_0.

The dtype of a state array says its format: float32, float16, uint16 (bits of bfloat16), or uint8
(q8_0).  Kernels compute in float32 and round the state after each step or chunk of tokens.

q8_0 stores the last axis of a state, n numbers, in ``n + 2 * ceil(n / 32)`` bytes: blocks of 32
numbers, the last maybe of fewer:

=========  ===================================================================
bytes      of a block of m numbers
=========  ===================================================================
0-1        scale d, float16: the greatest magnitude / 127
2-(m + 1)  int8 codes: number / d to the nearest integer, halves to even
=========  ===================================================================

Full blocks are those of GGUF's q8_0.  Codes are relative to the rounded scale, so that rounding a
state again and again has no bias.  A block with NaN or infinity becomes NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array
from nbflow_kernels.errors import UsageError, unknown_name

F32, F16, BF16, Q8_0 = range(4)
BLOCK = 32
"""Numbers of a q8_0 block."""
KINDS = {"float32": F32, "float16": F16, "uint16": BF16, "uint8": Q8_0}
"""Name of the dtype to the code that kernels take."""
DTYPES = tuple(np.dtype(name) for name in KINDS)
STATE_FORMATS = dict(zip(("f32", "f16", "bf16", "q8_0"), DTYPES, strict=True))
"""dtype of the array of each format, by name."""
POINTERS = ("f32*", "f16*", "bf16*", "u8*")
"""Parameter types of CUDA kernels, by kind."""


def state_array_shape(shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
    """Return the shape of the array that stores states of a shape.

    Examples
    --------
    >>> state_array_shape((2, 40), np.uint8)
    (2, 44)
    """
    if np.dtype(dtype) != np.uint8:
        return shape
    return *shape[:-1], shape[-1] + 2 * -(-shape[-1] // BLOCK)


def state_dtype(format: str) -> np.dtype[Any]:
    """Return the dtype of a format, or raise `UsageError` with the known ones."""
    if format not in STATE_FORMATS:
        raise unknown_name("state", format, STATE_FORMATS)
    return STATE_FORMATS[format]


def state_bytes(shape: tuple[int, ...], format: str) -> int:
    """Return the bytes of a state of a shape in a format.

    Examples
    --------
    >>> state_bytes((4, 64), "f32"), state_bytes((4, 64), "q8_0")
    (1024, 272)
    """
    dtype = state_dtype(format)
    return int(np.prod(state_array_shape(shape, dtype))) * dtype.itemsize


def rounding_of(dtype: Any, largest: float) -> tuple[float, float]:
    """Return the largest relative and absolute distance of neighbours, below `largest`."""
    relative = {np.dtype(np.float16): 2.0**-10, np.dtype(np.uint16): 2.0**-7}
    if np.dtype(dtype) == np.uint8:
        return 2.0**-10, largest / 127.0  # the scale's neighbour; a code's
    return relative.get(np.dtype(dtype), 0.0), 0.0


def check_state(state: Any, shape: tuple[int | None, ...]) -> None:
    """Raise unless `state` has one of the dtypes and stores states of a shape."""
    if str(getattr(state, "dtype", "")) == "uint8":
        *outer, n = shape
        assert n is not None
        stored = *outer, state_array_shape((n,), np.uint8)[0]
        if state.ndim != len(stored) or state.shape[-1] != stored[-1]:
            raise UsageError(
                f"state must have rows of {stored[-1]} bytes ({n} numbers in q8_0, see "
                f"nbflow_kernels.state_format), got an array of shape {state.shape}"
            )
        shape = stored
    check_array("state", state, shape, DTYPES)


def decode_state(state: Any, n: int) -> Any:
    """Return a stored state as floats; its last axis has n numbers."""
    if state.dtype == np.uint16:
        return (state.astype(np.uint32) << 16).view(np.float32)
    if state.dtype != np.uint8:
        return state
    found = np.empty((*state.shape[:-1], n), np.float32)
    for i in range(0, n, BLOCK):
        at, m = i + 2 * (i // BLOCK), min(BLOCK, n - i)
        scale = np.ascontiguousarray(state[..., at : at + 2]).view(np.float16)
        codes = np.ascontiguousarray(state[..., at + 2 : at + 2 + m]).view(np.int8)
        found[..., i : i + m] = scale.astype(np.float32) * codes
    return found


def encode_state(values: Any, dtype: Any) -> Any:
    """Return floats in the format of a dtype; float64 stays as it is."""
    dtype = np.dtype(dtype)
    if dtype == np.uint16:
        bits = values.astype(np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
    if dtype != np.uint8:
        with np.errstate(over="ignore"):  # to infinity
            return values.astype(dtype)
    stored = np.empty(state_array_shape(values.shape, dtype), np.uint8)
    for i in range(0, values.shape[-1], BLOCK):
        block = values[..., i : i + BLOCK]
        at, m = i + 2 * (i // BLOCK), block.shape[-1]
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            scale = (np.abs(block).max(-1, keepdims=True) / 127.0).astype(np.float16)
            scale = np.where(np.isfinite(block).all(-1, keepdims=True), scale, np.float16(np.nan))
            codes = np.rint(block / scale.astype(values.dtype))
        codes = np.clip(np.where(scale > 0, codes, 0), -127, 127).astype(np.int8)
        stored[..., at : at + 2] = np.ascontiguousarray(scale).view(np.uint8)
        stored[..., at + 2 : at + 2 + m] = codes.view(np.uint8)
    return stored


def round_state(values: Any, dtype: Any) -> Any:
    """Return floats as they are read back after storing them."""
    if np.dtype(dtype) in (np.float32, np.float64):
        return values
    return decode_state(encode_state(values, dtype), values.shape[-1]).astype(values.dtype)
