"""CUDA driver API through ctypes: loading and launching kernels."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from nbflow_kernels.cuda.detect import LIBRARY
from nbflow_kernels.cuda.errors import CudaError

# cuda.h
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
MULTIPROCESSOR_COUNT = 16
MAX_SHARED_BYTES_OPT_IN = 97
_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_END, _BUFFER, _BUFFER_BYTES = 0, 1, 2  # CU_LAUNCH_PARAM_*
_INVALID_CONTEXT = 201
# CUlaunchConfig: grid, block, shared memory, stream, attributes (none) and their number.  ctypes
# passes cuLaunchKernelEx's four pointers in a quarter of the time of cuLaunchKernel's arguments.
_CONFIG = struct.Struct("@7IPPI4x")

# The default limit is 48 KB minus the static size, so every kernel raises it.
_DEFAULT_SHARED_BYTES = 0


class Function:
    """Loaded kernel, its current limit of dynamic shared memory, and buffers for its launches."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.shared_bytes = _DEFAULT_SHARED_BYTES
        self.lock = threading.Lock()
        self.free: list[_LaunchBuffers] = []
        """Buffers that no thread uses; taking and returning one is atomic."""


class _LaunchBuffers:
    """Configuration and packed arguments of a launch, as ``cuLaunchKernelEx`` takes them.

    The driver copies both, so that they are free after the call.
    """

    def __init__(self, n_bytes: int) -> None:
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.arguments = ctypes.create_string_buffer(max(n_bytes, 1))
        self._n_bytes = ctypes.c_size_t(n_bytes)
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self.arguments), _BUFFER_BYTES,
            ctypes.addressof(self._n_bytes), _END,
        )  # fmt: skip
        self.addresses = ctypes.addressof(self.config), ctypes.addressof(self._extra)


class Driver:
    """Device in its primary context, as used by CuPy and the CUDA runtime.

    Parameters
    ----------
    ordinal : int
        Number of the device.
    library : str or loaded library
        The driver.

    Raises
    ------
    CudaError
        If the driver reports one.
    """

    def __init__(self, ordinal: int, library: Any = LIBRARY) -> None:
        self._library = ctypes.CDLL(library) if isinstance(library, str) else library
        self._launch = self._library.cuLaunchKernelEx
        self._launch.argtypes = [ctypes.c_void_p] * 4
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, (major, minor)."""
        return self.attribute(CAPABILITY_MAJOR), self.attribute(CAPABILITY_MINOR)

    def attribute(self, number: int) -> int:
        """Return an attribute of the device, by its number in cuda.h."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def load(self, code: bytes, entry: str) -> Function:
        """Load a cubin, or PTX, and return one of its kernels.  It stays loaded."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        assert function.value is not None
        return Function(function.value)

    def launch(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        packed: bytes,
        shared: int,
        stream: int,
    ) -> None:
        """Start a kernel on a stream; `packed` holds the arguments as a C struct would."""
        if shared > function.shared_bytes:
            with function.lock:  # the attribute only grows, also with launches in other threads
                if shared > function.shared_bytes:
                    self._call("cuCtxSetCurrent", self._context)
                    handle = ctypes.c_void_p(function.handle)
                    self._call("cuFuncSetAttribute", handle, _DYNAMIC_SHARED_BYTES, shared)
                    function.shared_bytes = shared
        try:
            buffers = function.free.pop()
        except IndexError:
            buffers = _LaunchBuffers(len(packed))
        _CONFIG.pack_into(buffers.config, 0, *grid, *block, shared, stream, 0, 0)
        buffers.arguments.raw = packed
        config, extra = buffers.addresses
        code = self._launch(config, function.handle, None, extra)
        if code == _INVALID_CONTEXT:  # this thread has made no call of the CUDA runtime yet
            self._call("cuCtxSetCurrent", self._context)
            code = self._launch(config, function.handle, None, extra)
        function.free.append(buffers)
        if code:
            raise CudaError(self._message("cuLaunchKernelEx", code))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise CudaError(self._message(name, code))

    def _message(self, call: str, code: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{call}: error {code} ({(text.value or b'unknown').decode()})"
