"""Importance files: error weights of the columns of each matrix.

Reads the files of llama.cpp's ``imatrix`` (GGUF, and the older binary form) and safetensors with
one vector per matrix.  Matrices of experts may have a vector per expert, (experts, columns).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from nbflow.checkpoint import open_weights
from nbflow.checkpoint.readers import gguf
from nbflow.utils.binary_file import ByteCursor, ByteFile
from nbflow_kernels.errors import UsageError

Importance = Mapping[str, np.ndarray]
"""Name of a matrix -> error weights of its columns, or second moments of its inputs."""

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME_BYTES = 1024
_LEAST_BYTES = 12  # three numbers of an entry


def read_importance(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read an importance file: mean squares of the inputs of each column.

    Parameters
    ----------
    path : path
        A GGUF or binary file of llama.cpp's ``imatrix``, or safetensors.

    Returns
    -------
    dict
        Name -> float32 (K,), or (experts, K).

    Raises
    ------
    UsageError
        If it is not an importance file.
    """
    path = Path(path)
    with contextlib.closing(ByteFile(path)) as file:
        head = file.read(0, 9)
    if head[8:9] == b"{" and not gguf.matches(path, head):
        return _from_safetensors(path)
    means = {n: mean_squares(*s).astype(np.float32) for n, s in read_sums(path).items()}
    return {name: mean[0] if len(mean) == 1 else mean for name, mean in means.items()}


def read_sums(
    path: str | os.PathLike[str],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the sums in a file of llama.cpp, before division by the counts.

    Returns
    -------
    dict
        Name -> sums of squares, float64 (experts or 1, K), and counts, float64 (experts or 1,):
        rows in GGUF, windows in the older form.
    """
    path = Path(path)
    with contextlib.closing(ByteFile(path)) as file:
        if not gguf.matches(path, file.read(0, 9)):
            return _sums_of_binary(file)
    return _sums_of_gguf(path)


def mean_squares(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return mean squares (experts, K); 1 for all columns of an expert without input."""
    return np.where(counts[:, None] > 0, sums / np.maximum(counts[:, None], 1), 1.0)


def _sums_of_gguf(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    with open_weights(path) as file:
        names = file.names()
        for name in names:
            if not name.endswith(_SUMS):
                continue
            matrix = name.removesuffix(_SUMS)
            if matrix + _COUNTS not in names:
                raise UsageError(f"{path}: {matrix} has no {_COUNTS[1:]}; not an importance file")
            sums = np.atleast_2d(file.array(name).astype(np.float64))
            counts = file.array(matrix + _COUNTS).astype(np.float64).reshape(-1)
            if sums.ndim != 2 or len(counts) != len(sums):
                raise UsageError(
                    f"{path}: {matrix} must have sums (experts, columns) and a count for each "
                    f"expert, got {sums.shape} and {len(counts)} counts"
                )
            found[matrix] = sums, counts
    if not found:
        raise UsageError(f"{path}: not an importance file: no {_SUMS[1:]} tensors")
    return found


def _from_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays; a name may list matrices with the same inputs, comma-separated."""
    found = {}
    with open_weights(path) as file:
        for names in file.names():
            array = file.array(names).astype(np.float32)
            found.update(dict.fromkeys(names.split(","), array))
    return found


def _sums_of_binary(file: ByteFile) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the entries of the older form: name, calls, and sums of squares."""
    cursor = ByteCursor(file)
    n_entries = cursor.number("i", "the number of entries")
    if not 1 <= n_entries <= cursor.left // _LEAST_BYTES:
        raise UsageError(f"{file.path}: not an importance file: it would have {n_entries} entries")
    found = {}
    for i in range(n_entries):
        what = f"entry {i}"
        name = cursor.text("i", what, _MAX_NAME_BYTES)
        n_calls, n_values = cursor.number("i", what), cursor.number("i", what)
        if n_calls < 1 or not 1 <= n_values <= cursor.left // 4:
            raise UsageError(f"{file.path}: {what} ({name!r:.80}) has {n_values} values; damaged")
        values = np.frombuffer(cursor.take(4 * n_values, what), "<f4")
        found[name] = values.astype(np.float64)[None], np.array([float(n_calls)])
    return found


def first_names(names: Collection[str]) -> str:
    """Return the first three names and the number of the others, for messages."""
    text = ", ".join(list(names)[:3])
    return text + (f" and {len(names) - 3} more" if len(names) > 3 else "")
