"""Check of decay rates."""

from __future__ import annotations

from typing import Any

from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.errors import UsageError


def check_log_decays(name: str, values: Any, sign: int) -> None:
    """Raise if a state would grow: ``sign * values`` above 0; not checked in device memory."""
    if not is_cuda(values) and values.size and (sign * values).max() > 0:
        wanted = "negative or 0" if sign > 0 else "positive or 0"
        worst = values.max() if sign > 0 else values.min()
        raise UsageError(f"{name} must be {wanted}, so that states decay, got {worst}")
