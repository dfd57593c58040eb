"""The one `njit` of the package: compiled once per machine, called without the GIL.

Numba's disk cache looks only at the file of the cached function: it would go on serving old machine
code after an edit in a function that was inlined from another file.  The cache folder is therefore
named after a digest of all kernel sources.  `NUMBA_CACHE_DIR` moves it, as usual.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

numba_config: Any = config  # its settings are made at run time, unseen by type checkers

# No "nnan"/"ninf": masks are -inf and tests fill outputs with NaN.  No "reassoc": the order of
# additions is part of a kernel's contract (a row's result must not depend on its neighbours).
FAST_MATH = {"contract", "nsz"}


@functools.cache
def cache_folder() -> Path:
    """Return the folder of compiled kernels for the present sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR")
    if base:
        root = Path(base)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nbflow"
    return root / f"kernels-{digest.hexdigest()[:16]}"


def njit(function: Callable[..., Any]) -> Any:
    """Compile a module-level kernel lazily, cached on disk, without the GIL and without asserts."""
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(cache_folder())
    try:
        return numba.njit(
            cache=True, nogil=True, error_model="numpy", boundscheck=False, fastmath=FAST_MATH
        )(function)
    finally:
        numba_config.CACHE_DIR = before


def inline(function: Callable[..., Any]) -> Any:
    """Compile a scalar helper into whichever kernel calls it (CPU and CUDA alike)."""
    return numba.njit(inline="always", error_model="numpy", fastmath=FAST_MATH)(function)
