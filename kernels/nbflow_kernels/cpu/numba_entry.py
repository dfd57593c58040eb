"""Entry points for Python of compiled kernels, apart from the kernels.

Numba compiles a wrapper into each function, which unpacks the arguments from Python objects and
takes as long as a small kernel.  The kernels of a graph are called by address and need none, so
wrappers are modules of their own here, made for the first call from Python.
"""

from __future__ import annotations

import copy
from typing import Any

from numba.core.runtime.nrt import rtsys

from nbflow_kernels.cpu.numba_libraries import ScalarKernelLibrary


def compile_entry(compiled: Any) -> Any:
    """Return the library with the wrapper of a compiled kernel, which calls it by name."""
    context = compiled.target_context
    description = _description(compiled)
    library: Any = ScalarKernelLibrary(context.codegen(), f"{description.qualname} entry")
    library.enable_object_caching()
    context.create_cpython_wrapper(library, description, compiled.environment, None, True)
    library.add_linking_library(rtsys.library)
    library.finalize()
    return library


def entry_point(compiled: Any, library: Any) -> Any:
    """Return the function for Python of a compiled kernel, given the library with its wrapper."""
    context, description = compiled.target_context, _description(compiled)
    return context.get_executable(library, description, compiled.environment)


def _description(compiled: Any) -> Any:
    """Return Numba's description of a kernel, with another global for the environment."""
    description = copy.copy(compiled.fndesc)
    description.env_name += "_entry"
    return description
