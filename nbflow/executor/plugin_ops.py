"""Calls of the ops that plugins have registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow.program.records import Op, state_key
from nbflow.spec.plugin_ops import OPS
from nbflow_kernels.errors import UsageError


def plugin_call(
    op: Op, x: np.ndarray, operands: tuple[Any, ...], executor: Any, arrays: Any, out: np.ndarray
) -> Callable[[], None]:
    """Return the call of an op on the rows `x` of a step; an error in it names op and layer."""
    found = OPS[op.attrs["op"]]
    weights = dict(zip(found.weights, operands, strict=True))
    columns = op.attrs.get("columns")
    sequences: tuple[Any, ...] = ()
    if found.state is not None:
        states = executor.states.arrays[state_key(op)]
        sequences = states, arrays.qo_indptr, arrays.state_rows

    def call() -> None:
        given = x if columns is None else np.ascontiguousarray(x[:, slice(*columns)])
        try:
            if found.cpu is not None:
                found.cpu(given, weights, *sequences, out)
            else:
                out[:] = found.reference(given.astype(np.float64), weights, *sequences)
        except Exception as error:
            raise UsageError(
                f"op {found.name!r} of a plugin, layer {op.layer}: {type(error).__name__}: {error}"
            ) from error

    return call
