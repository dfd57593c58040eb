"""Reference logits in an HDF5 file: the reference runs once for many comparisons.

The file holds the float32 dataset ``logits`` (scored tokens, vocabulary) in chunks of rows, the
int64 dataset ``targets`` (scored tokens,), and the run's description in its attributes.  Logits
stay float32, so the noise floor of a comparison is the arithmetic, not the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.utils.atomic_write import replace_atomically
from nbflow_experiments.optional_packages import require
from nbflow_kernels.errors import UsageError

LAYOUT = 1
"""Raised when the datasets change, so that older files are not misread."""
CHUNK_BYTES = 2**20


class LogitsFile:
    """Open logits file, for appending (`create`) or reading (`open_logits`)."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @property
    def facts(self) -> dict[str, Any]:
        """Return the attributes: model, weights and other facts of the run."""
        return dict(self._file.attrs)

    @property
    def n_vocab(self) -> int:
        """Width of the logits."""
        return int(self._file["logits"].shape[1])

    def append(self, logits: np.ndarray, targets: np.ndarray) -> None:
        """Add the logits (n, V) that predict `targets` (n,)."""
        if "logits" not in self._file:
            width = logits.shape[1]
            rows = max(1, CHUNK_BYTES // (4 * width))
            self._file.create_dataset(
                "logits", (0, width), np.float32, maxshape=(None, width), chunks=(rows, width)
            )
            self._file.create_dataset("targets", (0,), np.int64, maxshape=(None,), chunks=(4096,))
            self._file["logits"].attrs["unit"] = "1"
        for name, rows_of in (("logits", logits), ("targets", targets)):
            dataset = self._file[name]
            n = len(dataset)
            dataset.resize(n + len(rows_of), axis=0)
            dataset[n:] = rows_of

    def rows(self, start: int, targets: np.ndarray) -> np.ndarray:
        """Return the logits of the scored tokens from `start` on, which must be `targets`."""
        stop = start + len(targets)
        if not np.array_equal(self._file["targets"][start:stop], targets):
            raise UsageError(
                f"{self._file.filename} holds the logits of other tokens than those scored now "
                f"(from scored token {start} on); use the text, tokenizer, context, stride and "
                "choice of scored tokens it was made with"
            )
        return np.asarray(self._file["logits"][start:stop])


@contextlib.contextmanager
def create(path: Path, facts: Mapping[str, Any]) -> Iterator[LogitsFile]:
    """Create a file that appears at `path` if the block succeeds."""
    h5py = require("h5py")
    with replace_atomically(path) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update(facts)
        file.attrs["layout"] = LAYOUT
        yield LogitsFile(file)


@contextlib.contextmanager
def open_logits(path: Path) -> Iterator[LogitsFile]:
    """Open a logits file for reading."""
    h5py = require("h5py")
    if not path.is_file():
        raise UsageError(f"the file {path} does not exist")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise UsageError(f"{path} is not an HDF5 file: {error}") from error
    with file:
        if "logits" not in file or int(file.attrs.get("layout", 0)) != LAYOUT:
            raise UsageError(f"{path} holds no logits of a reference (layout {LAYOUT})")
        yield LogitsFile(file)


def is_complete(path: Path) -> bool:
    """Return whether a file holds a complete reference."""
    try:
        with open_logits(path):
            return True
    except UsageError:
        return False
