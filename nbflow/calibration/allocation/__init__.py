"""Different formats for different matrices, under a budget of stored bytes."""

from __future__ import annotations

from nbflow.calibration.allocation.choose_formats import Allocation, allocate
from nbflow.calibration.allocation.knapsack import solve
from nbflow.calibration.allocation.verify import Check, check_allocation

__all__ = ["Allocation", "Check", "allocate", "check_allocation", "solve"]
