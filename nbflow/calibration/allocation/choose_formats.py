"""Mixed-precision allocation: choose a format per matrix with the least loss within a byte budget.

The loss is that of `nbflow.calibration.allocation.sensitivity`, added over the matrices.
`nbflow.calibration.allocation.knapsack` chooses the formats by their stored bytes.  Additive
losses are an approximation, which `nbflow.calibration.allocation.check_allocation` verifies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.calibration.allocation.knapsack import solve
from nbflow.calibration.allocation.sensitivity import (
    Progress,
    Sensitivity,
    matrix_errors,
    with_slopes,
)
from nbflow.quantization.policy import WeightFormats, write_policy
from nbflow.quantization.prepare import parse_quantizer
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers import AUTO, DAMPING


@dataclass(frozen=True)
class Allocation:
    """A format for each matrix."""

    formats: dict[str, str]
    budget_bytes: int
    n_bytes: int
    n_weights: int
    predicted: float
    """Predicted loss: nats per token if measured, else the sum of relative errors."""
    sensitivity: str
    """Model of the loss: "error" or "kld"."""
    errors: dict[str, dict[str, float]]
    """Our name of a matrix -> format -> relative squared error of its outputs."""
    slopes: dict[str, float]
    """Our name of a matrix -> loss of the model for a relative squared error of 1."""

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a weight, over all matrices."""
        return 8 * self.n_bytes / self.n_weights

    @property
    def weight_formats(self) -> WeightFormats:
        """Formats for `weights` of `nbflow.load`."""
        return WeightFormats(tuple(self.formats.items()), self.facts)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the table ``[policy]`` of a policy file."""
        return {
            "bits_per_weight": self.bits_per_weight,
            "stored_bytes": self.n_bytes,
            "budget_bytes": self.budget_bytes,
            "sensitivity": self.sensitivity,
            "predicted_loss": self.predicted,
        }

    def write(self, out: str | os.PathLike[str]) -> None:
        """Write a policy file (`nbflow.quantization.policy`)."""
        write_policy(out, self.formats, self.facts)


def allocate(
    model: str | Path,
    bits_per_weight: float | Sequence[float],
    candidates: Sequence[str],
    *,
    quantizer: str = "auto",
    importance: str | Path | dict[str, NDArray[Any]] | None = None,
    act_order: bool = False,
    damping: float = DAMPING,
    sensitivity: str = "error",
    probe: DivergenceProbe | None = None,
    spec: str | Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Choose the format of each matrix of a model.

    Parameters
    ----------
    model : str or path
        As for `nbflow.load`.
    bits_per_weight : float or sequence of float
        Stored bits per weight, including scales, over the quantized matrices.
    candidates : sequence of str
        Formats to choose from.
    quantizer, importance, act_order, damping
        Quantizer of the matrices, as for `nbflow.load`.  The transform "awq" is left out here, as
        it depends on the formats.
    sensitivity : {"error", "kld"}
        "error" weighs all matrices alike; "kld" measures the divergence on a text for each matrix,
        one run of the model each.
    probe : DivergenceProbe, optional
        The text, for "kld".
    spec : path, optional
        A spec file, as for `nbflow.load`.
    progress : callable, optional
        Called with the name of the phase, the number of matrices done, and the total.

    Returns
    -------
    Allocation, or a list of them
        For each number of bits.

    Raises
    ------
    UsageError
        If a name is unknown, a budget is below the smallest format, or `probe` is missing.

    Examples
    --------
    >>> chosen = allocate("tiny_python", 3.75, ["q3", "q2"], quantizer="reference")
    >>> chosen.bits_per_weight <= 3.75, sorted(set(chosen.formats.values()))
    (True, ['q2_b32t1b', 'q3_b32t1b'])
    """
    if sensitivity not in ("error", "kld"):
        raise UsageError(f"sensitivity must be 'error' or 'kld', got {sensitivity!r}")
    if sensitivity == "kld" and probe is None:
        raise UsageError("sensitivity 'kld' needs a text: --text FILE (probe=)")
    names = [nk.FORMATS[name].name for name in candidates]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"candidates must be formats, each once, got {', '.join(candidates)}")
    budgets = bits_per_weight if isinstance(bits_per_weight, Sequence) else [bits_per_weight]
    if not budgets or any(not 0 < float(bits) <= 64 for bits in budgets):
        raise UsageError(f"bits_per_weight must lie in 0..64, got {bits_per_weight}")
    transforms, last = parse_quantizer(quantizer)
    last = "search" if last == AUTO else last  # the loss is modelled by squared errors
    options: dict[str, Any] = {
        "quantizer": "+".join([*(t for t in transforms if t != "awq"), last]),
        "importance": importance, "act_order": act_order, "damping": damping,
    }  # fmt: skip
    measured = matrix_errors(model, spec, names, options, progress)
    if probe is not None and sensitivity == "kld":
        options["spec"] = spec
        middle = min(names, key=lambda f: abs(nk.FORMATS[f].bits_per_weight - float(budgets[0])))
        measured = with_slopes(measured, middle, probe, options, progress)
    found = [_chosen(measured, names, sensitivity, float(bits)) for bits in budgets]
    return found if isinstance(bits_per_weight, Sequence) else found[0]


def _chosen(
    measured: Sensitivity,
    names: Sequence[str],
    sensitivity: str,
    bits: float,
) -> Allocation:
    """Solve for one budget."""
    shapes, slopes = measured.shapes, measured.slopes
    costs = np.array([[slopes[m] * measured.errors[m][f] for f in names] for m in shapes])
    sizes = np.array([[stored_bytes(shape, f) for f in names] for shape in shapes.values()])
    n_weights = sum(math.prod(shape) for shape in shapes.values())
    budget = int(bits * n_weights / 8)
    try:
        chosen = solve(costs, sizes, budget)
    except UsageError as error:
        raise UsageError(f"bits_per_weight={bits:g}: {error}") from error
    at = np.arange(len(shapes)), chosen
    return Allocation(
        formats={m: names[j] for m, j in zip(shapes, chosen, strict=True)},
        budget_bytes=budget,
        n_bytes=int(sizes[at].sum()),
        n_weights=n_weights,
        predicted=float(costs[at].sum()),
        sensitivity=sensitivity,
        errors=measured.errors,
        slopes=slopes,
    )


def stored_bytes(shape: Sequence[int], format: str) -> int:
    """Return the bytes of a matrix in a format."""
    chosen = nk.FORMATS[format]
    return shape[0] * chosen.row_blocks(shape[1]) * chosen.block_bytes
