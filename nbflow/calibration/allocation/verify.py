"""Whether an allocation keeps what it promised: measured on a text, beside single formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nbflow_kernels as nk
from nbflow.calibration.allocation.choose_formats import Allocation
from nbflow.calibration.allocation.divergence import Divergence, Probe


@dataclass(frozen=True)
class Check:
    """What was measured after formats were chosen."""

    measured: Divergence
    """Of the model with the chosen formats."""
    predicted: float | None
    """The divergence that was predicted, if it was in nats."""
    stored: Divergence
    """Of the model as it is stored: divergence 0, and its perplexity."""
    singles: dict[str, Divergence]
    """Format -> of the model with all matrices in it, of those that are no larger."""

    @property
    def best_single(self) -> str | None:
        """The format that loses least of those that are no larger, or None without any."""
        return min(self.singles, key=lambda f: self.singles[f].kld, default=None)


def check_allocation(
    allocation: Allocation, probe: Probe, candidates: Sequence[str], **options: Any
) -> Check:
    """Measure an allocation, and each candidate alone that takes no more bits.

    Parameters
    ----------
    allocation : Allocation
        What was chosen.
    probe : Probe
        The text, better another one than sensitivities were measured on.
    candidates : sequence of str
        Formats to compare with.
    options
        Of `nbflow.load`: encoder, importance, ...

    Examples
    --------
    >>> from nbflow.calibration.allocation import allocate
    >>> probe = Probe("tiny_python", n_tokens=256)
    >>> chosen = allocate("tiny_python", 3.5, ["q3", "q2"], encoder="plain")
    >>> check = check_allocation(chosen, probe, ["q3", "q2"], encoder="plain")
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
    return Check(measured, predicted, probe.stored, singles)
