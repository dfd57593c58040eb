"""nbflow_ptx: run and check CUDA kernels on a computer without a GPU.

It executes PTX, the assembly both Numba CUDA and NVRTC (CUDA C++) produce, with NumPy, and
reports out-of-bounds accesses, races, deadlocks and reads of uninitialised memory, with the source
line.  NumPy is all it needs; `launch` of a Numba kernel also needs ``numba-cuda``.
"""

from nbflow_ptx.checks import NO_CHECKS, Checks
from nbflow_ptx.emulator import Emulator, Result, out
from nbflow_ptx.errors import (
    Finding,
    KernelFault,
    LaunchError,
    MissingToolError,
    ParseError,
    PtxError,
    UnsupportedInstruction,
)
from nbflow_ptx.lint import KernelFacts, LintReport, lint
from nbflow_ptx.memory.device import Allocation, Device
from nbflow_ptx.numba_kernels import compile_kernel, launch
from nbflow_ptx.parsing.parser import parse

__all__ = [
    "NO_CHECKS",
    "Allocation",
    "Checks",
    "Device",
    "Emulator",
    "Finding",
    "KernelFacts",
    "KernelFault",
    "LaunchError",
    "LintReport",
    "MissingToolError",
    "ParseError",
    "PtxError",
    "Result",
    "UnsupportedInstruction",
    "compile_kernel",
    "launch",
    "lint",
    "out",
    "parse",
]
