"""Compilation of Numba CUDA functions to PTX or cubin, without a device or driver."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import threading
import types as python_types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbflow_kernels.compilation.numba_inlining import share_scopes
from nbflow_kernels.cuda.detect import find_nvvm, installed_version, no_nvvm
from nbflow_kernels.cuda.errors import CompileError
from nbflow_kernels.cuda.kernel_parameters import Parameter
from nbflow_kernels.cuda.nvrtc import INSTALL
from nbflow_kernels.errors import MissingExtraError

_NUMBA_TYPES = {
    "i8": "int8", "u8": "uint8", "i16": "int16", "u16": "uint16", "i32": "int32",
    "u32": "uint32", "i64": "int64", "u64": "uint64", "f16": "uint16", "bf16": "uint16",
    "f32": "float32", "f64": "float64",
}  # fmt: skip
LEAST_VERSION = (0, 30)
"""Least version of numba-cuda."""
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_lock = threading.Lock()


def version() -> str:
    """Return the versions of the compilers.

    Raises
    ------
    MissingExtraError
        If numba-cuda is not installed, or lacks libraries.
    """
    _numba_cuda()
    metadata = importlib.import_module("importlib.metadata")
    return f"numba {metadata.version('numba')}, numba-cuda {metadata.version('numba-cuda')}"


def module() -> Any:
    """Import and return ``numba.cuda``.

    Raises
    ------
    MissingExtraError
        If it cannot be imported: numba-cuda loads libraries of the CUDA toolkit meanwhile.
    """
    try:
        found = importlib.import_module("numba.cuda")
        _import_array_functions()
        return found
    except Exception as e:  # a library that is missing has an error of its finder's own
        reason = f"{type(e).__name__}: {e}".partition("\n")[0]
        raise MissingExtraError(f"numba.cuda does not import ({reason}): {INSTALL}") from e


def _import_array_functions() -> None:
    """Import a module of numba-cuda that names `np.row_stack`, which NumPy 2.5 has removed."""
    name = "numba.cuda.np.arrayobj"
    if name not in sys.modules and not hasattr(np, "row_stack"):
        from unittest import mock  # imports asyncio, a tenth of the time to import nbflow

        with mock.patch.object(np, "row_stack", np.vstack, create=True):
            importlib.import_module(name)


def _numba_cuda() -> Any:
    if importlib.util.find_spec("numba_cuda") is None:
        raise MissingExtraError(f"compiling Numba CUDA kernels needs numba-cuda: {INSTALL}")
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise CompileError("NUMBA_ENABLE_CUDASIM is set: the simulator compiles nothing; unset it")
    has = installed_version("numba-cuda")
    if has and tuple(map(int, re.findall(r"\d+", has)[:2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise MissingExtraError(f"numba-cuda {has} is older than {least}: {INSTALL}")
    with contextlib.suppress(ImportError):  # as its .pth file does, which Python may not read
        importlib.import_module("_numba_cuda_redirector")
    found = module()
    if "numba_cuda" not in str(found.__file__):
        raise CompileError(
            f"numba.cuda is {found.__file__}, not numba-cuda's, which redirects it: import "
            "nbflow_kernels before numba.cuda, or install numba-cuda into site-packages"
        )
    share_scopes(importlib.import_module("numba.cuda.core.inline_closurecall"))
    return found


def compile_function(
    function: Callable[..., Any],
    parameters: tuple[Parameter, ...],
    arch: str,
    output: str,
    entry: str,
    fastmath: bool,
    fuse: bool,
) -> bytes:
    """Compile a Python function with Numba CUDA to a kernel named `entry`.

    Parameters
    ----------
    function : callable
        Pointers are indexed like arrays; those to float16 and bfloat16 give the bits (uint16).
    parameters : tuple of Parameter
        Their types.
    arch : str
        ``sm_80``, ``sm_90``, ...
    output : {"ptx", "cubin"}
        What to return.
    entry : str
        The kernel's name in the code.
    fastmath : bool
        Approximate division, roots and functions, and no denormal numbers.
    fuse : bool
        Allow contraction of a product and a sum into one FMA, rounded once.

    Raises
    ------
    CompileError
        If the compiler gives up.
    MissingExtraError
        If numba-cuda or libNVVM is not installed.
    """
    numba_types = importlib.import_module("numba.core.types")
    signature = tuple(
        numba_types.CPointer(getattr(numba_types, _NUMBA_TYPES[p.type]))
        if p.pointer
        else getattr(numba_types, _NUMBA_TYPES[p.type])
        for p in parameters
    )
    return compile_typed(function, signature, arch, output, entry, fastmath=fastmath, fuse=fuse)


def compile_typed(
    function: Callable[..., Any],
    signature: tuple[Any, ...],
    arch: str,
    output: str,
    entry: str,
    *,
    fastmath: bool = False,
    fuse: bool = True,
) -> bytes:
    """Compile a function for arguments of Numba types, including arrays and tuples."""
    cuda = _numba_cuda()
    if not find_nvvm():
        raise MissingExtraError(f"{entry} for {arch}: {no_nvvm()}")
    capability = (int(arch[3:]) // 10, int(arch[3:]) % 10)
    with _lock, _without_driver(capability), _options(fma=fuse):
        try:
            text, _ = cuda.compile(
                function, signature, cc=capability, device=False, abi="numba", output="ptx",
                fastmath=fastmath, lineinfo=True,
            )  # fmt: skip
        except importlib.import_module("numba.core.errors").NumbaError as e:
            raise CompileError(f"{entry} for {arch}: {e}") from e
    found = _ENTRY.findall(text)
    if len(found) != 1:
        raise CompileError(f"{entry}: the compiler made {len(found)} kernels instead of one")
    ptx = str(text).replace(found[0], entry).encode()
    return ptx if output == "ptx" else _assembled(ptx, arch, entry)


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


@contextmanager
def _options(**options: Any) -> Iterator[None]:
    """Hand options to NVVM that ``compile`` has no parameter for."""
    compiler: Any = importlib.import_module("numba.cuda.compiler")
    inner = compiler.compile_cuda

    def compile_cuda(*args: Any, nvvm_options: dict[str, Any], **others: Any) -> Any:
        return inner(*args, nvvm_options={**nvvm_options, **options}, **others)

    compiler.compile_cuda = compile_cuda
    try:
        yield
    finally:
        compiler.compile_cuda = inner


def _assembled(ptx: bytes, arch: str, entry: str) -> bytes:
    """Return the cubin of PTX, made by nvJitLink: a driver may be older than the PTX."""
    try:
        link = importlib.import_module("cuda.bindings.nvjitlink")
    except ImportError as e:
        raise MissingExtraError(f"assembling kernels needs nvJitLink: {INSTALL}") from e
    handle = link.create(2, [f"-arch={arch}", "-lineinfo"])
    try:
        try:
            link.add_data(handle, link.InputType.PTX, ptx, len(ptx), entry)
            link.complete(handle)
        except link.nvJitLinkError as e:
            log = bytearray(link.get_error_log_size(handle))
            if log:
                link.get_error_log(handle, log)
            raise CompileError(f"{entry}: {log.decode('utf-8', 'replace') or e}") from e
        cubin = bytearray(link.get_linked_cubin_size(handle))
        link.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    finally:
        link.destroy(handle)
