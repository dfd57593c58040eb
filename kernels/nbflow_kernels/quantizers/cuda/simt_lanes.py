"""Operations of `simd` and `simd_compare` on one lane of a vector, in a CUDA kernel.

A mask is -1 or 0.  Importing it needs numba-cuda.
"""

from __future__ import annotations

import numpy as np
from numba.cuda import libdevice

from nbflow_kernels.cuda.numba_conversions import device, half, load_number, narrow, store_number


@device
def splat(x):
    """Return a float32."""
    return np.float32(x)


@device
def splat_i32(i):
    """Return an int32."""
    return np.int32(i)


@device
def add(a, b):
    """Return a + b."""
    return a + b


@device
def sub(a, b):
    """Return a - b."""
    return a - b


@device
def mul(a, b):
    """Return a * b."""
    return a * b


@device
def div(a, b):
    """Return a / b."""
    return libdevice.fdiv_rn(a, b)


@device
def and_(a, b):
    """Return a & b."""
    return np.int32(a & b)


@device
def or_(a, b):
    """Return a | b."""
    return np.int32(a | b)


@device
def less(a, b):
    """Return the mask of a < b."""
    return np.int32(-1) if a < b else np.int32(0)


@device
def differs(a, b):
    """Return the mask of a != b."""
    return np.int32(-1) if a != b else np.int32(0)


@device
def choose(mask, yes, no):
    """Return `yes` where the mask is true."""
    return yes if mask != 0 else no


@device
def any_lane(mask):
    """Return whether the mask is true here: what others do makes no difference."""
    return mask != 0


@device
def absolute(x):
    """Return |x|."""
    return libdevice.fabsf(x)


@device
def sqrt(x):
    """Return the square root."""
    return libdevice.fsqrt_rn(x)


@device
def rint(x):
    """Return the nearest whole number, halves to even."""
    return libdevice.rintf(x)


@device
def smaller(a, b):
    """Return the smaller int32."""
    return a if a < b else b


@device
def larger(a, b):
    """Return the larger int32."""
    return a if a > b else b


@device
def to_f32(i):
    """Return an int32 as float32."""
    return np.float32(i)


@device
def as_i32(x):
    """Return the bits of a float32."""
    return libdevice.float_as_int(x)


@device
def load_f32(at):
    """Return the float32 at an address."""
    return libdevice.int_as_float(load_number(at))


@device
def store_f32(at, x):
    """Write a float32 to an address."""
    store_number(at, libdevice.float_as_int(x))


@device
def load_f16(at):
    """Return the float16 in the low half of the number at an address."""
    return half(load_number(at) & 0xFFFF)


@device
def store_f16(at, x):
    """Write a float16 to the low half of the number at an address."""
    store_number(at, np.int32(narrow(x)))
