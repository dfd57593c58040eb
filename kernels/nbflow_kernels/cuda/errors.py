"""What goes wrong with devices and compilers, not with a user's arguments."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A compiler refused a kernel; the message is its log."""


class CudaError(RuntimeError):
    """The CUDA driver returned an error."""
