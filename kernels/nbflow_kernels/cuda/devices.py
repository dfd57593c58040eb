"""Devices: CuPy's through the CUDA driver, and devices that array types provide."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from nbflow_kernels.cuda import driver
from nbflow_kernels.errors import MissingExtraError, UsageError, install_command

Dim3 = tuple[int, int, int]
Launch = Callable[[Dim3, Dim3, bytes, int], None]
"""A loaded kernel: ``(grid, thread block, packed arguments, bytes of dynamic shared memory)``."""

LOWEST_ARCH = 80


class KernelDevice(Protocol):
    """Device interface; an array type may provide its own as ``__kernel_device__``."""

    arch: str
    """Compilation target, e.g. ``sm_90``."""
    output: str
    """Format that `load` takes: ``cubin`` or ``ptx``."""
    key: tuple[Any, ...]
    """Key of loaded kernels; equal for devices that share them."""
    n_sms: int
    """Number of streaming multiprocessors."""
    max_shared_bytes: int
    """Maximum shared memory of a thread block in bytes."""
    constants: dict[Any, Any]
    """Tables that families keep on the device; keys begin with the family's name."""

    @property
    def stream(self) -> int:
        """Return a key of the current stream; see `workspace`."""
        ...

    @property
    def is_capturing(self) -> bool:
        """Return whether launches on the current stream become a graph."""
        ...

    def load(self, code: bytes, entry: str) -> Launch:
        """Return the kernel `entry` of compiled code."""
        ...

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return a new array on the device."""
        ...

    def mapped(self, shape: Any, dtype: Any, values: np.ndarray | None = None) -> Any:
        """Return an array of zeros, or of `values`, in pinned memory of the host.

        Kernels use it as they use their device's memory, over the bus.

        Raises
        ------
        MemoryError
            If the host has no such memory left.
        """
        ...

    def asarray(self, array: Any) -> Any:
        """Return the contents of a NumPy array as an array on the device."""
        ...

    def synchronize(self) -> None:
        """Synchronize the current stream."""
        ...


def device_of(array: Any) -> KernelDevice:
    """Return the device of an array.

    Raises
    ------
    MissingExtraError
        If the array is not CuPy's and brings no device, and CuPy is missing.
    UsageError
        If the array is on another device than CuPy's current one.
    """
    own: KernelDevice | None = getattr(type(array), "__kernel_device__", None)
    if own is not None:
        return own
    cupy = _cupy()
    current = cupy.cuda.runtime.getDevice()
    if isinstance(array, cupy.ndarray) and array.data.device_id != current:
        raise UsageError(
            f"the array is on device {array.data.device_id}, the current device is {current}; "
            f"launch inside `with cupy.cuda.Device({array.data.device_id}):`"
        )
    return _cupy_device(current)


def to_device(array: Any, like: Any = None) -> Any:
    """Return the contents of a NumPy array as an array on a device.

    Parameters
    ----------
    array : NumPy array
        What to copy.
    like : array on a device, optional
        Whose device; CuPy's current one by default.
    """
    device = device_of(like) if like is not None else _cupy_device(_cupy().cuda.runtime.getDevice())
    return device.asarray(array)


def to_host(array: Any) -> np.ndarray:
    """Return the contents of an array on the host or a device as a NumPy array."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "get"):  # CuPy's
        return np.asarray(array.get())
    return np.asarray(_cupy().asnumpy(_cupy().asarray(array)))


def address(array: Any) -> int:
    """Return the device address of an array's first element.

    The 16-byte loads of a kernel want ``address(x) % 16 == 0``; views need not start there.

    Raises
    ------
    TypeError
        If it is in host memory.
    """
    if type(array) is np.ndarray:
        raise TypeError(
            "the first array is on a CUDA device, another one in host memory; copy it to the "
            f"device (cupy.asarray): NumPy array of shape {array.shape}"
        )
    data = getattr(array, "data", None)
    found = getattr(data, "ptr", None)  # CuPy's; faster than the interface
    return int(array.__cuda_array_interface__["data"][0] if found is None else found)


@functools.cache
def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as e:
        from nbflow_kernels.cuda.detect import detect, extra

        name = extra(detect().driver_version)
        raise MissingExtraError(
            f"arrays on a CUDA device need CuPy: {install_command(name)}"
        ) from e


@functools.cache
def _cupy_device(ordinal: int) -> CupyDevice:
    return CupyDevice(ordinal)


class CupyDevice:
    """CUDA device with CuPy's arrays and streams.

    Parameters
    ----------
    ordinal : int
        CuPy's number of the device.
    """

    output = "cubin"

    def __init__(self, ordinal: int) -> None:
        self._cupy, self._ordinal = _cupy(), ordinal
        self._driver = driver.Driver(ordinal)
        major, minor = self._driver.capability
        if 10 * major + minor < LOWEST_ARCH:
            raise UsageError(
                f"device {ordinal} has compute capability {major}.{minor}; kernels need 8.0 or more"
            )
        self.arch = f"sm_{major}{minor}"
        self.key = ("cuda", ordinal)
        self.constants: dict[Any, Any] = {}
        self.n_sms = self._driver.attribute(driver.MULTIPROCESSOR_COUNT)
        self.max_shared_bytes = self._driver.attribute(driver.MAX_SHARED_BYTES_OPT_IN)

    @property
    def stream(self) -> int:
        """See `KernelDevice.stream`."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    @property
    def is_capturing(self) -> bool:
        """See `KernelDevice.is_capturing`."""
        stream = self._cupy.cuda.get_current_stream()
        return bool(stream.ptr and stream.is_capturing())  # the null stream cannot be captured

    def load(self, code: bytes, entry: str) -> Launch:
        """See `KernelDevice.load`; the kernel runs on CuPy's current stream."""
        function = self._driver.load(code, entry)
        stream = self._cupy.cuda.get_current_stream
        start = self._driver.launch

        def launch(grid: Dim3, block: Dim3, packed: bytes, shared: int) -> None:
            start(function, grid, block, packed, shared, stream().ptr)

        return launch

    def empty(self, shape: Any, dtype: Any) -> Any:
        """See `KernelDevice.empty`."""
        return self._cupy.empty(shape, dtype)

    def mapped(self, shape: Any, dtype: Any, values: np.ndarray | None = None) -> Any:
        """See `KernelDevice.mapped`.

        Memory of ``cudaHostAlloc`` has one address on both sides (unified addressing), so that an
        array may point there.  Each is allocated by itself: CuPy's pool rounds up to powers of two.
        """
        cupy, n_bytes = self._cupy, math.prod(shape) * np.dtype(dtype).itemsize
        if not n_bytes:
            return cupy.empty(shape, dtype)
        try:
            memory = cupy.cuda.PinnedMemory(n_bytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{n_bytes:,} bytes of pinned memory: {error}") from error
        pointer = cupy.cuda.PinnedMemoryPointer(memory, 0)
        here = np.frombuffer(pointer, dtype, math.prod(shape)).reshape(shape)
        here[...] = 0 if values is None else values
        held = cupy.cuda.UnownedMemory(memory.ptr, n_bytes, memory, self._ordinal)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(held, 0))

    def asarray(self, array: Any) -> Any:
        """See `KernelDevice.asarray`."""
        return self._cupy.asarray(array)

    def synchronize(self) -> None:
        """See `KernelDevice.synchronize`."""
        self._cupy.cuda.get_current_stream().synchronize()
