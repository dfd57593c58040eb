"""Verification of an allocation: divergence on a text, compared with single formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nbflow_kernels as nk
from nbflow.calibration.allocation.choose_formats import Allocation
from nbflow.calibration.allocation.divergence import Divergence, DivergenceProbe


@dataclass(frozen=True)
class AllocationReport:
    """Measured divergence of an allocation and of single formats."""

    measured: Divergence
    """Divergence with the chosen formats."""
    predicted: float | None
    """Predicted divergence, if it was in nats."""
    stored: Divergence
    """Divergence (0) and perplexity of the stored model."""
    singles: dict[str, Divergence]
    """Format -> divergence with all matrices in it, for formats of at most the same size."""

    @property
    def best_single(self) -> str | None:
        """Format in `singles` with the least divergence, or None."""
        return min(self.singles, key=lambda f: self.singles[f].kld, default=None)


def check_allocation(
    allocation: Allocation, probe: DivergenceProbe, candidates: Sequence[str], **options: Any
) -> AllocationReport:
    """Measure an allocation, and each candidate of at most the same size.

    Parameters
    ----------
    allocation : Allocation
        The chosen formats.
    probe : DivergenceProbe
        The text, preferably not the one used for sensitivities.
    candidates : sequence of str
        Formats to compare with.
    options
        Of `nbflow.load`: quantizer, importance, ...

    Examples
    --------
    >>> from nbflow.calibration.allocation import allocate
    >>> probe = DivergenceProbe("tiny_python", n_tokens=256)
    >>> chosen = allocate("tiny_python", 3.5, ["q3", "q2"], quantizer="reference")
    >>> check = check_allocation(chosen, probe, ["q3", "q2"], quantizer="reference")
    >>> check.best_single, check.measured.kld < check.singles["q2_b32t1b"].kld
    ('q2_b32t1b', True)
    """
    singles = {}
    for name in candidates:
        format = nk.FORMATS[name]
        if format.bits_per_weight <= allocation.bits_per_weight * (1 + 1e-12):
            singles[format.name] = probe.measure(weights=format.name, **options)
    measured = probe.measure(weights=allocation.weight_formats, **options)
    predicted = allocation.predicted if allocation.sensitivity == "kld" else None
    return AllocationReport(measured, predicted, probe.stored, singles)
