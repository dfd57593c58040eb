"""Instruction set extensions of Numba's compilation target.

Numba compiles for the processor it runs on, or for the one that `NUMBA_CPU_NAME` and
`NUMBA_CPU_FEATURES` name.  Vector functions that are one instruction on some processors
(`nbflow_kernels.cpu.simd_int8`) choose it by these features.  ``NUMBA_CPU_NAME=generic`` has none;
with another name and no features Numba keeps those of the processor it runs on.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

from numba.core import codegen, config

numba_config: Any = config  # attributes made at run time, unseen by type checkers


@functools.cache
def features() -> frozenset[str]:
    """Return the LLVM names of the features Numba compiles for.

    Examples
    --------
    >>> "x86" in features() or "aarch64" in features() or "other" in features()
    True
    """
    text = numba_config.CPU_FEATURES
    if text is None:
        text = codegen.get_host_cpu_features()
    return frozenset({_architecture(), *parse(text)})


def parse(text: str) -> frozenset[str]:
    """Return the features that an LLVM feature string switches on.

    Examples
    --------
    >>> sorted(parse("+avx2,-avx512f,+fma"))
    ['avx2', 'fma']
    """
    return frozenset(part[1:] for part in text.split(",") if part.startswith("+"))


def _architecture() -> str:
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return "x86"
    return "aarch64" if machine in ("aarch64", "arm64") else "other"
