"""CUDA toolkit: device detection, compilation of kernels, launches.

Use in a family's `cuda.py`::

    from nbflow_kernels import cuda

    # CUDA C++ from a file in the module's folder; `extern "C"` name, or a template instance
    _scale = cuda.cpp_kernel(__file__, "scale.cu", "scale", "f32* x, f32* out, i32 n, f32 factor")

    # or Numba; the same names and types, pointers are indexed like arrays
    @cuda.numba_kernel("f32* x, f32* out, i32 n, f32 factor")
    def _scale(x, out, n, factor):
        i = numba_cuda.grid(1)
        if i < n:
            out[i] = x[i] * factor


    def scale(x, factor, out):
        n = x.size
        _scale(cuda.ceil_div(n, 256), 256, (x, out, n, factor))

Nothing is compiled or imported before the first launch; this module needs no CUDA package.  A
kernel takes grid and thread block as an int or up to three, its arguments as a tuple, and
`shared=` bytes of dynamic shared memory (up to what the device has; more than 48 KB needs nothing
else).  Arguments are checked against the declaration: a pointer takes an array of its type
(``f32* x``; ``any* x`` takes every type, ``f32*? x`` also None, the null pointer), an ``i32`` an
integer that fits, never a silent int64.  Types: ``i8 u8 i16 u16 i32 u32 i64 u64 f16 bf16 f32 f64``;
arrays of bfloat16 hold their bits in uint16.

The array decides where a kernel runs.  A CuPy array: on its device and CuPy's current stream,
without synchronizing or allocating, so that launches can be captured into a CUDA graph once each
kernel has run (or was `Kernel.prepare`-d).  An array whose type has an attribute
``__kernel_device__`` brings its own device (`devices.KernelDevice`): the arrays of
`nbflow_ptx.cupy_stand_in` run on its emulator.  `device_of` returns it:
``device_of(x).empty(shape, dtype)`` allocates on the device of `x`; ``.n_sms`` is its number
of multiprocessors.

Compiled code is cached on disk (`cuda.cache`), next to Numba's, or read from a bundle of kernels
that were compiled elsewhere (`use_bundle`).  ``#include`` searches the source's
folder and the root of this package: ``#include "cuda/block_reduce.cuh"``.
"""

from __future__ import annotations

from nbflow_kernels.cuda.bundle import use as use_bundle
from nbflow_kernels.cuda.detect import Detected, detect
from nbflow_kernels.cuda.devices import KernelDevice, address, device_of, to_device, to_host
from nbflow_kernels.cuda.errors import CompileError, CudaError
from nbflow_kernels.cuda.kernel import Kernel, cpp_kernel, numba_kernel, record_launches

__all__ = [
    "CompileError",
    "CudaError",
    "Detected",
    "Kernel",
    "KernelDevice",
    "address",
    "ceil_div",
    "cpp_kernel",
    "detect",
    "device_of",
    "numba_kernel",
    "record_launches",
    "to_device",
    "to_host",
    "use_bundle",
]


def ceil_div(n: int, step: int) -> int:
    """Return n / step, rounded up.

    Examples
    --------
    >>> from nbflow_kernels.cuda import ceil_div
    >>> ceil_div(257, 256)
    2
    """
    return -(-n // step)
