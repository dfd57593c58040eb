"""Kernels for LLM inference: arrays in, arrays out.

    import nbflow_kernels as nk
    y = nk.rmsnorm(x, weight, eps=1e-5)

A NumPy array runs on the CPU, an array on a CUDA device runs there.  Names and conventions are
FlashInfer's.  Each op is a folder with a readable reference (`reference.py`), the CPU kernel, the
CUDA kernel and the test cases; `nbflow_kernels.op_registry` lists them.

Nothing is imported before it is used: the import costs a few milliseconds, and the first use of a
function imports Numba.  Three functions have the name of their folder (`matmul`, `qmatmul`,
`embedding`): here the name always means the function; reach into the folder with
``from nbflow_kernels.matmul import cpu``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nbflow_kernels.op_registry import module_of

if TYPE_CHECKING:  # for type checkers and completion; `families` lists the names
    from nbflow_kernels.activation import *
    from nbflow_kernels.attention import *
    from nbflow_kernels.cpu.parallel_for import get_num_threads as get_num_threads
    from nbflow_kernels.cpu.parallel_for import set_num_threads as set_num_threads
    from nbflow_kernels.embedding import *
    from nbflow_kernels.errors import MissingExtraError as MissingExtraError
    from nbflow_kernels.errors import UsageError as UsageError
    from nbflow_kernels.formats import FORMATS as FORMATS
    from nbflow_kernels.formats import QuantFormat as QuantFormat
    from nbflow_kernels.formats import QuantTensor as QuantTensor
    from nbflow_kernels.formats import dequantize as dequantize
    from nbflow_kernels.formats.user import load_formats as load_formats
    from nbflow_kernels.formats.user import register_format as register_format
    from nbflow_kernels.formats.user import unregister_format as unregister_format
    from nbflow_kernels.kv_cache import *
    from nbflow_kernels.logits import *
    from nbflow_kernels.masks import *
    from nbflow_kernels.matmul import *
    from nbflow_kernels.moe import *
    from nbflow_kernels.norm import *
    from nbflow_kernels.penalties import *
    from nbflow_kernels.position import *
    from nbflow_kernels.quantized_matmul import qmatmul as qmatmul
    from nbflow_kernels.quantizers import quantize as quantize
    from nbflow_kernels.sampling import *
    from nbflow_kernels.sparse import *
    from nbflow_kernels.testing.format_checks import check_format as check_format

_MODULE_OF = module_of()

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names without importing them."""
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Type of this package: importing the folder of an op does not hide the op itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULE_OF and isinstance(value, ModuleType):
            value = getattr(value, name)  # the import system sets `matmul` to the folder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
