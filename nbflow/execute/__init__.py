"""Executors of a program: `cpu` (Numba kernels) and `reference` (NumPy float64, op by op)."""

from nbflow.execute.cpu import CpuExecutor
from nbflow.execute.reference import ReferenceExecutor
from nbflow.execute.step import Step, make_step
from nbflow.execute.weights import RankWeights

__all__ = ["CpuExecutor", "RankWeights", "ReferenceExecutor", "Step", "make_step"]
