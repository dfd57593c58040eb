"""Outlier channels and heavy tails of the inputs of matrices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow
from nbflow.calibration.collect import ActivationObserver, check_observable
from nbflow.distributed.comm import SelfComm
from nbflow_experiments.analysis.all_tensor_errors import kind_of, layer_of
from nbflow_experiments.analysis.ratios import Table, ratio, table_of

OUTLIER = 6.0
"""Root mean square of an outlier channel, in medians of the channels'."""
Windows = Sequence[Sequence[int] | NDArray[Any]] | NDArray[Any]


@dataclass
class _Sums:
    """Power sums of the columns of a matrix's inputs."""

    powers: NDArray[np.float64]
    """Sums of x, x^2, x^3 and x^4 of each column (4, K)."""
    largest: float = 0.0
    n_rows: int = 0

    def add(self, x: NDArray[Any]) -> None:
        """Add rows (T, K)."""
        wide = x.astype(np.float64)
        self.powers += np.stack([(wide**k).sum(axis=0) for k in (1, 2, 3, 4)])
        self.largest = max(self.largest, float(np.abs(wide).max(initial=0.0)))
        self.n_rows += len(x)

    def row(self, name: str) -> dict[str, Any]:
        """Return the statistics."""
        n = max(1, self.n_rows * self.powers.shape[1])
        m1, m2, m3, m4 = self.powers.sum(axis=1) / n
        variance = m2 - m1**2
        fourth = m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4
        rms = np.sqrt(self.powers[1] / max(1, self.n_rows))
        ordered = np.sort(self.powers[1])[::-1]
        top = max(1, len(ordered) // 100)
        median = float(np.median(rms))
        return {
            "layer": layer_of(name),
            "tensor": name,
            "kind": kind_of(name),
            "rows": self.n_rows,
            "rms": float(np.sqrt(m2)),
            "crest": ratio(self.largest, float(np.sqrt(m2))),
            "input_kurtosis": ratio(float(fourth), float(variance) ** 2) - 3,
            "channel_ratio": ratio(float(rms.max()), median),
            "outlier_channels": int((rms > OUTLIER * median).sum()),
            "top_percent_share": ratio(float(ordered[:top].sum()), float(ordered.sum())),
        }


def activation_statistics(
    model: str | os.PathLike[str], windows: Windows, *, spec: str | None = None
) -> Table:
    """Return statistics of the inputs of each matrix of the float32 model.

    Parameters
    ----------
    model : str or path
        Model, as `nbflow.load` takes it; on the CPU.
    windows : sequence of array of int, shape (T,)
        Token ids; each window begins with an empty cache.
    spec : str, optional
        As in `nbflow.load`.

    Returns
    -------
    DataFrame
        One row for each input; matrices that share it are represented by the first.
        docs/analysis.md defines the columns.

    Raises
    ------
    UsageError
        If the model does not exist, or is an encoder-decoder model.

    Examples
    --------
    >>> found = activation_statistics("tiny_python", [[0, 5, 7, 9]])
    >>> found.tensor[0], int(found.rows[0]), bool(found.input_kurtosis[0] > -2)
    ('layers.0.attn.q.weight', 4, True)
    """
    found: dict[str, _Sums] = {}

    def add(names: tuple[str, ...], x: NDArray[Any]) -> None:
        if names[0] not in found:
            found[names[0]] = _Sums(np.zeros((4, x.shape[1])))
        found[names[0]].add(x)

    path = os.fspath(model)
    with nbflow.load(path, spec=spec, comm=SelfComm(), weights="f32", kv="f32") as loaded:
        executor = check_observable(loaded)
        executor.observe = ActivationObserver(executor, add)
        run = loaded.logits if loaded.spec.head else loaded.hidden
        for window in windows:
            run(window)
    names = [name for name in found if name.startswith("layers.")]
    return table_of([found[name].row(name) for name in names])
