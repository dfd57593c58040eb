"""Mixed-precision allocation: a format per matrix within a byte budget, or for a machine."""

from __future__ import annotations

from nbflow.calibration.allocation.choose_formats import Allocation, allocate
from nbflow.calibration.allocation.joint_plan import JointPlan, plan_jointly
from nbflow.calibration.allocation.knapsack import solve
from nbflow.calibration.allocation.sensitivity import (
    Sensitivity,
    measure_sensitivity,
    read_sensitivity,
)
from nbflow.calibration.allocation.verify import AllocationReport, check_allocation

__all__ = [
    "Allocation",
    "AllocationReport",
    "JointPlan",
    "Sensitivity",
    "allocate",
    "check_allocation",
    "measure_sensitivity",
    "plan_jointly",
    "read_sensitivity",
    "solve",
]
