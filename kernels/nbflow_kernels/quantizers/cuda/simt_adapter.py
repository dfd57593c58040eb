"""SIMT adapter: runs CPU quantizers written for 16 SIMD lanes with one lane per CUDA thread.

Vector operations become scalar ones, and the address of a vector that of this thread's lane, so
that scratch memory has the CPU's layout: a panel for 16 threads.  No lane depends on its
neighbours, so the bits are the same.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.cuda import libdevice

from nbflow_kernels.compilation.jit_cache import source_digest
from nbflow_kernels.cpu import simd, simd_compare, simd_memory
from nbflow_kernels.cuda import numba_conversions as numbers
from nbflow_kernels.quantizers import simd_panel
from nbflow_kernels.quantizers.cuda import simt_lanes as own
from nbflow_kernels.quantizers.reference import ggml_scale_fit

if TYPE_CHECKING:
    from nbflow_kernels.formats.block_format import FieldFormat

MODULES = (simd, simd_compare, simd_memory, simd_panel, ggml_scale_fit)
"""Modules whose functions quantizers call by the module's name."""


def key_of(format: FieldFormat) -> str:
    """Return the disk-cache key of the kernels that quantize to a format."""
    file = sys.modules[type(format).__module__].__file__
    return f"{format.name} {source_digest(Path(str(file)))} {format.fields!r}"


def twin(function: Any) -> Any:
    """Return a compiled CPU function as a CUDA device function for one lane."""
    return _Twins().of(function)


class _Twins:
    """Copies of functions and modules that call the operations of `_operations`."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        for module, names in _operations().items():
            for name, operation in names.items():
                self._made[id(getattr(module, name))] = operation

    def of(self, value: Any) -> Any:
        """Return the replacement of a function's global."""
        found = self._made.get(id(value))
        if found is not None:
            return found
        if value is np:
            return _numpy()
        if isinstance(value, types.ModuleType):
            return self._module(value) if value in MODULES else value
        python = getattr(value, "py_func", None)
        return value if python is None else self._function(value, python)

    def _function(self, compiled: Any, python: Any) -> Any:
        names: dict[str, Any] = {}
        again = types.FunctionType(
            python.__code__, names, python.__name__, python.__defaults__, python.__closure__
        )
        made = self._made[id(compiled)] = numbers.device(again)
        used = set(python.__code__.co_names)
        names.update({k: self.of(v) for k, v in python.__globals__.items() if k in used})
        names["__name__"], names["__builtins__"] = python.__module__, __builtins__
        return made

    def _module(self, module: types.ModuleType) -> Any:
        made = self._made[id(module)] = types.ModuleType(module.__name__)
        for name, value in vars(module).items():
            if id(value) in self._made or hasattr(value, "py_func") or isinstance(value, float):
                setattr(made, name, self.of(value))
        return made


@functools.cache
def _numpy() -> Any:
    """Return a stand-in for NumPy: its types, and `rint` and `sqrt` with the CPU's bits."""
    made = types.ModuleType("numpy")
    for name, value in vars(np).items():
        if isinstance(value, type) and issubclass(value, np.generic):
            setattr(made, name, value)
    made.rint, made.sqrt = libdevice.rintf, libdevice.fsqrt_rn  # type: ignore[attr-defined]
    return made


@functools.cache
def _operations() -> dict[types.ModuleType, dict[str, Any]]:
    """Return the scalar operations, by module and name of the vector operation."""
    of_simd = ("and_", "or_", "load_f32", "store_f32", "load_f16")
    built_in = {
        "splat": np.float32, "splat_i32": np.int32, "to_f32": np.float32,
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": libdevice.fdiv_rn,
        "as_i32": libdevice.float_as_int, "float_to_half": numbers.narrow,
    }  # fmt: skip
    of_compare = ("less", "differs", "choose", "any_lane")
    built_in_compare = {
        "absolute": libdevice.fabsf, "sqrt": libdevice.fsqrt_rn, "smaller": min, "larger": max,
    }  # fmt: skip
    return {
        simd: built_in | {name: getattr(own, name) for name in of_simd},
        simd_memory: {"store_f16": own.store_f16},
        simd_compare: built_in_compare | {name: getattr(own, name) for name in of_compare},
    }


def scratch_size(n_threads: int, vectors: int) -> int:
    """Return the floats of scratch memory: `vectors` vectors per 16 threads."""
    return -(-n_threads // simd.LANES) * simd.LANES * vectors


def scratch_offset(thread: Any, vectors: Any) -> Any:
    """Return the byte offset of the first number of a thread's scratch memory."""
    group, lane = thread // np.int64(16), thread % np.int64(16)
    return group * np.int64(64) * vectors + np.int64(4) * lane
