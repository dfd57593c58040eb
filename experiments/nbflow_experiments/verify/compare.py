"""Run nbflow on a checkpoint and find the first value that differs from a recording."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import nbflow
from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor
from nbflow.executor.weight_loader import WeightLoader
from nbflow.program import build
from nbflow.program.records import Op
from nbflow.spec import ModelSpec, check
from nbflow_experiments.verify.recording import Floats, Recording
from nbflow_kernels.errors import UsageError

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest number.  Two float32 computations of a few layers
differ by some 1e-6; the smallest known mistake of a specification by some 1e-2."""
MAX_PARAMETERS = 200_000_000
"""Largest model of which layers are compared: the reference holds float64 numbers."""
CHUNK = 7
"""Tokens of a step, for the run in pieces: it divides neither pages nor prompts."""


@dataclass
class Check:
    """One comparison."""

    name: str
    error: float
    """Largest difference, as a share of the largest number recorded; NaN if it could not run."""
    note: str = ""

    @property
    def agrees(self) -> bool:
        """True if the numbers agree, or the check could not run."""
        return bool(np.isnan(self.error)) or self.error <= TOLERANCE


@dataclass
class Report:
    """Result of `compare`."""

    checks: list[Check]
    """Comparisons of the float64 reference, the engine whole and in pieces, and partitions."""
    first: str = ""
    """The first value that differs; empty if none does."""
    values: list[Check] = field(default_factory=list)
    """Embedding, layers and their sublayers, as far as they are recorded."""
    remedies: list[str] = field(default_factory=list)
    """Changes of the specification with which the logits agree."""

    @property
    def agrees(self) -> bool:
        """True if all numbers agree, and something was compared."""
        compared = any(not math.isnan(check.error) for check in self.checks)
        return compared and all(check.agrees for check in self.checks)


def difference(got: Floats, want: Floats) -> float:
    """Return the largest difference as a share of the largest number of `want`."""
    if got.shape != want.shape:
        raise UsageError(f"arrays of different shapes: {got.shape} here, {want.shape} recorded")
    found = float(np.abs(got - want).max()) / max(float(np.abs(want).max()), 1e-30)
    return math.inf if math.isnan(found) else found


def compare(
    path: Path, spec: ModelSpec, recording: Recording, spec_file: Any, partitions: tuple[str, ...]
) -> Report:
    """Compare a checkpoint's values with recorded ones.

    Parameters
    ----------
    path : Path
        The checkpoint.
    spec : ModelSpec
        Its specification.
    recording : Recording
        The values of the other program.
    spec_file : str or Path or None
        The spec of `nbflow.load`.
    partitions : tuple of str
        Partitions to run, on ranks of this process.
    """
    if spec.n_parameters > MAX_PARAMETERS:
        report = Report(list(_engine(path, recording, spec_file, partitions)))
        if not report.agrees:
            most = f"{MAX_PARAMETERS:,} parameters"
            report.first = (
                f"not known, because the model has more than {most}: record a smaller one"
            )
        return report
    logits, values = _reference(path, spec, recording)
    error = difference(logits, recording.logits)
    report = Report([Check("float64 reference", error)], values=values)
    if not report.checks[0].agrees:
        wrong = (value.name for value in values if not value.agrees)
        report.first = next(wrong, "the head (final norm, logits)" if values else "")
        report.remedies = list(_remedies(path, spec, recording))
        return report
    report.checks += _engine(path, recording, spec_file, partitions)
    bad = [each for each in report.checks if not each.agrees]
    if bad:
        report.first = f"{bad[0].name}: nbflow's reference agrees, so this is a defect of nbflow"
    return report


def _engine(
    path: Path, recording: Recording, spec_file: Any, partitions: tuple[str, ...]
) -> Iterator[Check]:
    """Yield the checks of the executor: whole, in pieces, on ranks."""
    runs: list[tuple[str, dict[str, Any]]] = [
        ("whole", {}),
        (f"in pieces of {CHUNK} tokens", {"max_step_tokens": CHUNK}),
        *((f"partition {p}", {"partition": p}) for p in partitions),
    ]
    for name, options in runs:
        try:
            with nbflow.load(path, spec=spec_file, kv="f32", **options) as model:
                got = np.asarray(model.logits(recording.ids), np.float64)
        except UsageError as error:
            yield Check(name, float("nan"), f"cannot run: {error}")
            continue
        yield Check(name, difference(got, recording.logits))


def _logits(path: Path, spec: ModelSpec, ids: Any, trace: Callable[..., None] | None) -> Floats:
    program = build(spec)
    with open_weights(path) as file:
        check(spec, file)
        executor = ReferenceExecutor(program, WeightLoader(program, file, None), trace)
        return executor.logits(ids)


def _reference(path: Path, spec: ModelSpec, recording: Recording) -> tuple[Floats, list[Check]]:
    """Return the logits of the reference executor, and the checks of values in between."""
    if spec.encoder is not None or not spec.causal or not spec.head:
        raise UsageError(f"{spec.name}: only decoders without an encoder can be verified")
    stream: dict[int, Floats] = {}  # residual stream after the last op of a layer that writes it
    outputs: dict[int, list[tuple[str, Floats]]] = {}  # of sublayers, before they are added
    embedding: list[Floats] = []

    def trace(op: Op, array: Floats) -> None:
        if op.layer is None:
            if op.out == "x":
                embedding[:] = [array.copy()]
            return
        if op.out == "x":
            stream[op.layer] = array.copy()
        if op.out == "o" and op.weights:
            role = op.weights[0].name.split(".", 2)[2].split(".")[0]
            kind = "feed-forward network" if role in ("ffn", "moe") else "attention"
            kind = kind if role in ("attn", "ffn", "moe") else f"mixer {role}"
            if op.kind != "norm":
                outputs.setdefault(op.layer, []).append((kind, array.copy()))

    logits = _logits(path, spec, recording.ids, trace)
    found = []
    if recording.embedding is not None:
        found.append(Check("the embedding", difference(embedding[0], recording.embedding)))
    for layer, want in sorted(recording.layers.items()):
        error = difference(stream[layer], want)
        if error > TOLERANCE and all(each.agrees for each in found):
            found += _sublayers(layer, outputs.get(layer, []), recording.parts.get(layer, {}))
        found.append(Check(f"layer {layer}", error))
    return logits, found


def _sublayers(
    layer: int, outputs: list[tuple[str, Floats]], parts: dict[str, Floats]
) -> Iterator[Check]:
    """Yield a check for each sublayer: whether some recorded module has its output."""
    for kind, array in outputs:
        same = [(difference(array, p), name) for name, p in parts.items() if p.shape == array.shape]
        error, name = min(same, default=(float("nan"), ""))
        note = f"nearest recorded module: {name}" if name else ""
        yield Check(f"layer {layer}, {kind}", error, note)


def _remedies(path: Path, spec: ModelSpec, recording: Recording) -> Iterator[str]:
    """Yield changes of single fields with which the logits agree."""
    for text, changes in _alternatives(spec):
        try:
            changed = dataclasses.replace(spec, **changes)
            error = difference(_logits(path, changed, recording.ids, None), recording.logits)
        except (UsageError, ValueError, ArithmeticError, LookupError):
            continue  # this value does not go with the others
        if error <= TOLERANCE:
            yield text


def _alternatives(spec: ModelSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield other values of fields that leave names and shapes of tensors as they are."""
    choices: dict[str, tuple[Any, ...]] = {
        "activation": ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"),
        "sinusoids": ("fairseq", "paper", "alternating"),
        "norm_place": ("pre", "post", "output"),
        "norm": ("rms", "layer"),
        "norm_eps": (1e-5, 1e-6, 1e-12),
        "norm_offset": (0.0, 1.0),
        "qk_norm_after_rope": (False, True),
        "qk_norm_kind": ("rms", "layer"),
        "alibi_scaled": (False, True),
        "embed_scale": (1.0, spec.hidden_size**0.5),
        "logits_scale": (1.0,),
        "residual_scale": (1.0,),
        "sm_scale": (spec.head_dim**-0.5, 1.0),
        "window": (None,),
    }
    for name, values in choices.items():
        for value in values if hasattr(spec, name) else ():
            if getattr(spec, name) != value:
                yield f"{name} = {value!r}", {name: value}
    if spec.rope.dim:
        is_half = spec.rope.style == "half"
        changed = dataclasses.replace(spec.rope, style="interleaved" if is_half else "half")
        yield f"rope_style = {changed.style!r}", {"rope": changed}
        for theta in (1e4, 5e5, 1e6):
            changed = dataclasses.replace(spec.rope, theta=theta)
            yield f"rope_theta = {theta:g}", {"rope": changed}
    if spec.moe is not None:
        value = not spec.moe.renormalize
        moe = dataclasses.replace(spec.moe, renormalize=value)
        yield f"router_renormalize = {value}", {"moe": moe}
