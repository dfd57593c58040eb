"""Different formats for different matrices, under a budget of stored bytes."""

from __future__ import annotations

from nbflow.allocation.check import Check, check_allocation
from nbflow.allocation.choose import Allocation, allocate
from nbflow.allocation.knapsack import solve

__all__ = ["Allocation", "Check", "allocate", "check_allocation", "solve"]
