"""Running the CPU kernels as plain Python, one line at a time.

With ``NUMBA_DISABLE_JIT=1`` in the environment, Numba leaves every kernel the Python function it
is, so that a debugger steps through it and ``print`` shows what a variable holds.  The vector
functions of the toolkit have no Python form of their own: each is an `@intrinsic` that emits LLVM
instructions.  The modules of this folder hold their *twins*, NumPy functions of the same name and
meaning, and `intrinsic` puts the twin in the place of the intrinsic when compiling is off.

A vector is a NumPy array, an address an integer, memory is read and written through `ctypes`:

=========================  ===========================================================
in a compiled kernel       in Python
=========================  ===========================================================
`simd.f32x16`              array of float32, shape (16,)
`simd.i32x16`              array of int32, shape (16,)
`simd.i8x64`               array of uint8, shape (64,); operations say if it is signed
`sampling.vectors.f64x16`  array of float64, shape (16,)
`simd_tiles.Tile`          array of float32 or int32, shape (rows, tokens, 16)
`registers.Tile`           array of float32, shape (tokens, groups, 16)
=========================  ===========================================================

Vectors are values: what a load returns cannot be written to.  A twin gives the same bits as the
machine code, `simd.fma` with its one rounding included.  Three exceptions: with AVX-512 BF16 what
rounds to bfloat16 and multiplies it takes denormal numbers for zero, which the twins do not; of +0
and -0 `maximum` and `minimum` may return either; and a float that does not fit an int32 has no
defined result of `to_i32`.

Scalar arithmetic follows Python and NumPy: a float32 times a Python float stays float32, where
compiled code goes on in float64.  So a kernel's result may differ in its last bits, as between two
compilers; the tolerances of the tests hold.  Integers from arrays are Python integers in kernels,
which do not overflow.

The folder's modules can also be used with compiling on, to look at a single operation:

>>> import numpy as np
>>> from nbflow_kernels.cpu.interpreter import simd
>>> x = np.arange(16, dtype=np.float32)
>>> simd.sum(simd.mul(simd.load_f32(x.ctypes.data), simd.splat(2.0)))
np.float32(240.0)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import config, extending

numba_config: Any = config  # its settings are made at run time, unseen by type checkers


def is_on() -> bool:
    """Return whether kernels run as plain Python; decided when Numba is imported."""
    return bool(numba_config.DISABLE_JIT)


FALLBACKS: dict[str, str] = {}
"""Module with intrinsics to the module that holds their twins."""


def intrinsic(function: Callable[..., Any] | None = None, *, fallback: str, **options: Any) -> Any:
    """Make an intrinsic, as `numba.extending.intrinsic` does, or return its twin.

    The twin is the function of the same name in `fallback`: a module of this folder, or with dots
    the full name of one that lies next to the intrinsics.
    """
    if function is None:
        return lambda later: intrinsic(later, fallback=fallback, **options)
    FALLBACKS[function.__module__] = fallback if "." in fallback else f"{__name__}.{fallback}"
    if not is_on():
        make: Any = extending.intrinsic
        return make(**options)(function) if options else make(function)
    twins = importlib.import_module(FALLBACKS[function.__module__])
    return getattr(twins, function.__name__.lstrip("_"))


class _Array(np.ndarray):
    """An argument of a kernel: its integers come out as Python's, as they do not overflow.

    Compiled code computes with 64-bit integers whatever the array holds; NumPy would go on in the
    array's 8 to 32 bits.
    """

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return value if isinstance(value, np.ndarray) else int(value)


def _argument(value):
    if isinstance(value, np.ndarray):
        return value.view(_Array) if value.dtype.kind in "iu" and value.itemsize < 8 else value
    return tuple(_argument(item) for item in value) if type(value) is tuple else value


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that runs in Python by the rules of compiled code for numbers.

    Divisions by zero and overflows give infinities and NaN in silence.
    """

    @functools.wraps(function)
    def run(*args):
        with np.errstate(all="ignore"):
            return function(*(_argument(arg) for arg in args))

    return run
