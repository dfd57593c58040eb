"""The end of every product: bias and old output, for 16 outputs of one token."""

from __future__ import annotations

from nbflow_kernels.matmul.outputs import write_group as finish

__all__ = ["finish"]
