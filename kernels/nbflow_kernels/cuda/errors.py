"""Errors of devices and compilers, as opposed to wrong arguments."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A compiler refused a kernel; the message is its log."""


class CudaError(RuntimeError):
    """The CUDA driver returned an error."""
