"""Gated activations on the CPU of gate and up projections in two arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation.cpu import ACTIVATIONS, CLAMPED, COST, activate_rows
from nbflow_kernels.activation.swigluoai import swigluoai_numbers
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of

Rows = NDArray[np.float32]


def glu_apart(gate: Rows, up: Rows, activation: str, out: Rows) -> None:
    """Compute `nbflow_kernels.activation.cpu.glu` of arrays (T, I) with the same row stride."""
    hold(gate, up, out)
    numbers, (n_rows, width) = swigluoai_numbers(activation), out.shape
    function = ACTIVATIONS[activation] if numbers is None else (CLAMPED, *numbers)
    parallel_for(
        activate_rows, n_rows, float(out.size * COST), address_of(gate), address_of(up),
        gate.strides[0], False, address_of(out), out.strides[0], width, *function,
    )  # fmt: skip
