"""Attribution of the error to matrices: one swapped at a time, and one kept at a time.

The float32 model and the quantized matrices are in memory together.  Windows of the text are taken
one after the other; what stands before a swapped matrix is computed once for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.executor import Step
from nbflow.quantization.policy import is_quantized
from nbflow_experiments.analysis.all_tensor_errors import as_treatments, kind_of, layer_of
from nbflow_experiments.analysis.layer_errors import Windows
from nbflow_experiments.analysis.layer_programs import Stage, make_steps, predicts, stage_programs
from nbflow_experiments.analysis.logit_comparison import Comparison
from nbflow_experiments.analysis.ratios import Table, ratio, table_of
from nbflow_experiments.analysis.treatments import Checkpoint, Treatment
from nbflow_experiments.scoring.estimates import estimate_mean
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError, unknown_name

Slot = tuple[int, str]
"""A use of a matrix: stage and our name; a tied embedding has two."""
BY = ("tensor", "layer", "kind")
"""Units of the attribution: weights that are swapped together."""


@dataclass(frozen=True)
class Unit:
    """Matrices that are swapped together."""

    by: str
    name: str
    slots: frozenset[Slot]

    @property
    def first(self) -> int:
        """Return the first stage that it is in."""
        return min(stage for stage, _ in self.slots)


@dataclass
class Attribution:
    """Result of `attribution`."""

    units: Table
    """A row for each format, way of grouping, and unit."""
    sums: Table
    """A row for each format and way of grouping: the whole, the sum of its parts, the rest."""


def attribution(
    model: str | os.PathLike[str],
    weights: Sequence[str | Treatment],
    windows: Windows,
    *,
    by: Sequence[str] = BY,
    complement: bool = True,
    spec: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Attribution:
    """Measure what the divergence of a quantized model is made of.

    In memory are the float32 model, its matrices in one format, and of one window the residual
    streams after every layer and the logits.

    Parameters
    ----------
    model : str or path
        What `nbflow.load` takes.
    weights : sequence of str or Treatment
        Formats of the weights.
    windows : sequence of array of int, shape (T,)
        Token ids; each window begins with an empty cache.  Its last token is predicted only.
    by : sequence of {"tensor", "layer", "kind"}
        What is swapped together: each matrix, those of a layer, those of one kind (q, k, v, o,
        gate, up, down).  The embedding and the head, which a weight format does not apply to by
        itself, are swapped one by one with "tensor" and "kind".  Experts are swapped together.
    complement : bool
        Whether each unit is also kept in float32 while everything else is quantized.
    spec : str, optional
        As in `nbflow.load`.
    progress : callable, optional
        Called with the number of runs of a window done and of all.

    Returns
    -------
    Attribution
        docs/analysis.md defines the columns.

    Raises
    ------
    UsageError
        If the model, format or grouping does not exist, a window does not fit the model, or the
        model gives no logits.

    Examples
    --------
    >>> found = attribution("tiny_python", ["q2"], [[0, 5, 7, 9]], by=["layer"], complement=False)
    >>> found.units.unit.tolist(), bool((found.units.kld_mean_nats > 0).all())
    (['layers.0', 'layers.1', 'layers.2', 'layers.3'], True)
    """
    for name in by:
        if name not in BY:
            raise unknown_name("grouping", name, BY)
    treatments = as_treatments(weights)
    with Checkpoint(model, spec) as checkpoint:
        if not predicts(checkpoint.spec):
            raise UsageError(f"{checkpoint.spec.name} predicts no next token; nothing to compare")
        resident = _Resident(checkpoint, windows)
        units = _units(checkpoint, resident.stages, by)
        runs = _Progress(progress, len(treatments) * len(windows), units, complement)
        rows, sums = [], []
        for treatment in treatments:
            resident.encode(treatment, {slot for unit in units for slot in unit.slots})
            scores = resident.score(units, complement, runs)
            rows += _unit_rows(treatment.label, units, scores, resident)
            sums += _sum_rows(treatment.label, units, scores)
    return Attribution(table_of(rows), table_of(sums))


def _units(checkpoint: Checkpoint, stages: Sequence[Stage], by: Sequence[str]) -> list[Unit]:
    """Return what is swapped together, in the order of the model."""
    shapes = checkpoint.spec.tensor_shapes()
    found: dict[tuple[str, str], list[Slot]] = {}
    for number, stage in enumerate(stages):
        for name in stage.tensors:
            slot, kind = (number, name), kind_of(name)
            if is_quantized(name, shapes[name]):
                layer = f"layers.{layer_of(name)}"
                tensor = f"{layer}.{kind}" if ".moe." in name else name
                names = {"tensor": tensor, "layer": layer, "kind": kind}
            elif stage.layer < 0 and kind in ("embedding", "head"):
                use = "embedding" if number == 0 else "head"  # a tied embedding is both
                names = {"tensor": use, "kind": use}
            else:
                continue
            for grouping in by:
                if grouping in names:
                    found.setdefault((grouping, names[grouping]), []).append(slot)
    return [
        Unit(grouping, name, frozenset(slots))
        for wanted in by
        for (grouping, name), slots in found.items()
        if grouping == wanted
    ]


class _Progress:
    """Counts runs of a window."""

    def __init__(
        self,
        tell: Callable[[int, int], None] | None,
        n_windows: int,
        units: Sequence[Unit],
        complement: bool,
    ) -> None:
        self._tell, self._done = tell, 0
        self._all = n_windows * len(units) * (2 if complement else 1)

    def step(self) -> None:
        """Count one."""
        self._done += 1
        if self._tell is not None:
            self._tell(self._done, self._all)


@dataclass
class _Scores:
    """Comparisons with the float32 model."""

    whole: Comparison
    """Divergence of the model with everything quantized."""
    alone: dict[Unit, Comparison]
    """With only this unit quantized."""
    without: dict[Unit, Comparison]
    """With everything quantized but this unit."""


class _Resident:
    """All stages of a model in float32, and matrices to put in their place."""

    def __init__(self, checkpoint: Checkpoint, windows: Windows) -> None:
        tables: dict[Any, Any] = {}
        self._checkpoint = checkpoint
        self._steps = make_steps(checkpoint.spec, [window[:-1] for window in windows])
        self._targets = [np.asarray(window[1:], np.int32) for window in windows]
        programs = stage_programs(checkpoint.spec)
        self.stages = [Stage.read(checkpoint, program, tables) for program in programs]
        self.matrices: dict[Slot, QuantTensor] = {}

    def encode(self, treatment: Treatment, extra: Iterable[Slot]) -> None:
        """Make the quantized matrices: those that a format applies to, and some more."""
        self.matrices.clear()
        shapes = self._checkpoint.spec.tensor_shapes()
        slots = {(i, name) for i, stage in enumerate(self.stages) for name in stage.tensors}
        self.everything = {s for s in slots if is_quantized(s[1], shapes[s[1]])}
        for number, name in sorted(self.everything | set(extra)):
            exact = self.stages[number].shown(name, self._checkpoint.matrix(name))
            self.matrices[number, name] = treatment.encode(name, exact)

    def score(self, units: Sequence[Unit], complement: bool, progress: _Progress) -> _Scores:
        """Compare with the float32 model: everything, each unit alone, everything but it."""
        scores = _Scores(
            Comparison(),
            {unit: Comparison() for unit in units},
            {u: Comparison() for u in units if complement and u.slots <= self.everything},
        )
        for step, targets in zip(self._steps, self._targets, strict=True):
            exact = self._streams(step, set())
            for unit, found in scores.alone.items():
                logits = self._from(unit.first, step, exact, unit.slots)
                found.add(exact[-1], logits, targets)
                progress.step()
            quantized = self._streams(step, self.everything)
            scores.whole.add(exact[-1], quantized[-1], targets)
            for unit in units if complement else ():
                if unit in scores.without:
                    logits = self._from(unit.first, step, quantized, self.everything - unit.slots)
                    scores.without[unit].add(exact[-1], logits, targets)
                progress.step()
        return scores

    def _streams(self, step: Step, slots: set[Slot]) -> list[NDArray[np.float32]]:
        """Return what comes out of every stage with these slots quantized."""
        streams: list[NDArray[np.float32]] = []
        for number, stage in enumerate(self.stages):
            stage.use(self._of(number, slots))
            streams.append(stage.run(step, streams[-1] if streams else None))
        return streams

    def _from(
        self, first: int, step: Step, before: Sequence[NDArray[np.float32]], slots: Iterable[Slot]
    ) -> NDArray[np.float32]:
        """Return the logits with these slots quantized, from a stage on; all before is the same."""
        wanted = set(slots)
        x = before[first - 1] if first else None
        for number in range(first, len(self.stages)):
            self.stages[number].use(self._of(number, wanted))
            x = self.stages[number].run(step, x)
        assert x is not None
        return x

    def _of(self, number: int, slots: set[Slot]) -> Mapping[str, QuantTensor]:
        return {name: self.matrices[stage, name] for stage, name in slots if stage == number}


def _unit_rows(
    label: str, units: Sequence[Unit], scores: _Scores, resident: _Resident
) -> list[dict[str, Any]]:
    """Return the rows of all units in one format."""
    whole = scores.whole.divergence
    sums = {
        by: sum(
            float(scores.alone[u].divergence.mean())
            for u in units
            if u.by == by and u.slots <= resident.everything
        )
        for by in {unit.by for unit in units}
    }
    rows = []
    for unit in units:
        tensors = [resident.matrices[slot] for slot in unit.slots]
        names = {name for _, name in unit.slots}
        inside = unit.slots <= resident.everything
        alone = scores.alone[unit].row()
        without = scores.without.get(unit)
        saved = estimate_mean(np.full(1, np.nan) if without is None else whole - without.divergence)
        rows.append(
            {
                "weights": label,
                "by": unit.by,
                "unit": unit.name,
                "layer": layer_of(min(names)) if unit.by != "kind" else -1,
                "kind": _kind(unit, min(names)),
                "counted": inside,
                "n_weights": sum(t.n_rows * t.shape[-1] for t in tensors),
                "stored_bytes": sum(t.nbytes for t in tensors),
                **alone,
                "kld_share": ratio(alone["kld_mean_nats"], sums[unit.by]) if inside else np.nan,
                "kld_saved_mean_nats": saved.mean,
                "kld_saved_mean_nats_stderr": saved.stderr,
            }
        )
    return rows


def _kind(unit: Unit, name: str) -> str:
    """Return the kind of a unit's matrices; nothing for a layer, which has all of them."""
    if unit.by == "layer":
        return ""
    return unit.name if unit.by == "kind" or layer_of(name) < 0 else kind_of(name)


def _sum_rows(label: str, units: Sequence[Unit], scores: _Scores) -> list[dict[str, Any]]:
    """Return, for each way of grouping, the whole and the sum of the parts."""
    whole = scores.whole.row()
    rows = []
    for by in dict.fromkeys(unit.by for unit in units):
        inside = [u for u in units if u.by == by and u.name not in ("embedding", "head")]
        parts = np.sum([scores.alone[u].divergence for u in inside], axis=0)
        rest = estimate_mean(scores.whole.divergence - parts)
        nll = float(np.sum([scores.alone[u].nll_difference.mean() for u in inside]))
        rows.append(
            {
                "weights": label,
                "by": by,
                "units": len(inside),
                **whole,
                "kld_sum_nats": float(parts.mean()),
                "kld_interaction_nats": rest.mean,
                "kld_interaction_nats_stderr": rest.stderr,
                "additivity": ratio(float(parts.mean()), whole["kld_mean_nats"]),
                "nll_difference_sum_nats": nll,
            }
        )
    return rows
