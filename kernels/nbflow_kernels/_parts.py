"""How Numba compiles functions that only kernels call: as far as they are needed, and once.

Numba optimizes every function and turns it into machine code, also one that ends up in its callers:
those link its intermediate code, and optimize it again with their own.  For a kernel made of twenty
functions in four layers that is most of the compiler's time.  A `PartLibrary` stops before, so that
LLVM works on a kernel's code as a whole, once.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen, compiler


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
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


class PartCompiler(compiler.Compiler):
    """Numba's compiler with a `PartLibrary` for the result."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # type: ignore[no-untyped-call]
        if self.state.library is None:
            make: Any = PartLibrary
            self.state.library = make(self.state.targetctx.codegen(), "nbflow_part")
