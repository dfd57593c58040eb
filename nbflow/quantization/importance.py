"""How much the columns of each matrix matter: what an importance matrix says.

Read are the files that llama.cpp's ``imatrix`` writes (GGUF, and the older binary form) and
safetensors with a vector for each matrix.  Of a mixture of experts there may be a vector for each
expert, (experts, columns).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.checkpoint import open_weights
from nbflow.checkpoint.readers import gguf
from nbflow.conversion.plan import TensorPlan
from nbflow.utils.binary_file import ByteCursor, ByteFile
from nbflow_kernels.errors import UsageError

Importance = Mapping[str, np.ndarray]
"""Name of a matrix -> how much the squared error of each column counts, or second moments."""

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME_BYTES = 1024
_LEAST_BYTES = 12  # of an entry: three numbers


def read_importance(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return the importances in a file: the mean squares of what each column is multiplied with.

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
        If it is no such file.
    """
    path = Path(path)
    file = ByteFile(path)
    head = file.read(0, 9)
    try:
        if gguf.matches(path, head):
            return {name: _mean(*sums) for name, sums in _sums_of_gguf(path).items()}
        if head[8:9] == b"{":
            return _from_safetensors(path)
        return {name: _mean(*sums) for name, sums in _sums_of_binary(file).items()}
    finally:
        file.close()


def read_sums(
    path: str | os.PathLike[str],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what llama.cpp's kinds of files hold before it is divided.

    Returns
    -------
    dict
        Name -> sums of squares, float64 (experts or 1, K), and how often each was added to,
        float64 (experts or 1,): rows in GGUF, windows in the older form.

    Raises
    ------
    UsageError
        If it is no such file.
    """
    path = Path(path)
    file = ByteFile(path)
    try:
        if gguf.matches(path, file.read(0, 9)):
            return _sums_of_gguf(path)
        return _sums_of_binary(file)
    finally:
        file.close()


def _mean(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return mean squares, float32 (K,) or (experts, K)."""
    # an expert that was never used says nothing: all of its columns count alike
    mean = np.where(counts[:, None] > 0, sums / np.maximum(counts[:, None], 1), 1.0)
    narrow = mean.astype(np.float32)
    return narrow[0] if len(narrow) == 1 else narrow


def _sums_of_gguf(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return sums of squares and how often they were added to, for each matrix."""
    found = {}
    with open_weights(path) as file:
        names = file.names()
        for name in names:
            if not name.endswith(_SUMS):
                continue
            matrix = name.removesuffix(_SUMS)
            if matrix + _COUNTS not in names:
                raise UsageError(f"{path}: {matrix} has no {_COUNTS[1:]}; it is no importance file")
            sums = np.atleast_2d(file.array(name).astype(np.float64))
            counts = file.array(matrix + _COUNTS).astype(np.float64).reshape(-1)
            if len(counts) != len(sums):
                raise UsageError(f"{path}: {matrix} has {len(sums)} sums and {len(counts)} counts")
            found[matrix] = sums, counts
    if not found:
        raise UsageError(f"{path}: holds no {_SUMS[1:]} tensors; it is no importance file")
    return found


def _from_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays; a name may list matrices that read the same inputs, with commas."""
    found = {}
    with open_weights(path) as file:
        for names in file.names():
            array = file.array(names).astype(np.float32)
            found.update(dict.fromkeys(names.split(","), array))
    return found


def _sums_of_binary(file: ByteFile) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what the older form says: name, calls, and sums of squares, entry after entry."""
    cursor = ByteCursor(file)
    n_entries = cursor.number("i", "the number of entries")
    if not 1 <= n_entries <= cursor.left // _LEAST_BYTES:
        raise UsageError(f"{file.path}: is no importance file: it would have {n_entries} entries")
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


def weigh(
    tensors: Sequence[TensorPlan], importance: Importance | None
) -> tuple[list[TensorPlan], list[str]]:
    """Give the tensors that are put into a format their importances; return notes too.

    Raises
    ------
    UsageError
        If none of them has any, or a vector has not a number for each column.
    """
    if importance is None:
        return list(tensors), []
    weighed, lacking = [], []
    for tensor in tensors:
        if tensor.format == tensor.stored or len(tensor.shape) < 2:
            weighed.append(tensor)
            continue
        found = _found(tensor, importance)
        if found is None:
            lacking.append(tensor.name)
            weighed.append(tensor)
        else:
            weighed.append(tensor.weighed(_checked(tensor, *found)))
    n_converted = sum(t.format != t.stored and len(t.shape) > 1 for t in tensors)
    if len(lacking) == n_converted:
        raise UsageError(
            f"there are importances for {_shown(importance)}, but for none of the matrices that "
            f"are converted, {_shown(lacking)}"
        )
    return weighed, [f"{len(lacking)} matrices have no importances: {_shown(lacking)}"] * bool(
        lacking
    )


def _found(tensor: TensorPlan, importance: Importance) -> tuple[str, Any] | None:
    """Return the name under which there is something about a tensor, and what."""
    if tensor.name in importance:
        return tensor.name, importance[tensor.name]
    ours = [name for name in tensor.ours if name in importance]
    arrays = [np.asarray(importance[name]) for name in ours]
    if not ours:
        return None
    if len(ours) == len(tensor.parts) and len({a.shape for a in arrays}) == 1:
        return ours[0], arrays[0] if len(ours) == 1 else np.stack(arrays)  # each part has its own
    return ours[0], arrays[0]


def _checked(tensor: TensorPlan, name: str, vector: Any) -> np.ndarray:
    """Return the importances of a tensor's parts, (1 or parts, K), or (1 or parts, K, K)."""
    K, n = tensor.shape[-1], len(tensor.parts)
    array = np.asarray(vector, np.float32)
    if n > 1 and array.shape == (n * K,):  # the older form has experts one after the other
        array = array.reshape(n, K)
    if array.shape in ((K,), (n, K)):
        return array.reshape(-1, K)
    if array.shape in ((K, K), (n, K, K)):  # second moments
        return array.reshape(-1, K, K)
    raise UsageError(
        f"importances of {name} must have shape ({K},), the columns of {tensor.name}, "
        f"or ({n}, {K}), or be second moments ({K}, {K}), got {array.shape}"
    )


def _shown(names: Any) -> str:
    first = ", ".join(list(names)[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")
