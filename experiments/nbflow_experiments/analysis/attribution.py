"""Attribution of the divergence to tensor groups: quantize one group, or keep one in float32.

The float32 model and the quantized matrices are in memory together.  For each window of the text,
the stages before a swapped matrix run once and their residual stream is reused.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.distributed.device import Device, find_device
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

StageTensor = tuple[int, str]
"""Use of a matrix: stage index and canonical name; a tied embedding has two."""
BY = ("tensor", "layer", "kind")
"""Groupings of the attribution: granularity at which weights are swapped."""


@dataclass(frozen=True)
class TensorGroup:
    """Matrices that are swapped together."""

    by: str
    name: str
    members: frozenset[StageTensor]

    @property
    def first(self) -> int:
        """Return the first stage of the group."""
        return min(stage for stage, _ in self.members)


@dataclass
class Attribution:
    """Result of `attribution`."""

    units: Table
    """One row per format, grouping and tensor group."""
    sums: Table
    """One row per format and grouping: total divergence, sum over groups, interaction."""


def attribution(
    model: str | os.PathLike[str],
    weights: Sequence[str | Treatment],
    windows: Windows,
    *,
    by: Sequence[str] = BY,
    complement: bool = True,
    spec: str | None = None,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Attribution:
    """Attribute the KL divergence of a quantized model to its tensors, layers or kinds.

    Memory: the float32 model, its matrices in one format, and the residual streams and logits of
    one window.

    Parameters
    ----------
    model : str or path
        Model, as `nbflow.load` takes it.
    weights : sequence of str or Treatment
        Formats of the weights.
    windows : sequence of array of int, shape (T,)
        Token ids; each window begins with an empty cache.  Its last token is predicted only.
    by : sequence of {"tensor", "layer", "kind"}
        Groupings: each matrix, the matrices of a layer, or those of one kind (q, k, v, o, gate,
        up, down).  The embedding and the head, which a weight format does not cover, are groups of
        their own under "tensor" and "kind".  The experts of a layer form one group.
    complement : bool
        Also measure each group in float32 with everything else quantized.
    spec : str, optional
        As in `nbflow.load`.
    device : str
        As in `nbflow_experiments.analysis.layer_errors.layer_errors`.
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
        resident = _Resident(checkpoint, windows, find_device(device, graphs=False))
        groups = _tensor_groups(checkpoint, resident.stages, by)
        runs = len(treatments) * len(windows) * len(groups) * (2 if complement else 1)
        done = itertools.count(1)

        def step() -> None:
            if progress is not None:
                progress(next(done), runs)

        rows, sums = [], []
        for treatment in treatments:
            resident.encode(treatment, {member for group in groups for member in group.members})
            scores = resident.score(groups, complement, step)
            rows += _group_rows(treatment.label, groups, scores, resident)
            sums += _sum_rows(treatment.label, groups, scores)
    return Attribution(table_of(rows), table_of(sums))


def _tensor_groups(
    checkpoint: Checkpoint, stages: Sequence[Stage], by: Sequence[str]
) -> list[TensorGroup]:
    shapes = checkpoint.spec.tensor_shapes()
    found: dict[tuple[str, str], list[StageTensor]] = {}
    for number, stage in enumerate(stages):
        for name in stage.tensors:
            member, kind = (number, name), kind_of(name)
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
                    found.setdefault((grouping, names[grouping]), []).append(member)
    return [
        TensorGroup(grouping, name, frozenset(members))
        for wanted in by
        for (grouping, name), members in found.items()
        if grouping == wanted
    ]


@dataclass
class _Scores:
    """Comparisons with the float32 model."""

    whole: Comparison
    """Divergence of the model with everything quantized."""
    alone: dict[TensorGroup, Comparison]
    """With only this group quantized."""
    without: dict[TensorGroup, Comparison]
    """With everything quantized but this group."""


class _Resident:
    """All stages of a model in float32, and quantized matrices to swap in."""

    def __init__(self, checkpoint: Checkpoint, windows: Windows, device: Device) -> None:
        tables: dict[Any, Any] = {}
        self._checkpoint = checkpoint
        self._steps = make_steps(checkpoint.spec, [window[:-1] for window in windows])
        self._targets = [np.asarray(window[1:], np.int32) for window in windows]
        programs = stage_programs(checkpoint.spec)
        self.stages = [Stage.read(checkpoint, program, tables, device) for program in programs]
        self.matrices: dict[StageTensor, QuantTensor] = {}

    def encode(self, treatment: Treatment, extra: Iterable[StageTensor]) -> None:
        """Quantize the matrices that a format covers, and `extra`."""
        self.matrices.clear()
        shapes = self._checkpoint.spec.tensor_shapes()
        members = {(i, name) for i, stage in enumerate(self.stages) for name in stage.tensors}
        self.everything = {s for s in members if is_quantized(s[1], shapes[s[1]])}
        for number, name in sorted(self.everything | set(extra)):
            exact = self.stages[number].shown(name, self._checkpoint.matrix(name))
            self.matrices[number, name] = treatment.encode(name, exact)

    def score(
        self, groups: Sequence[TensorGroup], complement: bool, progress: Callable[[], None]
    ) -> _Scores:
        """Compare with float32: all quantized, each group alone, all but each group."""
        scores = _Scores(
            Comparison(),
            {group: Comparison() for group in groups},
            {u: Comparison() for u in groups if complement and u.members <= self.everything},
        )
        for step, targets in zip(self._steps, self._targets, strict=True):
            exact = self._run(step, frozenset())
            for group, found in scores.alone.items():
                streams = self._run(step, group.members, group.first, exact)
                found.add(exact[-1], streams[-1], targets)
                progress()
            quantized = self._run(step, self.everything)
            scores.whole.add(exact[-1], quantized[-1], targets)
            for group in groups if complement else ():
                if group in scores.without:
                    others = self.everything - group.members
                    streams = self._run(step, others, group.first, quantized)
                    scores.without[group].add(exact[-1], streams[-1], targets)
                progress()
        return scores

    def _run(
        self,
        step: Step,
        members: Set[StageTensor],
        first: int = 0,
        before: Sequence[NDArray[np.float32]] = (),
    ) -> list[NDArray[np.float32]]:
        """Return the outputs of the stages from `first` on, with `members` quantized."""
        x = before[first - 1] if first else None
        outputs: list[NDArray[np.float32]] = []
        for number, stage in enumerate(self.stages[first:], first):
            stage.use({name: self.matrices[s, name] for s, name in members if s == number})
            x = stage.run(step, x)
            outputs.append(x)
        return outputs


def _group_rows(
    label: str, groups: Sequence[TensorGroup], scores: _Scores, resident: _Resident
) -> list[dict[str, Any]]:
    whole = scores.whole.divergence
    sums = {
        by: sum(
            float(scores.alone[u].divergence.mean())
            for u in groups
            if u.by == by and u.members <= resident.everything
        )
        for by in {group.by for group in groups}
    }
    rows = []
    for group in groups:
        tensors = [resident.matrices[member] for member in group.members]
        names = {name for _, name in group.members}
        inside = group.members <= resident.everything
        alone = scores.alone[group].row()
        without = scores.without.get(group)
        saved = estimate_mean(np.full(1, np.nan) if without is None else whole - without.divergence)
        rows.append(
            {
                "weights": label,
                "by": group.by,
                "unit": group.name,
                "layer": layer_of(min(names)) if group.by != "kind" else -1,
                "kind": _kind(group, min(names)),
                "counted": inside,
                "n_weights": sum(t.n_rows * t.shape[-1] for t in tensors),
                "stored_bytes": sum(t.nbytes for t in tensors),
                **alone,
                "kld_share": ratio(alone["kld_mean_nats"], sums[group.by]) if inside else np.nan,
                "kld_saved_mean_nats": saved.mean,
                "kld_saved_mean_nats_stderr": saved.stderr,
            }
        )
    return rows


def _kind(group: TensorGroup, name: str) -> str:
    """Return the kind of a group's matrices; empty for a layer, which has all kinds."""
    if group.by == "layer":
        return ""
    return group.name if group.by == "kind" or layer_of(name) < 0 else kind_of(name)


def _sum_rows(label: str, groups: Sequence[TensorGroup], scores: _Scores) -> list[dict[str, Any]]:
    """Return total divergence and sum over groups, one row per grouping."""
    whole = scores.whole.row()
    rows = []
    for by in dict.fromkeys(group.by for group in groups):
        inside = [u for u in groups if u.by == by and u.name not in ("embedding", "head")]
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
