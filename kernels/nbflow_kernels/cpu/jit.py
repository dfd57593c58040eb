"""Decorators that compile CPU kernels and the functions that only kernels call.

A `kernel` is compiled once per machine (see `nbflow_kernels.jit_cache`) and called without the GIL.

A compiled function is called by a name that has a number in it, which Numba counts up from 1 in
each process.  Kernels of one factory (a product for two formats) had the same name then when one
was compiled here and the other one came from the disk, where another process had put it: asked for
the address of the first, Numba gave the second's.  A `KernelCompiler` names what it compiles by
numbers that no other process takes.  Functions of others keep Numba's.

Device functions are compiled as far as kernels need them, and once.  Numba optimizes every function
and turns it into machine code, also one that ends up in its callers: those link its intermediate
code, and optimize it again with their own.  For a kernel made of twenty functions in four layers
that is most of the compiler's time.  A `DeviceLibrary` stops before, so that LLVM works on a
kernel's code as a whole, once.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import codegen, compiler
from numba.core.compiler_lock import global_compiler_lock

from nbflow_kernels import jit_cache
from nbflow_kernels.cpu import interpreter
from nbflow_kernels.cpu.fork import around_fork, in_child

# A child that is forked while another thread compiles would wait for that thread for ever: the fork
# waits instead.  Nothing is compiled without this lock of Numba's.
around_fork(global_compiler_lock.acquire, global_compiler_lock.release)

# No "nnan"/"ninf": masks are -inf and tests fill outputs with NaN.  No "reassoc": the order of
# additions is part of a kernel's contract (a row's result must not depend on its neighbours).
FAST_MATH = {"contract", "nsz"}

_numbers = itertools.count()


@in_child
def _name_apart() -> None:
    """Let the numbers in names be no other process's."""
    global _numbers
    _numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))


_name_apart()


class _Collector:
    """Keeps Python's garbage collector off while kernels are compiled: a tenth less time.

    Compiling makes millions of objects that stay; the collector would go through them again and
    again.  Numba compiles one kernel at a time, under a lock, and the parts of it in between.
    """

    depth = 0
    was_on = False

    def __enter__(self) -> None:
        if self.depth == 0:
            self.was_on = gc.isenabled()
            gc.disable()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0 and self.was_on:
            gc.enable()


_collector_off = _Collector()


class KernelCompiler(compiler.Compiler):
    """Numba's compiler with names of our own, and without garbage collection meanwhile."""

    def _compile_bytecode(self) -> Any:
        identity = self.state.func_id
        identity.unique_id = next(_numbers)
        identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
        with _collector_off:
            return super()._compile_bytecode()


class _NoEnvironments:
    """Where a device function's environment, which only Python objects need, is not registered."""

    def set_env(self, name: str, environment: Any) -> None:
        pass


class DeviceLibrary(codegen.JITCodeLibrary):
    """Intermediate code of one function, to be linked into kernels."""

    @property
    def codegen(self) -> Any:
        """Return where environments are registered."""
        return _NoEnvironments()

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        return 0

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout  # as modules to be linked need it

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class DeviceCompiler(KernelCompiler):
    """The same with a `DeviceLibrary` for the result."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.state.library is None:
            make: Any = DeviceLibrary
            self.state.library = make(self.state.targetctx.codegen(), "nbflow_device_function")


# Kernels are called from Python and by address, never as a C function; device functions are not
# called from Python either.
_OPTIONS: Any = {
    "nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True,
}  # fmt: skip


def kernel(function: Callable[..., Any] | None = None, *, strict: bool = False) -> Any:
    """Compile a kernel lazily, cached on disk, without the GIL and without asserts.

    Parameters
    ----------
    function : callable
        The kernel.
    strict : bool
        Never fuse a product and a sum: for quantizers whose bits are published.
    """
    if function is None:
        return functools.partial(kernel, strict=strict)
    if interpreter.is_on():
        return interpreter.kernel(function)
    path = Path(function.__code__.co_filename)
    fastmath: Any = False if strict else FAST_MATH
    compiled = numba.njit(fastmath=fastmath, pipeline_class=KernelCompiler, **_OPTIONS)(function)
    if jit_cache.is_as_imported(path):
        # what other files import from elsewhere is not in their digest
        is_ours = jit_cache.is_ours(path)
        may_save = functools.partial(jit_cache.is_as_imported, path)
        folder = jit_cache.cache_folder(path)
        compiled._cache = jit_cache.KernelCache(function, folder, may_save, not is_ours)
    return compiled


def device_function(
    function: Callable[..., Any] | None = None, *, strict: bool = False, inline: str | None = None
) -> Any:
    """Compile a function that only kernels call: without wrappers and a cache entry of its own.

    Its machine code is part of that of the kernel that calls it, which is what the cache holds.
    This halves the time to compile a kernel that is made of many functions.

    Parameters
    ----------
    function : callable
        The function.
    strict : bool
        Never fuse a product and a sum, as in `kernel`.
    inline : str, optional
        ``"llvm"``: LLVM puts it into its callers.  ``"always"``: Numba copies its Python code into
        them, on CPU and CUDA alike, and types it there; with several layers of such functions
        compiling takes several times as long.
    """
    if function is None:
        return functools.partial(device_function, strict=strict, inline=inline)
    fastmath: Any = False if strict else FAST_MATH
    if inline == "always":
        return numba.njit(inline="always", error_model="numpy", fastmath=fastmath)(function)
    options: Any = {**_OPTIONS, "no_cpython_wrapper": True, "forceinline": inline == "llvm"}
    return numba.njit(fastmath=fastmath, pipeline_class=DeviceCompiler, **options)(function)
