"""Activation statistics collected on calibration text, used by the quantizers."""

from __future__ import annotations

from nbflow.calibration.collect import ActivationStats, collect_stats
from nbflow.calibration.hessian import write_hessians
from nbflow.calibration.imatrix_files import merge, write_stats

__all__ = ["ActivationStats", "collect_stats", "merge", "write_hessians", "write_stats"]
