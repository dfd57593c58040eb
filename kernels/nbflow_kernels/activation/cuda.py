"""Activations on CUDA devices: each thread computes four columns, see `activation.cu`."""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.activation.cpu import ACTIVATIONS
from nbflow_kernels.activation.swigluoai import swigluoai_numbers

_THREADS = 128
FUNCTIONS = {name: name.title().replace("_", "") for name in ACTIVATIONS}
"""Function to its class in `functions.cuh`, e.g. ``GeluTanh``."""


@functools.cache
def _kernel(name: str, choice: str, wide: bool, more: str) -> cuda.Kernel:
    """Return an instance for the template arguments `choice`; `more` declares parameters."""
    entry = f"{name}<{choice}{', ' if choice else ''}{str(wide).lower()}>"
    declared = f"f32* x, f32* out, i32 T, i32 width{more}"
    return cuda.cpp_kernel(__file__, "activation.cu", entry, declared)


def _launch(name: str, choice: str, more: str, x: Any, out: Any, *args: Any) -> None:
    T, width = out.shape
    if not T * width:
        return
    wide = width % 4 == 0 and cuda.address(x) % 16 == 0 and cuda.address(out) % 16 == 0
    n_blocks = cuda.ceil_div(cuda.ceil_div(width, 4), _THREADS)
    _kernel(name, choice, wide, more)(T * n_blocks, _THREADS, (x, out, T, width, *args))


def elementwise(x: Any, activation: str, out: Any) -> None:
    """Apply one of `FUNCTIONS` to every element."""
    _launch("plain", FUNCTIONS[activation], "", x, out)


def glu(x: Any, activation: str, gate_first: bool, out: Any) -> None:
    """See `nbflow_kernels.glu`; ``"swigluoai"`` with the gate first too."""
    numbers = swigluoai_numbers(activation)
    if numbers is not None:
        assert gate_first
        swigluoai_and_mul(x, *numbers, False, out)
        return
    width = out.shape[1]
    gate, up = (0, width) if gate_first else (width, 0)
    _launch("gated", FUNCTIONS[activation], ", i32 gate, i32 up", x, out, gate, up)


def swigluoai_and_mul(x: Any, alpha: float, limit: float, interleaved: bool, out: Any) -> None:
    """See `nbflow_kernels.swigluoai_and_mul`."""
    choice = str(interleaved).lower()
    _launch("swiglu_oai", choice, ", f32 alpha, f32 limit", x, out, alpha, limit)


def xielu(x: Any, alpha_p: float, alpha_n: float, beta: float, eps: float, out: Any) -> None:
    """See `nbflow_kernels.xielu`, for rows (T, I)."""
    more = ", f32 alpha_p, f32 alpha_n, f32 beta, f32 eps"
    _launch("xielu", "", more, x, out, alpha_p, alpha_n, beta, eps)
