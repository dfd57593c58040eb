"""How Numba compiles kernels, and the functions that only kernels call.

A compiled function is called by a name that has a number in it, which Numba counts up from 1 in
each process.  Kernels of one factory (a product for two formats) had the same name then when one
was compiled here and the other one came from the disk, where another process had put it: asked for
the address of the first, Numba gave the second's.  A `KernelCompiler` names what it compiles by
numbers that no other process takes.  Functions of others keep Numba's.

Parts of kernels are compiled as far as they are needed, and once.  Numba optimizes every function
and turns it into machine code, also one that ends up in its callers:
those link its intermediate code, and optimize it again with their own.  For a kernel made of twenty
functions in four layers that is most of the compiler's time.  A `PartLibrary` stops before, so that
LLVM works on a kernel's code as a whole, once.
"""

from __future__ import annotations

import gc
import itertools
import os
from typing import Any

from numba.core import codegen, compiler

from nbflow_kernels.forks import in_child

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
    """Where a part's environment, which only Python objects need, is not registered."""

    def set_env(self, name: str, environment: Any) -> None:
        pass


class PartLibrary(codegen.JITCodeLibrary):
    """Intermediate code of one function, to be linked into kernels."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironments()

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is none

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout  # as modules to be linked need it

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class PartCompiler(KernelCompiler):
    """The same with a `PartLibrary` for the result."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.state.library is None:
            make: Any = PartLibrary
            self.state.library = make(self.state.targetctx.codegen(), "nbflow_part")
