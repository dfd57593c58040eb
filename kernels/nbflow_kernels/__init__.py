"""Kernels for LLM inference on NumPy and CUDA arrays.

    import nbflow_kernels as nk
    y = nk.rmsnorm(x, weight, eps=1e-5)

A NumPy array runs on the CPU, an array on a CUDA device runs there; arrays of other libraries
(PyTorch, JAX, Numba) are taken as they are, and results are of their kind (`exchange`).  Names
and conventions are FlashInfer's.  Each op is a folder with a readable reference (`reference.py`),
the CPU kernel, the CUDA kernel and the test cases; `nbflow_kernels.op_registry` lists the names,
`__init__.pyi` has their types.

Imports are lazy: importing the package takes a few milliseconds, and the first use of a function
imports Numba.  Two functions have the name of their folder (`matmul`, `embedding`): as attributes
of this package they are the functions; import from the folder with
``from nbflow_kernels.matmul import cpu``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from nbflow_kernels.op_registry import ALIASES, FLASHINFER_INSTEAD, module_of

_MODULE_OF = module_of()

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULE_OF:
        instead = next((i for first, i in FLASHINFER_INSTEAD.items() if name.startswith(first)), "")
        more = f"; use {instead}" if instead else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{more}")
    if name in ALIASES:
        other, implied = ALIASES[name]
        value = getattr(sys.modules[__name__], other)
        value = functools.partial(value, **implied) if implied else value
    else:
        value = _public(name, importlib.import_module(_MODULE_OF[name]))
    globals()[name] = value
    return value


@functools.cache
def _public(name: str, module: ModuleType) -> Any:
    """Return the public form of a name: it takes arrays of any library."""
    from nbflow_kernels.exchange.op_boundary import public

    return public(name, getattr(module, name))


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Module type that keeps an op visible when its folder of the same name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULE_OF and isinstance(value, ModuleType):
            value = _public(name, value)  # the import system sets `matmul` to the folder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
