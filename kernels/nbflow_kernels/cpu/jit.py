"""Decorators that compile CPU kernels and the functions that only kernels call.

A `kernel` is compiled once per machine (`nbflow_kernels.compilation.jit_cache`) and called without
the GIL.

Numba puts a number into the symbol name of a compiled function, counted from 1 in each process.
Two kernels of one factory (a product for two formats) then had equal names if one was compiled here
and the other loaded from another process's cache entry, and Numba returned the wrong address.  A
`KernelCompiler` uses numbers that are unique among processes.  Functions outside this package keep
Numba's.

Device functions are compiled to LLVM IR only, and optimized once inside the calling kernel
(`nbflow_kernels.cpu.numba_libraries`).
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
from numba.core import caching, compiler, inline_closurecall, sigutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from nbflow_kernels.compilation import jit_cache
from nbflow_kernels.compilation.numba_inlining import share_scopes
from nbflow_kernels.cpu import (
    interpreter,
    numba_compile_time,
    numba_entry,
    numba_libraries,
    numba_passes,
)
from nbflow_kernels.cpu.fork import in_child, lock_during_fork

# A fork waits for other threads' compilations: a child would wait for their lock for ever.
lock_during_fork(global_compiler_lock.acquire, global_compiler_lock.release)
share_scopes(inline_closurecall)
numba_compile_time.remember_call_types()
numba_compile_time.skip_atoms()
numba_compile_time.find_implementations_once()
numba_compile_time.skip_logs_and_events()
numba_compile_time.compare_options_as_set()
numba_passes.shorten_post_processing()
numba_libraries.link_overloads_as_ir()
numba_libraries.check_llvm_once()

# No "nnan"/"ninf": masks are -inf and tests fill outputs with NaN.  No "reassoc": the order of
# additions is part of a kernel's contract (a row's result must not depend on its neighbours).
FAST_MATH = {"contract", "nsz"}

_numbers = itertools.count()


@in_child
def _number_apart() -> None:
    """Start counting at a number that no other process uses."""
    global _numbers
    _numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))


_number_apart()


class _Collector:
    """Disable the garbage collector while kernels compile: 15 % less time.

    Compiling makes millions of long-lived objects, which the collector would scan repeatedly.
    Numba compiles one kernel at a time under a lock, with its device functions nested.
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
    """Numba's compiler with our symbol names, fewer passes, and no garbage collection meanwhile."""

    library: Any = numba_libraries.KernelLibrary

    def define_pipelines(self) -> Any:
        """Return Numba's pipelines without passes that have nothing to do."""
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = numba_passes.kernel_passes(pipeline.passes, self.state.bc)
            pipeline.finalize()
        return pipelines

    def _compile_bytecode(self) -> Any:
        identity = self.state.func_id
        identity.unique_id = next(_numbers)
        identity.unique_name = f"{identity.func_qualname}${identity.unique_id}"
        self.state.library = self.library(self.state.targetctx.codegen(), identity.func_qualname)
        self.state.library.enable_object_caching()
        with _collector_off, numba_passes.compiling_kernel:
            return super()._compile_bytecode()


class SmallKernelCompiler(KernelCompiler):
    """`KernelCompiler` that leaves loops as they are."""

    library = numba_libraries.SmallKernelLibrary


class ScalarKernelCompiler(KernelCompiler):
    """`KernelCompiler` that neither unrolls nor vectorizes loops."""

    library = numba_libraries.ScalarKernelLibrary


class DeviceCompiler(KernelCompiler):
    """`KernelCompiler` whose result is LLVM IR."""

    library = numba_libraries.DeviceLibrary


# Kernels are never called as a C function, and get an entry point for Python when they need it.
_OPTIONS: Any = {
    "nogil": True, "error_model": "numpy", "boundscheck": False,
    "no_cfunc_wrapper": True, "no_cpython_wrapper": True,
}  # fmt: skip


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    strict: bool = False,
    unroll: bool = True,
    vectorize: bool = True,
) -> Any:
    """Compile a kernel lazily, cached on disk, without the GIL and without asserts.

    Parameters
    ----------
    function : callable
        The kernel.
    strict : bool
        Never fuse a product and a sum: for quantizers whose bits are published.
    unroll : bool
        Unroll loops.  Without that a kernel of many loops compiles in half the time: for kernels
        that wait for memory, or whose loops are unrolled by hand.
    vectorize : bool
        Vectorize the loops of a kernel that are not unrolled.  Without that short loops over
        strided scalars stay scalar: LLVM makes gathers and scatters of them, which take longer.
    """
    if function is None:
        return functools.partial(kernel, strict=strict, unroll=unroll, vectorize=vectorize)
    if interpreter.is_on():
        return interpreter.kernel(function)
    jit_cache.remember(Path(function.__code__.co_filename))
    fastmath: Any = False if strict else FAST_MATH
    assert vectorize or not unroll, "only loops that are not unrolled can stay scalar"
    small = SmallKernelCompiler if vectorize else ScalarKernelCompiler
    pipeline: Any = KernelCompiler if unroll else small
    compiled = numba.njit(fastmath=fastmath, pipeline_class=pipeline, **_OPTIONS)(function)
    if isinstance(compiled, CPUDispatcher):  # else compilation is disabled
        compiled.__class__ = CachedKernel
        del compiled.__dict__["_cache"]  # Numba's, which caches nothing
    return compiled


class CachedKernel(CPUDispatcher):
    """Kernel with a `jit_cache.KernelCache`; a copy made by a pickle has none."""

    @functools.cached_property
    def _cache(self) -> Any:
        """The cache, made when the kernel is first compiled: most of those imported never are."""
        function = self.py_func
        path = Path(function.__code__.co_filename)
        if not path.is_file() or not jit_cache.is_as_imported(path):
            return caching.NullCache()  # typed at a prompt, or edited meanwhile
        # The digest covers a kernel's module and what it imports from this package.  The kernels of
        # nbflow call nothing else; other files count by their path and time too.
        is_ours = jit_cache.is_ours(path) or function.__module__.startswith("nbflow.")
        may_save = functools.partial(jit_cache.is_as_imported, path)
        return jit_cache.KernelCache(function, jit_cache.cache_folder(path), may_save, not is_ours)

    @functools.cached_property
    def _entries(self) -> dict[Any, Any]:
        """Entry points for Python, by argument types."""
        return {}

    def compile(self, sig: Any) -> Any:
        """Compile for a signature, or load from the cache; return the entry point for Python."""
        self.compile_code(sig)
        arguments = tuple(sigutils.normalize_signature(sig)[0])
        with global_compiler_lock:
            if arguments not in self._entries:
                self._entries[arguments] = entry = self._entry(self.overloads[arguments])
                insert: Any = self._insert  # type: ignore[attr-defined]
                insert([kind._code for kind in arguments], entry, False)
        return self._entries[arguments]

    def _entry(self, compiled: Any) -> Any:
        """Return a compiled kernel's entry point, its wrapper compiled or from the cache."""
        cache = self._cache if isinstance(self._cache, jit_cache.KernelCache) else None
        library = cache and cache.load_entry(compiled)
        if library is None:
            with _collector_off, numba_passes.compiling_kernel:
                library = numba_entry.compile_entry(compiled)
            if cache:
                cache.save_entry(compiled, library)
        return numba_entry.entry_point(compiled, library)

    def add_overload(self, cres: Any) -> None:
        """Keep compiled code, which Python cannot call before it has an entry point."""
        self.overloads[tuple(cres.signature.args)] = cres

    def compile_code(self, sig: Any) -> None:
        """Compile for a signature, or load from the cache, to be called by address."""
        try:
            with numba_passes.compiling_kernel:
                super().compile(sig)
        finally:
            if isinstance(self._cache, jit_cache.KernelCache):
                self._cache.unlock()  # compilation may have failed

    def is_cached(self, sig: Any) -> bool:
        """Return whether a signature is compiled or has a cache entry."""
        return sig in self.overloads or (
            isinstance(self._cache, jit_cache.KernelCache)
            and self._cache.holds(sig, self.targetctx)
        )

    def is_locked(self, sig: Any) -> bool:
        """Return whether another process is compiling a signature."""
        return (
            sig not in self.overloads
            and isinstance(self._cache, jit_cache.KernelCache)
            and self._cache.is_locked(sig, self.targetctx)
        )


class DeviceFunction(CPUDispatcher):
    """Function for kernels to call; it has no entry point for Python, which would crash."""

    def __call__(self, *_: Any) -> None:
        """Refuse the call."""
        raise TypeError(
            f"{self.py_func.__qualname__} is a device function, which only kernels can call; "
            "declare it with @kernel to call it from Python"
        )


def device_function(
    function: Callable[..., Any] | None = None, *, strict: bool = False, inline: str | None = None
) -> Any:
    """Compile a function that only kernels call, without wrappers or a cache entry.

    Its code becomes part of the calling kernel, which is cached.  This halves the time to compile a
    kernel made of many functions.

    Parameters
    ----------
    function : callable
        The function.
    strict : bool
        Never fuse a product and a sum, as in `kernel`.
    inline : str, optional
        ``"llvm"``: LLVM inlines it.  ``"always"``: Numba copies its Python code into the callers,
        on CPU and CUDA alike, and types it there; with nested functions compiling takes several
        times as long.
    """
    if function is None:
        return functools.partial(device_function, strict=strict, inline=inline)
    fastmath: Any = False if strict else FAST_MATH
    if inline == "always":
        return numba.njit(inline="always", error_model="numpy", fastmath=fastmath)(function)
    options: Any = {**_OPTIONS, "forceinline": inline == "llvm"}
    compiled = numba.njit(fastmath=fastmath, pipeline_class=DeviceCompiler, **options)(function)
    if isinstance(compiled, CPUDispatcher):  # else compilation is disabled
        compiled.__class__ = DeviceFunction
    return compiled
