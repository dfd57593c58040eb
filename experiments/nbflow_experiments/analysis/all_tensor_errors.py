"""Quantization error of every tensor of a model, one tensor in memory at a time."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.distributed.device import Device, find_device
from nbflow.quantization.policy import is_matrix, is_quantized
from nbflow.spec.model_spec import ModelSpec
from nbflow_experiments.analysis.histograms import Weights
from nbflow_experiments.analysis.ratios import Table, relative_error, table_of
from nbflow_experiments.analysis.tensor_error import TensorError, tensor_error
from nbflow_experiments.analysis.treatments import Checkpoint, Format, Treatment
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError

HISTOGRAMS = ("rows", "columns", "blocks")


@dataclass(frozen=True)
class TensorResult:
    """Quantization error of one tensor in one format."""

    name: str
    weights: str
    """Label of the treatment."""
    format: str
    error: TensorError

    def row(self) -> dict[str, Any]:
        """Return a table row."""
        e, w, codes = self.error, self.error.weights, self.error.codes
        spreads = {
            f"{axis[:-1]}_error_{what}": getattr(getattr(e, axis), what)
            for axis in HISTOGRAMS
            for what in ("median", "largest", "worst")
        }
        return {
            "weights": self.weights,
            "format": self.format,
            "tensor": self.name,
            "layer": layer_of(self.name),
            "kind": kind_of(self.name),
            "rows": e.n_rows,
            "columns": e.n_columns,
            "stored_bytes": e.stored_bytes,
            "stored_bits": e.stored_bits,
            "mse": e.mse,
            "relative_error": e.relative_error,
            "sqnr_db": e.sqnr_db,
            "max_abs_error": e.max_abs_error,
            "cosine": e.cosine,
            "mean_error": e.mean_error,
            "code_share": math.nan if codes is None else codes.used_share,
            "code_entropy_bits": math.nan if codes is None else codes.entropy_bits,
            "entropy_coded_bits": e.entropy_coded_bits,
            "gaussian_bits": e.gaussian_bits,
            "shannon_bits": e.shannon_bits,
            "weight_rms": w.rms,
            "weight_kurtosis": w.kurtosis,
            "outlier_share": w.outlier_share,
            "crest": e.crest,
            **spreads,
        }


def layer_of(name: str) -> int:
    """Return the layer index of a canonical tensor name, -1 outside the layers."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def kind_of(name: str) -> str:
    """Return the role of a tensor: q, k, v, o, gate, up, down; embedding, head.

    Examples
    --------
    >>> [kind_of(n) for n in ("layers.3.attn.q.weight", "layers.0.moe.17.up.weight", "embed")]
    ['q', 'moe.up', 'embedding']
    """
    inner = re.sub(r"^layers\.\d+\.", "", name).removesuffix(".weight")
    inner = re.sub(r"^moe\.\d+\.", "moe.", inner)
    named = {"embed": "embedding"}
    return named.get(inner, re.sub(r"^(attn|ffn)\.", "", inner))


def chosen_tensors(spec: ModelSpec, pattern: str | None = None) -> list[str]:
    """Return the canonical names of the selected matrices.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    pattern : str, optional
        A shell pattern (``*.attn.*``, ``layers.3.*``, ``embed.weight``), several with commas; by
        default the matrices that a weight format applies to (`nbflow.quantization.policy`).
    """
    shapes = spec.tensor_shapes()
    if pattern is None:
        return [name for name, shape in shapes.items() if is_quantized(name, shape)]
    matrices = [name for name, shape in shapes.items() if is_matrix(name, shape)]
    wanted = [part.strip() for part in pattern.split(",")]
    for part in wanted:
        if not any(fnmatchcase(name, part) for name in matrices):
            some = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", name) for name in matrices))
            raise UsageError(f"no matrix of {spec.name} matches {part!r}; they are called {some}")
    return [name for name in matrices if any(fnmatchcase(name, part) for part in wanted)]


def each_tensor(
    checkpoint: Checkpoint,
    treatments: Sequence[Treatment],
    pattern: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: str = "cpu",
) -> Iterator[TensorResult]:
    """Yield the error of each tensor under every treatment.

    Memory: one tensor in float32, its treated copy, and about 150 MB of row chunks.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model.
    treatments : sequence of Treatment
        Treatments of the tensors.
    pattern : str, optional
        As in `chosen_tensors`.
    progress : callable, optional
        Called with the number of tensors done and of all.
    device : str
        ``cpu``, ``cuda``, ``cuda:N`` or ``emulator``: device that dequantizes.
    """
    decode = _decoder(find_device(device))
    names = chosen_tensors(checkpoint.spec, pattern)
    for i, name in enumerate(names):
        exact = checkpoint.matrix(name)
        weights = Weights.of(exact)
        for treatment in treatments:
            quantized = treatment.encode(name, exact)
            error = tensor_error(exact, quantized, weights, decode)
            yield TensorResult(name, treatment.label, quantized.format.name, error)
        if progress is not None:
            progress(i + 1, len(names))


def _decoder(device: Device) -> Callable[[QuantTensor], NDArray[Any]]:
    """Return the function that dequantizes rows on a device, to an array on the host."""
    if device.on_host:
        return nk.dequantize

    def decode(rows: QuantTensor) -> NDArray[Any]:
        found: Any = nk.dequantize(device.quantized(rows))
        return np.asarray(found.get())

    return decode


def tensor_errors(
    model: str | os.PathLike[str],
    weights: Sequence[str | Treatment],
    *,
    tensors: str | None = None,
    spec: str | None = None,
    device: str = "cpu",
) -> Table:
    """Return a table of the quantization error of every tensor, per format.

    Parameters
    ----------
    model : str or path
        What `nbflow.load` takes.
    weights : sequence of str or Treatment
        Format names, or other treatments of the tensors.
    tensors : str, optional
        A shell pattern of tensor names, as in `chosen_tensors`.
    spec : str, optional
        As in `nbflow.load`.
    device : str
        As in `each_tensor`.

    Returns
    -------
    pandas.DataFrame
        A row for each tensor and format; docs/analysis.md defines the columns.

    Raises
    ------
    UsageError
        If the model, format or tensor does not exist.

    Examples
    --------
    >>> table = tensor_errors("tiny_python", ["q4"], tensors="layers.0.attn.q.weight")
    >>> table.round(3)[["tensor", "stored_bits", "relative_error"]].values.tolist()
    [['layers.0.attn.q.weight', 5.0, 0.069]]
    """
    with Checkpoint(model, spec) as checkpoint:
        found = each_tensor(checkpoint, as_treatments(weights), tensors, device=device)
        return table_of([one.row() for one in found])


def as_treatments(weights: Sequence[str | Treatment]) -> list[Treatment]:
    """Convert format names to `Format` treatments; labels must differ."""
    treatments: list[Treatment] = [Format(w) if isinstance(w, str) else w for w in weights]
    labels = [t.label for t in treatments]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError(f"weights must be one or more different formats, got {labels}")
    return treatments


def totals(table: Table) -> Table:
    """Return the error over all tensors of a table, one row per treatment.

    The tensors count as one long vector: the relative error is
    sqrt(sum ||E||**2 / sum ||W||**2), as in the sweep measure ``weight_error``.

    Examples
    --------
    >>> table = tensor_errors("tiny_python", ["q4"], tensors="layers.0.attn.*")
    >>> totals(table).round(3)[["weights", "tensors", "relative_error"]].values.tolist()
    [['q4', 4, 0.069]]
    """
    rows = []
    for weights, group in table.groupby("weights", sort=False):
        n = (group["rows"] * group["columns"]).to_numpy(np.float64)
        lost, norm = float(np.sum(n * group.mse)), float(np.sum(n * group.weight_rms**2))
        means = {
            name: float(np.sum(n * group[name].to_numpy()) / n.sum())
            for name in ("code_entropy_bits", "gaussian_bits", "shannon_bits")
        }
        rows.append(
            {
                "weights": weights,
                "tensors": len(group),
                "n_weights": int(n.sum()),
                "stored_bits": 8 * float(group.stored_bytes.sum()) / n.sum(),
                "relative_error": relative_error(lost, norm),
                "sqnr_db": 10 * math.log10(norm / lost) if lost and norm else math.inf,
                "worst_relative_error": float(group.relative_error.max()),
                **means,
            }
        )
    return table_of(rows)
