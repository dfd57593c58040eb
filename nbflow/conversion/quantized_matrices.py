"""The matrices of a model before and after quantization, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.checkpoint import open_weights
from nbflow.conversion.importance_names import load_importance
from nbflow.program.read_operand import read_operand
from nbflow.program.records import Operand
from nbflow.quantization.policy import Weights, weight_formats
from nbflow.quantization.prepare import prepare
from nbflow.spec import check, resolve
from nbflow_kernels.errors import UsageError


def quantized_matrices(
    model: str | Path,
    weights: Weights,
    *,
    quantizer: str = "auto",
    importance: str | Path | dict[str, NDArray[Any]] | None = None,
    outliers: float = 0.0,
) -> Iterator[tuple[str, NDArray[np.float32], nk.QuantTensor]]:
    """Yield our name, float values and quantized tensor of each matrix of a weight format.

    Parameters
    ----------
    model, weights, quantizer, importance, outliers
        As for `nbflow.load`.  A quantizer with transforms yields the transformed values.

    Raises
    ------
    UsageError
        As `nbflow.load`.

    Examples
    --------
    >>> name, exact, qt = next(quantized_matrices("tiny_python", "q3h", quantizer="hqq"))
    >>> name, qt.format.name, bool(np.abs(nk.dequantize(qt) - exact).mean() < 0.02)
    ('layers.0.attn.q.weight', 'q3h_b64t1', True)
    """
    formats = weight_formats(weights)
    if formats is None:
        raise UsageError("weights must name a format or a policy file")
    resolved = resolve(model)

    def format_of(name: str) -> str | None:
        return formats.of(name, resolved.spec.shape_of(name))

    with open_weights(resolved.path) as file:
        check(resolved.spec, file)
        known = load_importance(importance, resolved, file)
        prepared = prepare(resolved.spec, file, format_of, quantizer, known, outliers=outliers)
        transformed = prepared.apply_to(file)
        for name, shape in prepared.spec.tensor_shapes().items():
            format = formats.of(name, shape)
            if format is None:
                continue
            exact = read_operand(prepared.spec, transformed, Operand(name)).astype(np.float32)
            yield name, exact, prepared.quantizer.quantize_matrix(name, exact, format)
