"""One description of a test case, read by the tests, the benchmark and the table of tolerances.

Each op family has `reference.py` (NumPy float64, a function per op with the public function's
name and parameters) and `cases.py` with a list `CASES` of `OpCase`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class OpCase:
    """One call of one op: its inputs, how exact it must be, what it costs."""

    op: str
    """Name of the public function in `nbflow_kernels`, and of the function in `reference.py`."""
    name: str
    """What is special about this case, e.g. ``odd_rows`` or ``llama2_7b``."""
    inputs: Callable[[np.random.Generator], dict[str, Any]]
    """Makes the keyword arguments of the call."""
    rtol: float
    """Relative tolerance against the float64 reference."""
    atol: float
    """Absolute tolerance against the float64 reference."""
    reason: str
    """Where the tolerance comes from: dtype, length of the sums."""
    n_bytes: int = 0
    """Bytes that must be read and written at least once; 0 if the case is not for timing."""
    n_flops: int = 0
    """Floating-point operations, a multiply-add counted as two."""
    out: tuple[tuple[int, ...], str] | None = None
    """Shape and dtype of `out=`; the test passes it filled with NaN and wants it back."""
    mutates: tuple[str, ...] = ()
    """Names of arguments that are changed in place; they are compared too."""
    host: tuple[str, ...] = ()
    """Names of array arguments that stay in host memory when the others lie on a device."""
    exact: bool = False
    """Compare bit for bit (copies, integer results) instead of with a tolerance."""
    timed: bool = field(default=False)
    """Whether the benchmark runs this case (a real model's shape)."""
    device_only: bool = False
    """Whether only the benchmark of CUDA devices times it, if it is timed."""
    arithmetic: str = ""
    """What its multiply-adds are made of ("f32", "int8"), if the benchmark is to compare them with
    the processor's peak; see `nbflow_kernels.benchmarks.roofline`."""

    @property
    def id(self) -> str:
        """Return ``op-name``, the test's id."""
        return f"{self.op}-{self.name}"
