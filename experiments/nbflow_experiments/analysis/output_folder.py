"""Layout and writing of an analysis results folder.

::

    <out>/
      analysis.json        model, formats, text, names of the tables
      tensors.csv          a row per tensor and format; totals.csv: all tensors together
      layers.csv           a row per format and layer; modules.csv: per matrix
      models.csv           a row per format: divergence of the whole model
      units.csv            attribution: a row per format, grouping and unit
      sums.csv             totals per grouping, and their additivity
      generation.csv       a row per format and number of generated tokens
      kv_layers.csv        as layers.csv, for formats of the key/value cache; kv_models.csv
      analysis.h5          histograms: of weights, errors, codes, rows, columns, blocks, tokens
      provenance.json      code, packages, machine
      figures/             png and svg

Every file is written under a temporary name and renamed, so that it is complete or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.utils.atomic_write import replace_atomically, write_text
from nbflow_experiments.analysis.all_tensor_errors import TensorResult
from nbflow_experiments.analysis.figures import FIGURES
from nbflow_experiments.analysis.histograms import RELATIVE_EDGES, SCALED_EDGES
from nbflow_experiments.analysis.ratios import Table
from nbflow_experiments.figure_style import NotDrawn, launch_facts
from nbflow_experiments.optional_packages import require
from nbflow_experiments.store.json_files import read_object, write_json
from nbflow_kernels.errors import UsageError

SCHEMA_VERSION = 1
"""Version of the layout above and of the meaning of the columns."""
TABLES = (
    "tensors", "totals", "layers", "modules", "models", "tokens", "units", "sums", "kv_layers",
    "kv_models", "activations", "generation",
)  # fmt: skip
_EDGES = {"relative": RELATIVE_EDGES, "scaled": SCALED_EDGES}


class AnalysisFolder:
    """Results folder of one analysis."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._settings: dict[str, Any] = {}

    @classmethod
    def new(cls, path: Path, settings: Mapping[str, Any], force: bool = False) -> AnalysisFolder:
        """Create the folder."""
        folder = cls(path)
        if (path / "analysis.json").exists() and not force:
            raise UsageError(f"{path} holds an analysis; give another --out, or --force")
        for old in (*TABLES, "analysis"):
            (path / f"{old}.csv").unlink(missing_ok=True)
            (path / f"{old}.h5").unlink(missing_ok=True)
        folder._settings = {"schema_version": SCHEMA_VERSION, **settings, "tables": []}
        write_json(path / "analysis.json", folder._settings)
        return folder

    def write(self, name: str, table: Table) -> None:
        """Write one of `TABLES`; floats keep round-trip precision."""
        assert name in TABLES
        write_text(self.path / f"{name}.csv", table.to_csv(index=False))
        self._settings["tables"].append(name)
        write_json(self.path / "analysis.json", self._settings)

    def write_provenance(self, launch: Mapping[str, Any]) -> None:
        """Write ``provenance.json``."""
        write_json(self.path / "provenance.json", dict(launch))

    def write_histograms(
        self, tensors: list[TensorResult], tokens: Mapping[str, Mapping[str, np.ndarray]]
    ) -> None:
        """Write ``analysis.h5``.

        ``tensors/FORMAT/NAME`` gets rows, columns, blocks, errors and codes, ``weights/NAME`` the
        weights, ``tokens/TABLE/CHANGE`` the counts (layers, bins) of each table of layers.
        """
        with (
            replace_atomically(self.path / "analysis.h5") as temporary,
            require("h5py").File(temporary, "w", track_order=True) as file,
        ):
            for name, edges in _EDGES.items():
                file.create_dataset(f"edges/{name}", data=edges)
            for found in tensors:
                _write_tensor(file, found)
            for table, changes in tokens.items():
                for label, counts in changes.items():
                    path = f"tokens/{table}/{_safe(label)}"
                    _dataset(file, path, counts, "relative", "relative errors of tokens, by layer")

    def draw(self) -> list[Path]:
        """Write the figures of the tables in the folder, and return their files."""
        tables = {name: self.read(name) for name in self.settings["tables"]}
        model = Path(str(self.settings["model"])).name
        launch = read_object(self.path / "provenance.json")
        files = []
        for name, figure in FIGURES.items():
            try:
                drawing = figure(tables)
            except NotDrawn:
                continue
            origin = f"analysis: {model}; {launch_facts(launch)}"
            files += drawing.save(self.path / "figures", name, origin)
        return files

    def read(self, name: str) -> Table:
        """Return one of `TABLES`."""
        path = self.path / f"{name}.csv"
        if not path.is_file():
            have = [t for t in TABLES if (self.path / f"{t}.csv").is_file()]
            raise UsageError(f"{self.path} has no {name}.csv; it has {', '.join(have) or 'none'}")
        words = ("change", "weights", "format", "tensor", "kind", "unit", "keys", "values", "by")
        return require("pandas").read_csv(
            path, dtype=dict.fromkeys(words, str), keep_default_na=False, na_values=["", "nan"]
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the content of ``analysis.json``."""
        path = self.path / "analysis.json"
        if not path.is_file():
            raise UsageError(f"{self.path} holds no analysis (analysis.json is missing)")
        return read_object(path)


def _write_tensor(file: Any, found: TensorResult) -> None:
    error, path = found.error, f"tensors/{_safe(found.weights)}/{found.name}"
    for axis in ("rows", "columns", "blocks"):
        counts = getattr(error, axis).counts
        _dataset(file, f"{path}/{axis}", counts, "relative", f"relative errors of {axis}")
    _dataset(file, f"{path}/errors", error.error_counts, "relative", "|error| / rms of the weights")
    if error.codes is not None:
        _dataset(file, f"{path}/codes", error.codes.counts, "", "how often each level occurs")
    if f"weights/{found.name}" not in file:
        counts = error.weights.counts
        _dataset(file, f"weights/{found.name}", counts, "scaled", "weights / their rms")


def _dataset(file: Any, path: str, counts: np.ndarray, edges: str, note: str) -> None:
    dataset = file.create_dataset(path, data=counts)
    dataset.attrs["note"] = note
    if edges:
        dataset.attrs["edges"] = f"edges/{edges}"


def _safe(label: str) -> str:
    """Escape a label for an HDF5 path, where a slash separates groups."""
    return label.replace("/", "|")
