"""Description of a test case, for the tests, the benchmark and the table of tolerances.

Each op family has `reference.py` (NumPy float64, a function per op with the public function's
name and parameters) and `cases.py` with a list `CASES` of `OpCase`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class OpCase:
    """One call of an op: its inputs, tolerances and cost."""

    op: str
    """Name of the public function in `nbflow_kernels`, and of the function in `reference.py`."""
    name: str
    """Distinguishing name, e.g. ``odd_rows`` or ``llama2_7b``."""
    inputs: Callable[[np.random.Generator], dict[str, Any]]
    """Makes the keyword arguments of the call."""
    rtol: float = 0.0
    """Relative tolerance against the float64 reference."""
    atol: float = 0.0
    """Absolute tolerance against the float64 reference."""
    reason: str = ""
    """Reason for the tolerance: dtype, length of the sums."""
    n_bytes: int = 0
    """Bytes that must be read and written at least once; 0 if the case is not for timing."""
    n_flops: int = 0
    """Floating-point operations, a multiply-add counted as two."""
    out: tuple[tuple[int, ...], str] | None = None
    """Shape and dtype of `out=`; the test passes it filled with NaN and expects it back."""
    mutates: tuple[str, ...] = ()
    """Names of arguments that are changed in place; they are compared too."""
    decoded: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Functions that decode stored bytes of an argument of `mutates` to the compared numbers."""
    host: tuple[str, ...] = ()
    """Names of array arguments that stay in host memory when the others are on a device."""
    exact: bool = False
    """Compare bit for bit (copies, integer results) instead of with a tolerance."""
    timed: bool = False
    """True if the benchmark times this case (a real model's shape)."""
    device_only: bool = False
    """True if only the benchmark of CUDA devices times it."""
    arithmetic: str = ""
    """Arithmetic of the multiply-adds ("f32", "int8") that the benchmark compares with the peak of
    `nbflow_kernels.benchmarks.roofline`; empty: no comparison."""

    @property
    def id(self) -> str:
        """Return ``op-name``, the id of the test."""
        return f"{self.op}-{self.name}"


def exact_case(
    op: str,
    name: str,
    inputs: Callable[[np.random.Generator], dict[str, Any]],
    reason: str,
    **options: Any,
) -> OpCase:
    """Return a case that is compared bit for bit; `options` are further fields of `OpCase`."""
    return OpCase(op, name, inputs, 0.0, 0.0, reason, exact=True, **options)
