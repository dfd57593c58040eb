"""Mixed-precision allocation: a format per matrix within a byte budget."""

from __future__ import annotations

from nbflow.calibration.allocation.choose_formats import Allocation, allocate
from nbflow.calibration.allocation.knapsack import solve
from nbflow.calibration.allocation.verify import AllocationReport, check_allocation

__all__ = ["Allocation", "AllocationReport", "allocate", "check_allocation", "solve"]
