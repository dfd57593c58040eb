"""Values that another program computed: logits, and the residual stream after each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError

Floats = NDArray[np.floating]


@dataclass
class Recording:
    """Recorded values of one sequence of T tokens."""

    source: str
    """Program that computed them, for messages."""
    ids: NDArray[np.int64]
    """The tokens, (T,)."""
    logits: Floats
    """Logits after each token, (T, V)."""
    embedding: Floats | None = None
    """Input of the first layer, (T, E)."""
    layers: dict[int, Floats] = field(default_factory=dict)
    """Output of layers, (T, E)."""
    parts: dict[int, dict[str, Floats]] = field(default_factory=dict)
    """Outputs of modules within layers by name, (T, E)."""


def read_recording(path: Path) -> Recording:
    """Read an .npz file.

    It holds ``ids`` (T,) and ``logits`` (T, V), and optionally ``hidden`` (L, T, E) or (L + 1, T,
    E): the output of each layer, before the final norm; with L + 1 the input of the first layer
    precedes them.

    Raises
    ------
    UsageError
        If an array is missing or has another shape.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {
                name: file[name] for name in file.files if name in ("ids", "logits", "hidden")
            }
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"cannot read {path} as .npz: {error}") from None
    for name in ("ids", "logits"):
        if name not in arrays:
            raise UsageError(
                f"{path}: needs the arrays ids (T,) and logits (T, V); {name} is missing"
            )
    ids, logits, hidden = arrays["ids"], arrays["logits"], arrays.get("hidden")
    if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"{path}: ids must be whole numbers (T,), got {ids.dtype} {ids.shape}")
    if logits.ndim != 2 or len(logits) != len(ids) or not np.isfinite(logits).all():
        wanted = f"finite numbers ({len(ids)}, V)"
        raise UsageError(f"{path}: logits must be {wanted}, got {logits.dtype} {logits.shape}")
    found = Recording(str(path), ids.astype(np.int64), logits.astype(np.float64))
    if hidden is not None:
        if hidden.ndim != 3 or hidden.shape[1] != len(ids):
            raise UsageError(f"{path}: hidden must be (layers, {len(ids)}, E), got {hidden.shape}")
        found.layers = dict(enumerate(hidden.astype(np.float64)))
    return found


def with_layers(found: Recording, n_layers: int) -> Recording:
    """Return a recording whose `hidden` is divided into embedding and layers."""
    n = len(found.layers)
    if found.embedding is not None or n in (0, n_layers):
        return found
    if n != n_layers + 1:
        raise UsageError(
            f"{found.source}: hidden must have {n_layers} or {n_layers + 1} entries, got {n}"
        )
    found.embedding = found.layers[0]
    found.layers = {i: found.layers[i + 1] for i in range(n_layers)}
    return found
