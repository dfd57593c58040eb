"""Operations of `simd` and `quantizers.simd_panel` on one lane of a vector, in a CUDA kernel.

A mask is -1 or 0.  Importing it needs numba-cuda.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cuda import libdevice

from nbflow_kernels.cuda.numba_conversions import device, half, load_number, narrow, store_number


@device
def splat(x):  # type: ignore[no-untyped-def]
    """Return a float32."""
    return np.float32(x)


@device
def splat_i32(i):  # type: ignore[no-untyped-def]
    """Return an int32."""
    return np.int32(i)


@device
def add(a, b):  # type: ignore[no-untyped-def]
    """Return a + b."""
    return a + b


@device
def sub(a, b):  # type: ignore[no-untyped-def]
    """Return a - b."""
    return a - b


@device
def mul(a, b):  # type: ignore[no-untyped-def]
    """Return a * b."""
    return a * b


@device
def div(a, b):  # type: ignore[no-untyped-def]
    """Return a / b."""
    return libdevice.fdiv_rn(a, b)


@device
def and_(a, b):  # type: ignore[no-untyped-def]
    """Return a & b."""
    return np.int32(a & b)


@device
def or_(a, b):  # type: ignore[no-untyped-def]
    """Return a | b."""
    return np.int32(a | b)


@device
def less(a, b):  # type: ignore[no-untyped-def]
    """Return the mask of a < b."""
    return np.int32(-1) if a < b else np.int32(0)


@device
def differs(a, b):  # type: ignore[no-untyped-def]
    """Return the mask of a != b."""
    return np.int32(-1) if a != b else np.int32(0)


@device
def choose(mask, yes, no):  # type: ignore[no-untyped-def]
    """Return `yes` where the mask is true."""
    return yes if mask != 0 else no


@device
def any_lane(mask):  # type: ignore[no-untyped-def]
    """Return whether the mask is true here: what others do makes no difference."""
    return mask != 0


@device
def absolute(x):  # type: ignore[no-untyped-def]
    """Return |x|."""
    return libdevice.fabsf(x)


@device
def sqrt(x):  # type: ignore[no-untyped-def]
    """Return the square root."""
    return libdevice.fsqrt_rn(x)


@device
def rint(x):  # type: ignore[no-untyped-def]
    """Return the nearest whole number, halves to even."""
    return libdevice.rintf(x)


@device
def smaller(a, b):  # type: ignore[no-untyped-def]
    """Return the smaller int32."""
    return a if a < b else b


@device
def larger(a, b):  # type: ignore[no-untyped-def]
    """Return the larger int32."""
    return a if a > b else b


@device
def to_f32(i):  # type: ignore[no-untyped-def]
    """Return an int32 as float32."""
    return np.float32(i)


@device
def as_i32(x):  # type: ignore[no-untyped-def]
    """Return the bits of a float32."""
    return libdevice.float_as_int(x)


@device
def load_f32(at: Any):  # type: ignore[no-untyped-def]
    """Return the float32 at an address."""
    return libdevice.int_as_float(load_number(at))


@device
def store_f32(at: Any, x: Any):  # type: ignore[no-untyped-def]
    """Write a float32 to an address."""
    store_number(at, libdevice.float_as_int(x))


@device
def load_f16(at: Any):  # type: ignore[no-untyped-def]
    """Return the float16 in the low half of the number at an address."""
    return half(load_number(at) & 0xFFFF)


@device
def store_f16(at: Any, x: Any):  # type: ignore[no-untyped-def]
    """Write a float16 to the low half of the number at an address."""
    store_number(at, np.int32(narrow(x)))
