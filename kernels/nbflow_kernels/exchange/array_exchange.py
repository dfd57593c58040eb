"""Zero-copy exchange of arrays with other libraries: DLPack and the CUDA array interface.

`native` makes a NumPy array, or a CuPy array on a CUDA device, of a tensor of PyTorch, JAX, Numba
or any library with one of the protocols; `exported` goes back.  bfloat16 and float8, which NumPy
lacks, are held as the uint16 and uint8 arrays of their bits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np

from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.float8 import FLOAT8_NAMES

_HOST = (1, 3, 11)  # DLPack's kDLCPU, kDLCUDAHost, kDLROCMHost
_BITS = {"bfloat16": "uint16", **dict.fromkeys(FLOAT8_NAMES, "uint8")}
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def is_array(value: object) -> bool:
    """Return True for arrays: NumPy's, and those with DLPack or the CUDA array interface."""
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or is_cuda(value)


def is_native(array: object) -> bool:
    """Return True for the arrays that kernels take: NumPy's, CuPy's and those of the emulator."""
    if isinstance(array, np.ndarray) or hasattr(type(array), "__kernel_device__"):
        return True
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype without the library's: ``float32``, ``bfloat16``."""
    return _name_of(array.dtype) if hasattr(array, "dtype") else ""


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def native(name: str, array: Any) -> Any:
    """Return a NumPy or CuPy array that shares the memory of an array of any library.

    Parameters
    ----------
    name : str
        Name of the parameter, for the message.
    array : array
        An array in host memory or on a CUDA device.

    Returns
    -------
    array
        `array` itself if it is NumPy's or CuPy's; bfloat16 as uint16, float8 of others as uint8.

    Raises
    ------
    UsageError
        If the library refuses (PyTorch: tensors that require gradients), or the array is on a
        device of another kind.
    """
    bits = _BITS.get(dtype_name(array))
    if is_native(array):
        return array.view(np.uint16) if bits == "uint16" else array
    if getattr(array, "requires_grad", False):
        if _namespace(array).is_grad_enabled():
            raise UsageError(
                f"{name} requires gradients, which this function does not compute; pass "
                f"{name}.detach(), call it within torch.no_grad(), or use nbflow_kernels.torch"
            )
        array = array.detach()
    try:
        if bits:
            array = array.view(getattr(_namespace(array), bits))
        return _imported(name, array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{name}, of type {type(array).__name__}, cannot be read without a copy: {error}"
        ) from error


def _imported(name: str, array: Any) -> Any:
    """Return the array that DLPack, or else the CUDA array interface, gives."""
    if not hasattr(array, "__dlpack__"):
        return _cupy(name).asarray(array)
    device = int(array.__dlpack_device__()[0])
    if device in _HOST:
        return np.from_dlpack(array)
    if device not in _CUDA:
        raise UsageError(
            f"{name} must be in host memory or on a CUDA device, got an array on a device of "
            f"DLPack's type {device}; copy it to the host"
        )
    return _cupy(name).from_dlpack(array)


def _cupy(name: str) -> Any:
    """Return CuPy, which holds arrays of other libraries on devices."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        from nbflow_kernels.cuda.detect import detect, extra
        from nbflow_kernels.errors import MissingExtraError, install_command

        raise MissingExtraError(
            f"{name} is on a CUDA device, which needs CuPy: "
            f"{install_command(extra(detect().driver_version))}"
        ) from error


def _namespace(array: Any) -> Any:
    """Return the module with the functions of an array's library."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules.get(type(array).__module__.partition(".")[0])


def exported(array: Any, like: Any, *, bfloat16: bool = False, float8: str = "") -> Any:
    """Return a native array as an array of the library of `like`, with the same memory.

    Parameters
    ----------
    array : NumPy or CuPy array
        A result.
    like : array
        An argument of the caller.  NumPy's and CuPy's arrays, and those of a library that imports
        no arrays, get the result as it is.
    bfloat16 : bool
        `array` holds bits of bfloat16.
    float8 : str
        `array` holds codes of this float8 format: uint8, unless the library has a dtype for them.
    """
    namespace = _namespace(like)
    if not is_native(like):
        if hasattr(namespace, "from_dlpack"):
            array = namespace.from_dlpack(array)
        elif is_cuda(like) and getattr(namespace, "__name__", "") == "numba":
            array = importlib.import_module("numba.cuda").as_cuda_array(array)
    if float8:
        name = next(name for name, format in FLOAT8_NAMES.items() if format == float8)
        dtype = None if is_native(like) else getattr(namespace, name, None)
        return array if dtype is None else array.view(dtype)
    if not bfloat16:
        return array
    return array.view(like.dtype if dtype_name(like) == "bfloat16" else namespace.bfloat16)
