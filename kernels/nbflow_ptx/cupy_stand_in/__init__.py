"""A stand-in for the part of CuPy that launch code uses, on the emulator.

Launch code written for CuPy runs unchanged, ``import nbflow_ptx.cupy_stand_in as cupy`` or inside
``with installed():``, so that what the host does (grid, block, argument order and types, shared
memory) is tested with the kernel.  Arrays live in emulated device memory: use of a freed
one, or of an unwritten element of ``empty``, is reported.  CuPy's mathematics is left out.
"""

from __future__ import annotations

import ctypes
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from nbflow_ptx import nvrtc
from nbflow_ptx.checks import Checks
from nbflow_ptx.cupy_stand_in.kernel_device import EmulatedDevice, enqueue
from nbflow_ptx.cupy_stand_in.pools import MemoryPool, PinnedMemory, using_allocator
from nbflow_ptx.cupy_stand_in.state import Here
from nbflow_ptx.cupy_stand_in.state import State as _State
from nbflow_ptx.cupy_stand_in.streams import (
    Event,
    Graph,
    Stream,
    current_stream,
    not_while_capturing,
    perform,
)
from nbflow_ptx.emulator import Emulator, Result
from nbflow_ptx.errors import LaunchError
from nbflow_ptx.memory.device import GLOBAL_BASE, WRITTEN, Allocation, Device
from nbflow_ptx.threads.launch_layout import triple

__version__ = "0 (nbflow_ptx stand-in)"
_DEFAULT_SHARED = 48 * 1024  # more must be asked for, as on a GPU

float16, float32, float64 = np.float16, np.float32, np.float64
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
bool_, dtype = np.bool_, np.dtype


def reset(
    *,
    memory_bytes: int = 1 << 30,
    host_bytes: int = 1 << 28,
    checks: Checks | None = None,
    arch: str = "sm_80",
    exact_mma: bool = False,
    n_sms: int = 4,
) -> None:
    """Start with an empty device; arrays made before must no longer be used.

    `arch` decides on the shared memory of a thread block and on the rounding of tensor cores, which
    with `exact_mma` add exactly and round once.  Launchers see `n_sms` multiprocessors: few, so
    that loops over the grid are taken more than once.
    """
    _State.device, _State.arch = Device(memory_bytes, host_bytes), arch
    _State.exact_mma, _State.n_sms = exact_mma, n_sms
    _State.checks = checks or Checks()
    _State.last, _State.constants, _State.n_launches = None, {}, 0
    _State.here = Here()


def last_launch() -> Result | None:
    """Return the `Result` of the latest launch."""
    return _State.last


class _Pointer:
    """A device pointer."""

    def __init__(self, ptr: int, owner: ndarray) -> None:
        self.ptr, self._owner = ptr, owner

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Copy from pinned memory at an address."""
        not_while_capturing("a copy from host memory")
        address = int(getattr(mem, "value", mem))
        PinnedMemory.check(address, size)
        with stream or current_stream() as used:
            perform(lambda: self._copy_in(address, size))
        used.note_sent(address, size)

    def _copy_in(self, address: int, size: int) -> None:
        device, start = self._owner._device, self._owner._offset()
        source = (ctypes.c_uint8 * size).from_address(address)
        device.heap[start : start + size] = np.ctypeslib.as_array(source)
        device.shadow[start : start + size] |= np.uint8(WRITTEN)


class ndarray:
    """An array in emulated device memory; a NumPy view of it does the work on the host side."""

    __kernel_device__: EmulatedDevice  # what launches kernels on it

    def __init__(self, view: np.ndarray, place: Allocation, device: Device) -> None:
        self._view, self._place, self._device = view, place, device

    dtype = property(lambda self: self._view.dtype)
    shape = property(lambda self: self._view.shape)
    strides = property(lambda self: self._view.strides)
    size = property(lambda self: self._view.size)
    ndim = property(lambda self: self._view.ndim)
    nbytes = property(lambda self: self._view.nbytes)
    itemsize = property(lambda self: self._view.itemsize)
    flags = property(lambda self: self._view.flags)

    @property
    def data(self) -> _Pointer:
        """The device pointer, as ``.data.ptr``."""
        return _Pointer(self._offset() + self._place.address - self._place.start, self)

    @property
    def device(self) -> Any:
        """The one device."""
        return cuda.Device()

    @property
    def T(self) -> ndarray:
        """The transposed view."""
        return self._like(self._view.T)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.data.ptr, False),
            "version": 3, "strides": None if self._view.flags.c_contiguous else self.strides,
            "stream": None,
        }  # fmt: skip

    def _offset(self) -> int:
        return int(self._view.ctypes.data - self._device.heap.ctypes.data)

    def _like(self, view: np.ndarray) -> ndarray:
        child = ndarray(view, self._place, self._device)
        child._parent = self  # type: ignore[attr-defined]  # keeps the memory alive
        return child

    def _written(self) -> None:
        """Mark every element of this view as initialised."""
        shadow = self._device.shadow[self._offset() :]
        each = as_strided(shadow, (*self.shape, self.itemsize), (*self.strides, 1))
        each |= np.uint8(WRITTEN)

    def get(self, *_: Any, out: np.ndarray | None = None, **__: Any) -> np.ndarray:
        """Return a copy in host memory, `out` if given."""
        not_while_capturing("a copy to the host")
        if self._place.freed:
            raise LaunchError(f"array {self._place.name!r} was freed")
        current_stream().synchronize()
        if out is None:
            return self._view.copy()
        _check_alike(self, out)
        out[...] = self._view
        return out

    def set(self, values: np.ndarray, *_: Any, **__: Any) -> None:
        """Copy from host memory."""
        not_while_capturing("a copy from host memory")
        _check_alike(self, values)
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("set() of an array that is not contiguous")
        self._assign(..., values)

    def fill(self, value: Any) -> None:
        """Set every element."""
        self[...] = value

    def __getitem__(self, key: Any) -> ndarray:
        found = self._view[_host(key)]
        if isinstance(found, np.ndarray) and np.may_share_memory(found, self._view):
            return self._like(found)
        if not isinstance(found, np.ndarray):
            index = tuple(key) if isinstance(key, tuple) else (key,)
            return self._like(self._view[(*index, ...)])
        return asarray(found)

    def __setitem__(self, key: Any, values: Any) -> None:
        if not isinstance(values, ndarray) and np.ndim(values):
            raise ValueError("CuPy assigns no arrays of the host; use set(), or asarray first")
        perform(lambda: self._assign(_host(key), values))

    def _assign(self, key: Any, values: Any) -> None:
        self._view[key] = _host(values)
        if not self.size:
            return
        part = self._view[key] if key is not Ellipsis else self._view
        if isinstance(part, np.ndarray) and np.may_share_memory(part, self._view):
            self._like(part)._written()
        else:
            index = key if isinstance(key, tuple) else (key,)
            one = self._view[(*index, ...)]
            if np.may_share_memory(one, self._view):
                self._like(one)._written()
            else:
                self._written()

    def swapaxes(self, first: int, second: int) -> ndarray:
        """Return a view with two axes exchanged."""
        return self._like(self._view.swapaxes(first, second))

    def reshape(self, *shape: Any) -> ndarray:
        """Return a view of another shape."""
        shape = shape[0] if len(shape) == 1 else shape
        found = self._view.reshape(shape)
        return self._like(found) if np.may_share_memory(found, self._view) else asarray(found)

    def ravel(self) -> ndarray:
        """Return a one-dimensional view."""
        return self.reshape(-1)

    def view(self, dtype: Any) -> ndarray:
        """Return the same bytes as another type."""
        return self._like(self._view.view(dtype))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        """Return a converted copy."""
        return self if not copy and self.dtype == np.dtype(dtype) else self._copied(dtype, "C")

    def _copied(self, kind: Any, order: str) -> ndarray:
        made = _new(self.shape, kind, order, written=True)
        made[...] = self
        return made

    def copy(self, order: str = "C") -> ndarray:
        """Return a copy on the device."""
        return self._copied(self.dtype, order)

    def item(self) -> Any:
        """Return the only element."""
        not_while_capturing("a copy to the host")
        return self._view.item()

    def tolist(self) -> Any:
        """Return nested lists."""
        not_while_capturing("a copy to the host")
        return self._view.tolist()

    def __len__(self) -> int:
        return len(self._view)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __repr__(self) -> str:
        return repr(self._view)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed; use .get()")


def _check_alike(there: ndarray, here: Any) -> None:
    """Raise unless an array of the host can take the bytes of one on the device, or give them."""
    if not isinstance(here, np.ndarray) or here.dtype != there.dtype:
        raise TypeError(f"a NumPy array of {there.dtype} is wanted, got {here!r:.80}")
    if here.shape != there.shape:
        raise ValueError(f"shape {there.shape} on the device, {here.shape} on the host")


def _host(x: Any) -> Any:
    return x._view if isinstance(x, ndarray) else x


def empty(shape: Any, dtype: Any = np.float64, order: str = "C") -> ndarray:
    """Return an array whose elements count as uninitialised."""
    return _new(shape, dtype, order, written=False)


def _new(shape: Any, kind: Any, order: str, *, written: bool, mapped: bool = False) -> ndarray:
    kind = np.dtype(kind)
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    device, pool = _State.device, _State.here.pool
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    name = f"array {kind.name}{list(shape)}"
    if pool is None or mapped:
        not_while_capturing(f"{name} made from other memory than a pool of the graph's own")
        place = device.allocate(nbytes, name, written=written, mapped=mapped)
        free = device.free
    else:
        place, free = pool.take(nbytes, name, written=written), pool.give
    view = device.bytes_of(place)[:nbytes].view(kind)
    made = ndarray(view.reshape(shape, order="F" if order == "F" else "C"), place, device)
    weakref.finalize(made, free, place)
    return made


def zeros(shape: Any, dtype: Any = np.float64, order: str = "C") -> ndarray:
    """Return an array of zeros."""
    made = _new(shape, dtype, order, written=True)
    made.fill(0)
    return made


def mapped(shape: Any, dtype: Any, values: np.ndarray | None = None) -> ndarray:
    """Return an array of zeros, or of `values`, that counts as pinned memory of the host."""
    made = _new(shape, dtype, "C", written=True, mapped=True)
    made._view[...] = 0 if values is None else values
    return made


def memory_bytes() -> dict[str, int]:
    """Return what is allocated: on the device now and at most, and of the host's pinned memory."""
    device = _State.device
    return {
        "device_bytes": device.device_bytes,
        "peak_device_bytes": device.peak_device_bytes,
        "mapped_bytes": device.mapped_bytes,
        "total_bytes": device.memory_bytes,
    }


def ones(shape: Any, dtype: Any = np.float64) -> ndarray:
    """Return an array of ones."""
    return full(shape, 1, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> ndarray:
    """Return an array of one value."""
    kind = dtype if dtype is not None else np.asarray(fill_value).dtype
    made = _new(shape, kind, "C", written=True)
    made.fill(fill_value)
    return made


def empty_like(prototype: Any, dtype: Any = None) -> ndarray:
    """Return an uninitialised array of the same shape."""
    return empty(prototype.shape, dtype or prototype.dtype)


def zeros_like(a: Any, dtype: Any = None) -> ndarray:
    """Return an array of zeros of the same shape."""
    return zeros(a.shape, dtype or a.dtype)


def asarray(a: Any, dtype: Any = None, order: str = "C") -> ndarray:
    """Return an array on the device with the contents of `a`."""
    if isinstance(a, ndarray) and (dtype is None or a.dtype == np.dtype(dtype)):
        return a
    if dtype is None and hasattr(a, "__cuda_array_interface__") and not isinstance(a, np.ndarray):
        return _shared(a.__cuda_array_interface__)
    not_while_capturing("a copy from host memory that is not pinned")
    host = np.asarray(_host(a), dtype)
    made = _new(host.shape, host.dtype, order, written=True)
    made._view[...] = host
    return made


def _shared(interface: dict[str, Any]) -> ndarray:
    """Return an array of emulated memory that an array of another type points to."""
    device, start = _State.device, interface["data"][0] - GLOBAL_BASE
    place = device.nearest(start)
    if place is None or not place.start <= start <= place.start + place.nbytes:
        raise ValueError(f"no emulated array at address {interface['data'][0]:#x}")
    shape, kind = interface["shape"], np.dtype(interface["typestr"])
    view: np.ndarray = np.ndarray(shape, kind, device.heap, start, interface.get("strides"))
    return ndarray(view, place, device)


def array(obj: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    """Return a new array on the device with the contents of `obj`."""
    return asarray(np.array(_host(obj), dtype))


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """Return `a` as an array on the device with contiguous rows."""
    found = asarray(a, dtype)
    return found if found.flags.c_contiguous else found.copy()


def arange(*args: Any, dtype: Any = None) -> ndarray:
    """Return evenly spaced values."""
    return asarray(np.arange(*args, dtype=dtype))


def asnumpy(a: Any, *_: Any, **__: Any) -> np.ndarray:
    """Return a copy in host memory."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def get_array_module(*args: Any) -> Any:
    """Return this module if an argument is one of its arrays, else NumPy."""
    return sys.modules[__name__] if any(isinstance(a, ndarray) for a in args) else np


class _Function:
    """A kernel of a module: ``f(grid, block, args, shared_mem=...)``."""

    def __init__(self, emulator: Emulator, name: str) -> None:
        self._emulator, self.name = emulator, name
        self._program = emulator.program(name)
        self.max_dynamic_shared_size_bytes = _DEFAULT_SHARED
        self.preferred_shared_memory_carveout = -1

    def __call__(
        self,
        grid: Any,
        block: Any,
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Any = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        """Run the kernel; the `Result` is `last_launch`."""
        if not isinstance(grid, tuple) or not isinstance(block, tuple):
            raise TypeError(f"{self.name}: grid and block must be tuples, got {grid!r}, {block!r}")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise LaunchError(
                f"{self.name}: shared_mem = {shared_mem} is more than "
                f"max_dynamic_shared_size_bytes = {self.max_dynamic_shared_size_bytes}; "
                "set that attribute first (on a GPU the launch fails)"
            )
        params = self._program.kernel.params
        if len(args) != len(params):
            raise LaunchError(f"{self.name} takes {len(params)} arguments, got {len(args)}")
        values = [
            _kernel_argument(self.name, k, a, p.size)
            for k, (a, p) in enumerate(zip(args, params, strict=True))
        ]
        sizes = triple(grid, "grid"), triple(block, "block")
        enqueue(self._emulator, self._program.kernel.name, *sizes, values, shared_mem)

    @property
    def num_regs(self) -> int:
        """Not known without ptxas: see `nbflow_ptx.lint`."""
        raise AttributeError("num_regs: use nbflow_ptx.lint")


def _kernel_argument(kernel: str, k: int, a: Any, size: int) -> Any:
    """Return an argument as CuPy would pass it; a size that does not fit is an error there too."""
    if isinstance(a, ndarray):
        if a._place.freed:
            raise LaunchError(f"{kernel}: argument {k} is a freed array")
        a = np.uint64(a.data.ptr)
    elif isinstance(a, np.ndarray) and a.ndim:
        raise TypeError(
            f"{kernel}: argument {k} is a NumPy array; put it on the device with asarray"
        )
    elif isinstance(a, bool):
        a = np.bool_(a)
    elif isinstance(a, int):
        a = np.int64(a)
    elif isinstance(a, float):
        a = np.float64(a)
    elif isinstance(a, complex):
        a = np.complex128(a)
    if a.nbytes != size:
        raise LaunchError(
            f"{kernel}: argument {k} has {a.nbytes} bytes ({type(a).__name__}), "
            f"the parameter {size}; "
            "CuPy passes a Python int or float as 8 bytes: pass a NumPy scalar of the right type"
        )
    return a.tobytes()


class RawModule:
    """CUDA C++ (or PTX) as a module of kernels.

    Parameters
    ----------
    code : str, optional
        CUDA C++; it is compiled with NVRTC, which ``numba-cuda[cu12]`` brings.
    path : str, optional
        A file of PTX instead.
    options : sequence of str
        Options for NVRTC.
    name_expressions : sequence of str, optional
        C++ names of template instances, to be looked up with `get_function`.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        self._names: dict[str, str] = {}
        if (code is None) == (path is None):
            raise TypeError("exactly one of code and path must be given")
        if path is not None:
            text = Path(path).read_text()
        elif code is not None and ".entry" in code and ".version" in code:
            text = code
        else:
            assert code is not None
            made = nvrtc.compile_source(
                code, _State.arch, options=options, name_expressions=name_expressions or ()
            )
            text, self._names = made.text, made.names
        self._emulator = Emulator(text)

    def get_function(self, name: str) -> _Function:
        """Return a kernel by its name or name expression."""
        return _Function(self._emulator, self._names.get(name, name))

    def compile(self, log_stream: Any = None) -> None:
        """Nothing to do: compiled already."""


class RawKernel(_Function):
    """One kernel of CUDA C++ source."""

    def __init__(self, code: str, name: str, options: Sequence[str] = (), **_: Any) -> None:
        super().__init__(RawModule(code, options=options)._emulator, name)


_ATTRIBUTES = {
    "MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 227 * 1024, "L2CacheSize": 1 << 16,
}  # fmt: skip


class _Device:
    """The one emulated device."""

    id = 0
    compute_capability = property(lambda self: _State.arch.removeprefix("sm_").rstrip("a"))
    attributes = property(lambda self: dict(_ATTRIBUTES))

    def __init__(self, *_: Any) -> None: ...
    def synchronize(self) -> None:
        """Nothing to wait for."""
        not_while_capturing("waiting for the device", spoils=True)

    def use(self) -> None:
        """Do nothing: there is only this one."""

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: Any) -> None: ...


ndarray.__kernel_device__ = EmulatedDevice(empty, asarray, mapped)


def _free_and_total() -> tuple[int, int]:
    """Return the bytes of the device that are free, and all."""
    total = _State.device.memory_bytes
    return total - _State.device.device_bytes, total


cuda: Any = types.ModuleType("cupy.cuda")
cuda.Stream, cuda.Event, cuda.Device, cuda.Graph = Stream, Event, _Device, Graph
cuda.MemoryPool, cuda.using_allocator = MemoryPool, using_allocator
cuda.alloc_pinned_memory = PinnedMemory
cuda.runtime = types.SimpleNamespace(memGetInfo=_free_and_total)
cuda.get_elapsed_time = lambda first, last: 1e3 * (last.at_s - first.at_s)
cuda.get_current_stream = current_stream
cuda.is_available = lambda: True


def is_available() -> bool:
    """Return True: there is always an emulated device."""
    return True


@contextmanager
def installed() -> Iterator[Any]:
    """Let ``import cupy`` find this module for the duration of a ``with`` block."""
    names = {"cupy": sys.modules[__name__], "cupy.cuda": cuda}
    before = {n: sys.modules.get(n) for n in names}
    sys.modules.update(names)
    try:
        yield sys.modules[__name__]
    finally:
        for n, module in before.items():
            if module is None:
                del sys.modules[n]
            else:
                sys.modules[n] = module
