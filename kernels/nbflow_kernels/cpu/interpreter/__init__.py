"""Interpreter mode: CPU kernels as plain Python, one line at a time.

With ``NUMBA_DISABLE_JIT=1`` in the environment, every kernel stays a Python function: a debugger
steps through it and ``print`` shows variables.  The vector functions of the toolkit have no Python
form: each is an `@intrinsic` that emits LLVM instructions.  The modules of this folder hold their
*fallbacks*, NumPy functions of the same name and meaning, which `intrinsic` returns when compiling
is off.

A vector is a NumPy array, an address an integer, memory is read and written through `ctypes`:

=========================  ===========================================================
in a compiled kernel       in Python
=========================  ===========================================================
`simd.f32x16`              array of float32, shape (16,)
`simd.i32x16`              array of int32, shape (16,)
`simd.i8x64`               array of uint8, shape (64,); operations say if it is signed
`simd_compare.f64x16`      array of float64, shape (16,)
`Int8Tile`                 array of float32 or int32, shape (rows, tokens, 16)
`FloatTile`                array of float32, shape (tokens, groups, 16)
=========================  ===========================================================

Vectors are values: what a load returns cannot be written to.  A fallback gives the bits of the
machine code, including the single rounding of `simd.fma`.  Three exceptions: AVX-512 BF16
instructions flush denormal numbers to zero, the fallbacks do not; of +0 and -0 `maximum` and
`minimum` may return either; and `to_i32` of a float that does not fit an int32 is undefined.

Scalar arithmetic follows Python and NumPy: a float32 times a Python float stays float32, where
compiled code continues in float64.  So a kernel's result may differ in its last bits, as between
two compilers, within the tolerances of the tests.  Integers from arrays become Python integers,
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

numba_config: Any = config  # attributes made at run time, unseen by type checkers


def is_on() -> bool:
    """Return whether kernels run as plain Python; decided when Numba is imported."""
    return bool(numba_config.DISABLE_JIT)


FALLBACKS: dict[str, str] = {}
"""Module with intrinsics to the module with their fallbacks."""


def intrinsic(function: Callable[..., Any] | None = None, *, fallback: str, **options: Any) -> Any:
    """Make a Numba intrinsic, or return its fallback when compiling is off.

    The fallback is the function of the same name in the module `fallback`: the name of a module of
    this folder, or a full module name.
    """
    if function is None:
        return lambda later: intrinsic(later, fallback=fallback, **options)
    FALLBACKS[function.__module__] = fallback if "." in fallback else f"{__name__}.{fallback}"
    if not is_on():
        make: Any = extending.intrinsic
        return make(**options)(function) if options else make(function)
    module = importlib.import_module(FALLBACKS[function.__module__])
    return getattr(module, function.__name__.lstrip("_"))


class _Array(np.ndarray):
    """Array argument of a kernel whose integer elements are Python integers.

    Compiled code computes with 64-bit integers whatever the array's type; NumPy would compute in
    its 8 to 32 bits.
    """

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return value if isinstance(value, np.ndarray) else int(value)


def _argument(value):
    if isinstance(value, np.ndarray):
        return value.view(_Array) if value.dtype.kind in "iu" and value.itemsize < 8 else value
    return tuple(_argument(item) for item in value) if type(value) is tuple else value


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that runs in Python with the arithmetic of compiled code.

    Divisions by zero and overflows give infinities and NaN without warnings.
    """

    @functools.wraps(function)
    def run(*args):
        with np.errstate(all="ignore"):
            return function(*(_argument(arg) for arg in args))

    return run
