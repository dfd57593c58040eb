r"""Sensitivity of a model: its loss by the format of each matrix and of the KV cache.

The error of a format in a matrix is the relative squared error of its outputs,

.. math:: r_{mf} = \frac{\mathrm{tr}(E M E^T)}{\mathrm{tr}(W M W^T)}, \qquad E = Q_f(W) - W

with the second moments M of its inputs: given, diagonal from mean squares, or the identity.  The
loss of the model is modelled as :math:`c_m r_{mf}`: near its minimum, the divergence of a model
grows with the square of the change, and matrices add up.  c_m is 1, or measured: one matrix at a
time is quantized, and the divergence on a text divided by its r.

The sum over matrices is off where formats are coarse, because later layers read what earlier ones
changed.  With all matrices in one format both the sum and the divergence are known; the divergence
of any mixture is interpolated between these points, both scales being logarithmic
(`Sensitivity.weights_kld`).  Divergences of a cache format in the keys, and in the values, are
measured with the stored weights and added.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.calibration.allocation.divergence import DivergenceProbe
from nbflow.checkpoint import WeightFile, open_weights
from nbflow.conversion.importance_names import load_importance
from nbflow.program.read_operand import read_operand
from nbflow.program.records import Operand
from nbflow.quantization.policy import WeightFormats, is_quantized
from nbflow.quantization.prepare import prepare
from nbflow.quantization.quantizer_options import QuantizerOptions
from nbflow.spec import check, resolve
from nbflow.spec.model_spec import ModelSpec
from nbflow.utils.json_file import read_object
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError
from nbflow_kernels.quantizers.gptq import output_errors

ROWS = 4096  # quantized per pass
FACTS = {"model": str, "quantizer": str, "n_tokens": int, "window": int}
"""Facts of every file, with their types."""
VERSION = 1
"""Version of the file; others are measured again."""
EXACT_KV = "f32"
"""Cache format of the reference."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sensitivity:
    """Measured loss of a model by the format of each matrix and of the KV cache."""

    shapes: dict[str, tuple[int, int]]
    """Our name of a matrix -> rows, columns."""
    errors: dict[str, dict[str, float]]
    """Our name of a matrix -> format -> relative squared error of its outputs."""
    slopes: dict[str, float]
    """Our name of a matrix -> loss of the model for a relative squared error of 1."""
    uniform: dict[str, float] = field(default_factory=dict)
    """Format -> divergence with all matrices in it, in nats per token."""
    keys: dict[str, float] = field(default_factory=dict)
    """Cache format -> divergence with the keys in it, in nats per token."""
    values: dict[str, float] = field(default_factory=dict)
    """Cache format -> divergence with the values in it, in nats per token."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Model, quantizer, and number of tokens of the text."""

    def added_loss(self, formats: Mapping[str, str]) -> float:
        """Return the sum of the matrices' losses for a format of each."""
        return sum(self.slopes[m] * self.errors[m][f] for m, f in formats.items())

    def weights_kld(self, formats: Mapping[str, str]) -> float:
        """Return the predicted divergence for a format of each matrix, in nats per token."""
        return self._curve(self.added_loss(formats))

    def largest_added_loss(self, kld: float) -> float:
        """Return the sum of losses at which the predicted divergence is `kld`."""
        return self._curve(kld, inverse=True)

    def kv_kld(self, keys: str, values: str) -> float:
        """Return the predicted divergence of a cache, in nats per token."""
        return self.keys[keys] + self.values[values]

    def restricted(
        self, formats: Sequence[str] | None, kv_formats: Sequence[str] | None
    ) -> Sensitivity:
        """Return the part for some formats; None keeps all.

        Raises
        ------
        UsageError
            If a format was not measured.
        """
        of_weights = list(self.uniform) if formats is None else list(formats)
        of_caches = list(self.keys) if kv_formats is None else list(kv_formats)
        missing = [f for f in of_weights if f not in self.uniform]
        missing += [f for f in of_caches if f not in self.keys]
        if missing:
            raise UsageError(
                f"the sensitivity file lacks {missing[0]}; it has weights "
                f"{', '.join(self.uniform)} and caches {', '.join(self.keys)}: name these, or "
                "another file to measure"
            )
        return dataclasses.replace(
            self,
            errors={m: {f: e[f] for f in of_weights} for m, e in self.errors.items()},
            keys={f: self.keys[f] for f in of_caches},
            values={f: self.values[f] for f in of_caches},
        )

    def _curve(self, at: float, inverse: bool = False) -> float:
        """Interpolate between formats in all matrices; ratios at the ends hold beyond them."""
        measured = next(iter(self.errors.values()), {})
        known = [
            (self.added_loss(dict.fromkeys(self.shapes, format)), kld)
            for format, kld in self.uniform.items()
            if format in measured
        ]
        points = np.array(sorted(p for p in known if min(p) > 0)).reshape(-1, 2)
        if not len(points) or at <= 0:
            return max(at, 0.0)
        logs = np.log(points)
        logs[:, 1] = np.maximum.accumulate(logs[:, 1])  # noise must not reverse the order
        x, y = logs.T[::-1] if inverse else logs.T
        position = math.log(at)
        beyond = position - np.clip(position, x[0], x[-1])
        return float(np.exp(np.interp(position, x, y) + beyond))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which `read_sensitivity` reads."""
        content = {"version": VERSION, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_sensitivity(path: str | os.PathLike[str]) -> Sensitivity:
    """Read a file of `Sensitivity.write`.

    Raises
    ------
    UsageError
        If the file does not exist or has other content.
    """
    where = Path(path)
    content = read_object(where, missing_ok=False) or {}
    names = [each.name for each in dataclasses.fields(Sensitivity)]
    if content.get("version") != VERSION or set(content) != {"version", *names}:
        raise UsageError(
            f"{where}: not a sensitivity file of version {VERSION}; remove it to measure again"
        )
    tables = {name: _table(content[name], f"{where}: {name}") for name in names}
    shapes = {m: _shape(size, f"{where}: shapes: {m}") for m, size in tables["shapes"].items()}
    errors = {m: _numbers(e, f"{where}: errors: {m}") for m, e in tables["errors"].items()}
    single = ("slopes", "uniform", "keys", "values")
    numbers = {name: _numbers(tables[name], f"{where}: {name}") for name in single}
    facts = tables["facts"]
    for name, kind in FACTS.items():
        check_value(facts.get(name), f"{where}: facts: {name}", kind)
    found = Sensitivity(shapes=shapes, errors=errors, **numbers, facts=facts)
    matrices = {frozenset(found.shapes), frozenset(found.errors), frozenset(found.slopes)}
    if len(matrices) != 1 or len({frozenset(e) for e in found.errors.values()}) != 1:
        raise UsageError(f"{where}: matrices and formats of its tables differ; measure again")
    return found


def _table(value: Any, where: str) -> dict[str, Any]:
    table: dict[str, Any] = check_value(value, where, dict)
    return table


def _numbers(value: Any, where: str) -> dict[str, float]:
    """Return a table of numbers that are finite and at least 0."""
    found = {}
    for name, number in _table(value, where).items():
        found[name] = float(check_value(number, f"{where}: {name:.80}", float))
        if not 0 <= found[name] < math.inf:
            raise UsageError(f"{where}: {name:.80}: must be at least 0 and finite, got {number}")
    return found


def _shape(value: Any, where: str) -> tuple[int, int]:
    """Return rows and columns of a matrix."""
    sizes = check_value(value, where, [int])
    if len(sizes) != 2 or min(sizes) < 1:
        raise UsageError(f"{where}: must be rows and columns, both from 1, got {value!r:.80}")
    return sizes[0], sizes[1]


def matrix_errors(
    model: str | Path,
    spec: str | Path | None,
    formats: Sequence[str],
    options: dict[str, Any],
    progress: Progress | None = None,
) -> Sensitivity:
    """Return the errors of all matrices in all formats, with slopes of 1."""
    resolved = resolve(model, spec=spec)
    with open_weights(resolved.path) as file:
        check(resolved.spec, file)
        known = load_importance(options["importance"], resolved, file)
        options = {**options, "importance": known}
        prepared = prepare(resolved.spec, file, lambda _: None, **options)
        transformed, shapes = prepared.apply_to(file), prepared.spec.tensor_shapes()
        matrices = {n: (s[0], s[1]) for n, s in shapes.items() if is_quantized(n, s)}
        errors = {}
        for i, name in enumerate(matrices):
            errors[name] = _errors(prepared.spec, transformed, name, formats, prepared.quantizer)
            if progress is not None:
                progress("errors", i + 1, len(matrices))
    return Sensitivity(matrices, errors, dict.fromkeys(errors, 1.0))


def with_slopes(
    measured: Sensitivity,
    format: str,
    probe: DivergenceProbe,
    options: dict[str, Any],
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure the divergence per unit of error, with one matrix at a time in `format`."""
    slopes = {}
    for i, (name, errors) in enumerate(measured.errors.items()):
        lost = probe.measure(weights=WeightFormats(((name, format),), {}), **options).kld
        slopes[name] = lost / errors[format] if errors[format] > 0 else 0.0
        if progress is not None:
            progress("divergences", i + 1, len(measured.errors))
    return dataclasses.replace(measured, slopes=slopes)


def measure_sensitivity(
    model: str | Path,
    formats: Sequence[str],
    kv_formats: Sequence[str],
    probe: DivergenceProbe,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Sensitivity:
    """Measure the divergence of each matrix, of whole formats, and of cache formats on a text.

    Parameters
    ----------
    model : str or path
        As for `nbflow.load`.
    formats : sequence of str
        Weight formats.
    kv_formats : sequence of str
        Cache formats of keys and of values.
    probe : DivergenceProbe
        The text.  The model runs once for each matrix, each format and each side of the cache.
    progress : callable, optional
        Called with the name of the phase, the number of runs done, and the total.
    options
        quantizer, importance and spec, as for `nbflow.load`.
    """
    names = [nk.FORMATS[name].name for name in formats]
    settings = {"quantizer": "search", "importance": None, **options}
    if "awq" in str(settings["quantizer"]):
        raise UsageError("quantizer 'awq' changes matrices by the formats of others; use another")
    spec = settings.pop("spec", None)
    measured = matrix_errors(model, spec, names, settings, progress)
    bits = {name: nk.FORMATS[name].bits_per_weight for name in names}
    middle = sorted(names, key=lambda name: bits[name])[len(names) // 2]
    measured = with_slopes(measured, middle, probe, {**settings, "spec": spec}, progress)
    runs = {("uniform", f): {"weights": f, **settings, "spec": spec} for f in names}
    runs |= {("keys", f): {"kv": f"{f}/{EXACT_KV}", "spec": spec} for f in kv_formats}
    runs |= {("values", f): {"kv": f"{EXACT_KV}/{f}", "spec": spec} for f in kv_formats}
    tables: dict[str, dict[str, float]] = {"uniform": {}, "keys": {}, "values": {}}
    for i, ((table, format), run) in enumerate(runs.items()):
        tables[table][format] = max(0.0, probe.measure(**run).kld)
        if progress is not None:
            progress("formats", i + 1, len(runs))
    facts = {"model": str(model), "quantizer": settings["quantizer"]}
    facts |= {"n_tokens": int(probe.windows.size), "window": int(probe.windows.shape[1])}
    uniform, keys, values = tables.values()
    return dataclasses.replace(measured, uniform=uniform, keys=keys, values=values, facts=facts)


def _errors(
    spec: ModelSpec,
    file: WeightFile,
    name: str,
    formats: Sequence[str],
    quantizer: QuantizerOptions,
) -> dict[str, float]:
    """Return the relative squared error of a matrix's outputs in each format."""
    known: NDArray[Any] | None = quantizer.importance.get(name)
    wide = None if known is None else known.astype(np.float64)
    n_rows = spec.shape_of(name)[0]
    lost, whole = dict.fromkeys(formats, 0.0), 0.0
    for first in range(0, n_rows, ROWS):
        part = Operand(name, rows=(first, min(first + ROWS, n_rows)))
        rows = read_operand(spec, file, part).astype(np.float32)
        whole += float(output_errors(rows.astype(np.float64), wide).sum())
        for format in formats:
            found = nk.dequantize(quantizer.quantize_matrix(name, rows, format)).astype(np.float64)
            lost[format] += float(output_errors(found - rows, wide).sum())
    return {format: error / whole if whole > 0 else 0.0 for format, error in lost.items()}
