"""Relative Frobenius error of the quantized weights.

||Q(W) - W|| / ||W|| over all tensors that the engine stores in the weight format (the matrices of
attention and of the feed-forward network), and per tensor in HDF5.  W is the checkpoint's tensor in
float32, after the quantizer's weight transform if it has one, Q the point's quantizer.  Norms,
biases, embedding and head are not quantized and not counted.  Dimensionless and deterministic;
computed once per model and format by one rank.
`stored_bits_per_weight` counts the bytes of these tensors, with the padding of incomplete blocks
and the outliers.
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_experiments import backend
from nbflow_experiments.measures.measure import Array, Context, Measure, MeasureResult, Reading

_ROWS = 256  # rows summed at a time, so that no float64 copy of a whole tensor is made


def run(context: Context) -> MeasureResult:
    """Compare every quantized tensor with the checkpoint's; stored formats have no error."""
    if not context.leads:
        return MeasureResult()
    model, weights = str(context.config["model"]), str(context.config["weights"])
    if weights == backend.STORED:
        bits = backend.stored_bits(model)
        return MeasureResult([Reading("stored_bits_per_weight", bits, "bit", 1)], {})
    names: list[str] = []
    errors: list[float] = []
    total_error = total_norm = 0.0
    n_weights = n_bytes = 0
    config = context.config
    how = float(config["outliers"]), str(config["quantizer"]), str(config["importance"])
    for name, exact, approximate, size in backend.weight_pairs(model, weights, *how):
        error, norm = squares(exact, approximate)
        names.append(name)
        errors.append(ratio(error, norm))
        total_error, total_norm = total_error + error, total_norm + norm
        n_weights, n_bytes = n_weights + exact.size, n_bytes + size
    worst = max(errors, default=math.nan)
    return MeasureResult(
        [
            Reading("weight_error_relative", ratio(total_error, total_norm), "1", n_weights),
            Reading("weight_error_worst_tensor_relative", worst, "1", len(errors)),
            Reading(
                "stored_bits_per_weight", ratio(8.0 * n_bytes, n_weights, 1.0), "bit", n_weights
            ),
        ],
        {
            "weight_error_relative": Array(
                np.array(errors), "1", tuple(names), "||Q(W) - W|| / ||W|| of one tensor"
            )
        },
    )


def squares(exact: np.ndarray, approximate: np.ndarray) -> tuple[float, float]:
    """Return the squared Frobenius norms of the difference and of `exact`, in float64."""
    error = norm = 0.0
    for a in range(0, len(exact), _ROWS):
        block = exact[a : a + _ROWS].astype(np.float64)
        norm += float(np.sum(block**2))
        error += float(np.sum((approximate[a : a + _ROWS] - block) ** 2))
    return error, norm


def ratio(part: float, whole: float, power: float = 0.5) -> float:
    """Return (part / whole) ** power; 0 / 0 is 0."""
    if whole == 0:
        return 0.0 if part == 0 else math.inf
    return float((part / whole) ** power)


MEASURE = Measure("weight_error", "format", run, str(__doc__))
