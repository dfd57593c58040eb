"""Scalar forms of operations of `simd` and `simd_compare` for one CUDA lane.

`simt_adapter` lists those that are built-in functions.  A mask is -1 or 0.  Needs numba-cuda.
"""

from __future__ import annotations

import numpy as np
from numba.cuda import libdevice

from nbflow_kernels.cuda.numba_conversions import device, half, load_number, narrow, store_number


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
    """Return True if the mask is true in this lane."""
    return mask != 0


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
