"""What goes into the matrices of a model while it reads a text: the facts encoders weigh with."""

from __future__ import annotations

from nbflow.calibration.collect import ActivationStats, collect
from nbflow.calibration.hessian import write_moments
from nbflow.calibration.imatrix_files import merge, write_inputs

__all__ = ["ActivationStats", "collect", "merge", "write_inputs", "write_moments"]
