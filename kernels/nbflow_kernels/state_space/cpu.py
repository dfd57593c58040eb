"""State-space layers on the CPU: Mamba-2 head by head, Mamba-1 by blocks of 16 channels."""

from __future__ import annotations

from nbflow_kernels.state_space.cpu_mamba1 import mamba1_scan
from nbflow_kernels.state_space.cpu_mamba2 import mamba2_scan

__all__ = ["mamba1_scan", "mamba2_scan"]
