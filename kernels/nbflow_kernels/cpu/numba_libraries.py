"""Numba's code libraries without work that is thrown away.

Numba optimizes every function and emits its machine code, although callers link its LLVM IR and
optimize it again: most of the compile time of a kernel made of twenty functions in four layers.  A
`DeviceLibrary` stops before that.  Functions of Numba that kernels call, such as `min` and `max`,
become device libraries too.

Before LLVM optimizes a module, Numba optimizes each function of it and runs cheaper passes to find
references that are counted in vain, of which kernels have next to none.  A `KernelLibrary` does
without.

LLVM unrolls loops of which it does not know that they are short: of the time for a kernel of many
loops, a third goes into copies of them.  A `SmallKernelLibrary` does without.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba.core import codegen, config, typed_passes

from nbflow_kernels.cpu.numba_passes import compiling_kernel

numba_lower = typed_passes.BaseNativeLowering.run_pass
numba_check_llvm = codegen.CPUCodegen._check_llvm_bugs
_checked = set[Any]()


class _NoEnvironments:
    """Stub codegen that skips registering environments, which only object mode needs."""

    def set_env(self, name: str, environment: Any) -> None:
        pass


class DeviceLibrary(codegen.JITCodeLibrary):
    """LLVM IR of one function, to be linked into kernels."""

    @property
    def codegen(self) -> Any:
        """Return the stub in place of Numba's codegen."""
        return _NoEnvironments()

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: a library of IR has no machine code."""
        return 0

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout  # as modules to be linked need it

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Return the module itself, which nothing else uses: Numba would copy it first."""
        self._ensure_finalized()
        if self._shared_module is None:
            for function in self._final_module.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = "linkonce_odr"
            self._shared_module = self._final_module
        return self._shared_module


class KernelLibrary(codegen.JITCodeLibrary):
    """Machine code that is optimized once, as a whole."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        made = self._codegen._module_pass_manager()
        manager, *builder = made if isinstance(made, tuple) else (made,)  # by version of Numba
        manager.run(self._final_module, *builder)


class SmallKernelLibrary(KernelLibrary):
    """Machine code whose loops are not unrolled."""

    vectorize = True
    """LLVM may vectorize loops."""

    def __init__(self, made_by: Any, name: str) -> None:
        super().__init__(_WithoutUnrolling(made_by, self.vectorize), name)


class ScalarKernelLibrary(SmallKernelLibrary):
    """Machine code whose loops are neither unrolled nor vectorized."""

    vectorize = False


class _WithoutUnrolling:
    """Numba's code generator with optimizations that do not unroll loops."""

    def __init__(self, made_by: Any, vectorize: bool) -> None:
        self._made_by, self._vectorize = made_by, vectorize

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made_by, name)

    def _pass_builder(self, **options: Any) -> Any:
        given: Any = config
        tuning = llvm.create_pipeline_tuning_options()
        tuning.speed_level = options.get("opt", given.OPT)
        vectorize = options.get("loop_vectorize", given.LOOP_VECTORIZE)
        tuning.loop_vectorization = vectorize and self._vectorize
        tuning.slp_vectorization = options.get("slp_vectorize", given.SLP_VECTORIZE)
        tuning.loop_unrolling = False
        return llvm.create_pass_builder(self._made_by._tm, tuning)

    _module_pass_manager = codegen.CPUCodegen._module_pass_manager


def check_llvm_once() -> None:
    """Look for a bug of LLVM that the locale brings out with the first kernel, not with each."""
    codegen.CPUCodegen._check_llvm_bugs = _check_llvm  # type: ignore[method-assign]


def _check_llvm(made_by: Any) -> None:
    if not compiling_kernel.value or made_by not in _checked:
        numba_check_llvm(made_by)
        _checked.add(made_by)


def link_overloads_as_ir() -> None:
    """Keep the functions of Numba that a kernel calls as LLVM IR, to be linked into it."""
    typed_passes.BaseNativeLowering.run_pass = _lower  # type: ignore[method-assign]


def _lower(self: Any, state: Any) -> Any:
    # Without a wrapper nothing calls the function but other compiled functions.
    if state.library is None and compiling_kernel.value and state.flags.no_cpython_wrapper:
        make: Any = DeviceLibrary
        state.library = make(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
    return numba_lower(self, state)
