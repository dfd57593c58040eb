"""Layer-by-layer errors on real activations: residual stream and matmul outputs.

One layer is in memory at a time.  All windows of the text pass through it in float32, and twice
more per change: from the exact input (*isolated*: error of this layer alone) and from the output of
the changed layers before it (*cumulative*).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.calibration.collect import ActivationObserver
from nbflow.distributed.device import find_device
from nbflow_experiments.analysis.all_tensor_errors import kind_of, layer_of
from nbflow_experiments.analysis.changes import Change, as_changes
from nbflow_experiments.analysis.histograms import relative_counts
from nbflow_experiments.analysis.kv_cache_error import CacheErrors
from nbflow_experiments.analysis.layer_programs import Stage, make_steps, predicts, stage_programs
from nbflow_experiments.analysis.logit_comparison import Comparison
from nbflow_experiments.analysis.ratios import Table, ratio, relative_error, table_of
from nbflow_experiments.analysis.token_errors import token_rows
from nbflow_experiments.analysis.treatments import Checkpoint, Treatment
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError

Floats = NDArray[np.float32]
Windows = Sequence[Sequence[int] | NDArray[Any]] | NDArray[Any]


@dataclass
class LayerErrors:
    """Result of `layer_errors`."""

    layers: Table
    """One row per change and layer."""
    modules: Table
    """One row per weight change and matrix; experts are pooled by kind."""
    models: Table
    """One row per change: divergence of the whole model."""
    tokens: Table = None
    """One row per change and group of tokens, by position and by frequency."""
    token_counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """For each change, histograms (layers, bins) of the tokens' cumulative relative errors, between
    `nbflow_experiments.analysis.histograms.RELATIVE_EDGES`."""


def layer_errors(
    model: str | os.PathLike[str],
    changes: Sequence[str | Treatment | Change],
    windows: Windows,
    *,
    spec: str | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> LayerErrors:
    """Measure the residual-stream error of changes after every layer.

    Memory: three float32 copies of one layer and its changed matrices, and per change the residual
    streams of all windows (4 bytes x tokens x hidden size); with a cache format also one layer's
    keys, values and attention outputs of all windows.

    Parameters
    ----------
    model : str or path
        Model, as `nbflow.load` takes it.
    changes : sequence of str, Treatment or Change
        Weight formats, or other deviations from the float32 model.
    windows : sequence of array of int, shape (T,)
        Token ids; each window begins with an empty cache.  Its last token is predicted only.
    spec : str, optional
        As in `nbflow.load`.
    device : str
        ``cpu``, ``cuda``, ``cuda:N`` or ``emulator``: device that runs the stages.  Inputs of
        matrices are observed on the CPU.
    progress : callable, optional
        Called with the number of stages done and of all.

    Returns
    -------
    LayerErrors
        docs/analysis.md defines the columns.

    Raises
    ------
    UsageError
        If the model or format does not exist, or a window does not fit the model.

    Examples
    --------
    >>> found = layer_errors("tiny_python", ["q4"], [[0, 5, 7, 9, 11, 300, 2]])
    >>> found.layers.columns[:4].tolist(), len(found.layers), len(found.modules)
    (['change', 'layer', 'isolated_error', 'isolated_update_error'], 4, 28)
    """
    wanted, place = as_changes(changes), find_device(device, graphs=False)
    if not place.on_host and any(change.kv != "f32" for change in wanted):
        raise UsageError(f"formats of the cache are analysed on device 'cpu', got {device!r}")
    with Checkpoint(model, spec) as checkpoint:
        walk = _Walk(checkpoint, wanted, windows)
        programs = stage_programs(checkpoint.spec)
        for i, program in enumerate(programs):
            walk.through(Stage.read(checkpoint, program, walk.tables, place))
            if progress is not None:
                progress(i + 1, len(programs))
    return walk.found()


class _Walk:
    """Exact and changed residual streams of all windows, advanced layer by layer."""

    def __init__(self, checkpoint: Checkpoint, changes: list[Change], windows: Windows) -> None:
        self._checkpoint = checkpoint
        self._changes = changes
        self._steps = make_steps(checkpoint.spec, [w[:-1] for w in windows])
        self._targets = [np.asarray(w[1:], np.int32) for w in windows]
        self.tables: dict[Any, Any] = {}
        self._exact: list[Floats] = []
        self._changed: dict[str, list[Floats]] = {}
        self._lost = {c.label: 0.0 for c in changes}  # squared isolated errors of the layers before
        self._before: dict[str, float] = {}
        self._layers: list[dict[str, Any]] = []
        self._modules: list[dict[str, Any]] = []
        self._models: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any]] = []
        self._counts: dict[str, list[NDArray[np.int64]]] = {c.label: [] for c in changes}

    def found(self) -> LayerErrors:
        """Return the tables."""
        order = {c.label: i for i, c in enumerate(self._changes)}
        rows = sorted(self._layers, key=lambda r: order[r["change"]])
        modules = sorted(self._modules, key=lambda r: order[r["change"]])
        counts = {label: np.stack(each) for label, each in self._counts.items()}
        models, tokens = table_of(self._models), table_of(self._tokens)
        return LayerErrors(table_of(rows), table_of(modules), models, tokens, counts)

    def through(self, stage: Stage) -> None:
        """Advance all streams by one stage."""
        if not self._exact:
            self._exact = [stage.run(step) for step in self._steps]
            self._changed = {c.label: self._exact for c in self._changes}
        elif stage.layer >= 0:
            self._layer(stage)
        elif predicts(self._checkpoint.spec):
            self._head(stage)

    def _layer(self, stage: Stage) -> None:
        after = []
        caches = CacheErrors(self._checkpoint.spec.head_dim)
        for step, x in zip(self._steps, self._exact, strict=True):
            after.append(stage.run(step, x))
            if any(change.kv != "f32" for change in self._changes):
                caches.keep(stage, step)
        for change in self._changes:
            self._change(stage, change, after, caches)
        self._exact = after

    def _change(
        self, stage: Stage, change: Change, after: list[Floats], caches: CacheErrors
    ) -> None:
        """Advance the streams of a change by one layer; `after` are the exact outputs."""
        matrices = change.encode(self._checkpoint, stage)
        if matrices:
            self._modules += self._module_rows(stage, change, matrices)
        isolated, cumulative = _Error(), _Error()
        streams, attention = [], []
        with change.applied(stage, matrices) as changed:
            for i, step in enumerate(self._steps):
                own = changed.run(step, self._exact[i])
                if change.kv != "f32":
                    attention.append(changed.buffer("a", len(step.ids)))
                isolated.add(after[i], own, self._exact[i])
                streams.append(changed.run(step, self._changed[change.label][i]))
                cumulative.add(after[i], streams[-1], self._exact[i])
        self._changed[change.label] = streams
        row = self._row(change.label, stage.layer, isolated, cumulative)
        if change.kv != "f32":
            row |= caches.row(change.kv, attention)
        self._layers.append(row)
        self._counts[change.label].append(relative_counts(cumulative.of_tokens))

    def _row(self, label: str, layer: int, isolated: _Error, cumulative: _Error) -> dict[str, Any]:
        self._lost[label] += isolated.lost
        independent = relative_error(self._lost[label], cumulative.norm)
        before = self._before.get(label, np.nan)
        self._before[label] = cumulative.relative
        return {
            "change": label,
            "layer": layer,
            "isolated_error": isolated.relative,
            "isolated_update_error": relative_error(isolated.lost, isolated.update),
            "cumulative_error": cumulative.relative,
            "independent_error": independent,
            "amplification": ratio(cumulative.relative, independent),
            "growth": ratio(cumulative.relative, before),
            "cosine": cumulative.cosine,
            "isolated_token_median": float(np.median(isolated.of_tokens)),
            "cumulative_token_median": float(np.median(cumulative.of_tokens)),
            "cumulative_token_p99": float(np.percentile(cumulative.of_tokens, 99)),
            "hidden_rms": float(np.sqrt(cumulative.norm / cumulative.n)),
            "update_rms": float(np.sqrt(cumulative.update / cumulative.n)),
            "tokens": len(cumulative.of_tokens),
        }

    def _module_rows(
        self, stage: Stage, change: Change, matrices: dict[str, QuantTensor]
    ) -> list[dict[str, Any]]:
        """Re-run the exact stage and multiply its matmul inputs with the weight errors."""
        products, stage = _Products(self._checkpoint, matrices), stage.on_host()
        stage.observe(lambda executor: ActivationObserver(executor, products.add))
        for step, x in zip(self._steps, self._exact, strict=True):
            stage.run(step, x)
        stage.observe(None)
        return [{"change": change.label, **row} for row in products.rows()]

    def _head(self, stage: Stage) -> None:
        for change in self._changes:
            comparison = Comparison()
            with change.applied(stage, {}) as changed:
                for i, step in enumerate(self._steps):
                    exact = stage.run(step, self._exact[i])
                    logits = changed.run(step, self._changed[change.label][i])
                    comparison.add(exact, logits, self._targets[i])
            self._models.append({"change": change.label, **comparison.row()})
            self._tokens += token_rows(change.label, comparison, self._targets)


class _Error:
    """Squared errors of a residual stream, summed over windows."""

    def __init__(self) -> None:
        self.lost = self.norm = self.update = self._product = self._own = 0.0
        self.n = 0
        self._tokens: list[NDArray[np.float64]] = []

    def add(self, exact: Floats, found: Floats, before: Floats) -> None:
        """Add the states of one window after a layer, and the exact ones before it."""
        values = exact.astype(np.float64)
        lost = np.square(found - values).sum(axis=1)
        norm = np.square(values).sum(axis=1)
        self.lost += float(lost.sum())
        self.norm += float(norm.sum())
        self.update += float(np.square(values - before).sum())
        self._product += float(np.sum(values * found))
        self._own += float(np.square(found, dtype=np.float64).sum())
        self.n += values.size
        with np.errstate(divide="ignore", invalid="ignore"):
            self._tokens.append(np.where(lost == 0, 0.0, np.sqrt(lost / norm)))

    @property
    def relative(self) -> float:
        """Return the error over the norm of the exact states."""
        return relative_error(self.lost, self.norm)

    @property
    def cosine(self) -> float:
        """Return the cosine of all states as one vector."""
        return ratio(self._product, float(np.sqrt(self.norm * self._own)))

    @property
    def of_tokens(self) -> NDArray[np.float64]:
        """Return the relative error of each token."""
        return np.concatenate(self._tokens)


class _Products:
    """Matmul errors ||X (W - Q).T|| / ||X W.T|| for activation rows X."""

    def __init__(self, checkpoint: Checkpoint, matrices: dict[str, QuantTensor]) -> None:
        self._exact = {name: checkpoint.matrix(name) for name in matrices}
        self._error = {
            name: nk.dequantize(matrices[name]) - exact for name, exact in self._exact.items()
        }
        self._sums: dict[str, NDArray[np.float64]] = {}

    def add(self, names: tuple[str, ...], x: NDArray[Any]) -> None:
        """Add activation rows (T, K) of some matrices."""
        for name in names:
            if name in self._exact:
                exact, error = self._exact[name], self._error[name]
                group = f"layers.{layer_of(name)}.{kind_of(name)}" if ".moe." in name else name
                sums = self._sums.setdefault(group, np.zeros(6))
                sums += [
                    _squares(x @ error.T),
                    _squares(x @ exact.T),
                    _squares(error),
                    _squares(exact),
                    _squares(x),
                    x.size,
                ]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per matrix; experts are pooled by kind."""
        return [
            {
                "layer": layer_of(name),
                "tensor": name,
                "kind": kind_of(name),
                "output_error": relative_error(lost, norm),
                "weight_error": relative_error(weight_lost, weight_norm),
                "gain": ratio(relative_error(lost, norm), relative_error(weight_lost, weight_norm)),
                "input_rms": float(np.sqrt(inputs / n)) if n else np.nan,
            }
            for name, (lost, norm, weight_lost, weight_norm, inputs, n) in self._sums.items()
        ]


def _squares(array: NDArray[Any]) -> float:
    """Return the sum of squares in float64."""
    values = array.astype(np.float64).ravel()
    return float(values @ values)
