"""Running ``numba.cuda.jit`` kernels: compile without a driver, flatten the arguments, launch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import types as python_types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbflow_ptx.checks import Checks
from nbflow_ptx.emulator import Emulator, Out, Result, needed
from nbflow_ptx.errors import LaunchError, MissingToolError
from nbflow_ptx.memory.device import Device

_compiled: dict[Any, Emulator] = {}


def _numba_cuda() -> Any:
    if importlib.util.find_spec("numba_cuda") is None:
        raise MissingToolError(
            "compiling a Numba kernel needs numba-cuda: pip install -e '.[cuda-test]'"
        )
    cuda: Any = importlib.import_module("numba.cuda")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise MissingToolError(
            "NUMBA_ENABLE_CUDASIM is set: the simulator compiles no PTX; unset it"
        )
    return cuda


@contextmanager
def _without_driver(capability: tuple[int, int]) -> Iterator[None]:
    """Answer numba-cuda's question for the device's compute capability.

    It asks the driver while it types the call of a device function, though the answer was given
    to ``compile``.
    """
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: python_types.SimpleNamespace(
        compute_capability=capability
    )
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


def compile_kernel(
    kernel: Any, signature: Any, *, capability: tuple[int, int] = (8, 0), **options: Any
) -> str:
    """Compile a Numba CUDA kernel to PTX without a GPU or a driver.

    Parameters
    ----------
    kernel : numba.cuda.jit kernel or function
        What to compile.
    signature : tuple of numba types
        The types of its arguments.
    capability : tuple of int
        Compute capability to compile for.
    **options
        Options of ``numba.cuda.compile``: ``fastmath``, ``debug``, ``opt``, ...

    Returns
    -------
    str
        PTX, with line information.
    """
    cuda = _numba_cuda()
    function = getattr(kernel, "py_func", kernel)
    given = getattr(kernel, "targetoptions", {})
    chosen = {k: given[k] for k in ("fastmath", "debug", "opt") if k in given}
    chosen.update(options)
    chosen.setdefault("abi", "numba")
    if not chosen.get("debug"):
        chosen["lineinfo"] = True
    with _without_driver(capability):
        text, _ = cuda.compile(
            function, signature, cc=capability, device=False, output="ptx", **chosen
        )
    return str(text)


def launch(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *args: Any,
    shared_bytes: int = 0,
    capability: tuple[int, int] = (8, 0),
    checks: Checks | None = None,
    profile: bool = False,
) -> Result:
    """Run a Numba CUDA kernel on NumPy arrays, emulated.

    Parameters
    ----------
    kernel : numba.cuda.jit kernel or function
        The kernel; it is compiled for the types of the arguments, as Numba would.
    grid, block : int or sequence of int
        Blocks, and threads per block.
    *args : array or number
        What one would pass to the kernel.  Arrays are changed in place; wrap one in `out` to have
        it start uninitialised.
    shared_bytes : int
        Dynamic shared memory.
    capability : tuple of int
        Compute capability to compile for.
    checks : Checks, optional
        Which checks run; default all.
    profile : bool
        Count bank conflicts and sectors.

    Returns
    -------
    Result

    Raises
    ------
    KernelFault
        If a check fails.
    MissingToolError
        If ``numba-cuda`` is not installed.
    """
    _numba_cuda()
    from numba import typeof

    arrays = [a.array if isinstance(a, Out) else a for a in args]
    signature = tuple(typeof(a) for a in arrays)
    function = getattr(kernel, "py_func", kernel)
    options = tuple(sorted((k, repr(v)) for k, v in getattr(kernel, "targetoptions", {}).items()))
    key = (function, signature, capability, options)
    if key not in _compiled:
        _compiled[key] = Emulator(compile_kernel(kernel, signature, capability=capability))
    emulator = _compiled[key]
    parameters = list(inspect.signature(function).parameters)
    flat: list[Any] = []
    names: list[str] = []
    for name, a in zip(parameters, args, strict=True):
        _flatten(a, name, flat, names)
    emulator.checks = checks or Checks()
    device = Device(needed(flat, emulator.module))
    entry = emulator.module.entries[0]
    result = emulator.launch(
        entry,
        grid,
        block,
        *flat,
        shared_bytes=shared_bytes,
        names=names,
        profile=profile,
        device=device,
    )
    _raise_python_error(emulator, device)
    return result


def _flatten(a: Any, name: str, flat: list[Any], names: list[str]) -> None:
    """Append the parameters Numba passes for one argument."""
    array = a.array if isinstance(a, Out) else a
    if isinstance(array, np.ndarray):
        # data only: what is strided otherwise is copied in C order, with the strides of that
        c_order, strides = array, array.strides
        if array.flags.f_contiguous and not array.flags.c_contiguous:
            c_order = array.T
        elif not array.flags.c_contiguous:
            strides = np.empty(array.shape, array.dtype).strides
        data = Out(c_order) if isinstance(a, Out) else c_order
        flat += [0, 0, array.size, array.itemsize, data, *array.shape, *strides]
        names += [f"{name}.meminfo", f"{name}.parent", f"{name}.size", f"{name}.itemsize", name]
        names += [f"{name}.shape"] * array.ndim + [f"{name}.strides"] * array.ndim
    elif isinstance(a, tuple):
        for k, item in enumerate(a):
            _flatten(item, f"{name}[{k}]", flat, names)
    elif isinstance(a, (complex, np.complexfloating)):
        part = np.float32 if isinstance(a, np.complex64) else np.float64
        flat += [part(a.real), part(a.imag)]
        names += [f"{name}.real", f"{name}.imag"]
    elif isinstance(a, (bool, int, float, np.number, np.bool_)):
        flat.append(a)
        names.append(name)
    else:
        raise LaunchError(
            f"argument {name} must be an array, a number or a tuple of them, got {type(a).__name__}"
        )


def _raise_python_error(emulator: Emulator, device: Device) -> None:
    """Report the exception a kernel compiled with ``debug=True`` recorded."""
    for name, place in device.variables.get(emulator.module, {}).items():
        if name.endswith("__errcode__") and device.bytes_of(place).any():
            code = int(device.bytes_of(place)[:4].view(np.uint32)[0])
            raise LaunchError(
                f"the kernel raised a Python exception (Numba's code {code}) in debug mode"
            )
