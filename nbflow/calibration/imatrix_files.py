"""Writers of importance files: llama.cpp's ``imatrix`` formats, and safetensors.

==============  ===================================================================================
``.gguf``       per matrix ``NAME.in_sum2`` (experts, K), sums of squares, and ``NAME.counts``
                (experts, 1), rows
``.dat``        llama.cpp's older form: name, windows, and mean squares times windows
``.safetensors``  mean squares (K,), or second moments (K, K), once for all matrices that read the
                same rows: the tensor's name lists theirs with commas
==============  ===================================================================================

Source of the first two: https://github.com/ggml-org/llama.cpp/blob/b6000/tools/imatrix/imatrix.cpp
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nbflow.calibration.collect import ActivationStats
from nbflow.checkpoint.readers.gguf import ARRAY, STRING
from nbflow.checkpoint.writers.gguf import U32, write_gguf
from nbflow.checkpoint.writers.safetensors import write_safetensors
from nbflow.checkpoint.writers.tensor_plan import float32_plan
from nbflow.quantization.importance import mean_squares, read_sums
from nbflow.utils.atomic_write import check_output, replace_atomically
from nbflow_kernels.errors import UsageError

Sums = Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
"""Name -> sums of squares (experts, K) and rows (experts,)."""
ENDINGS = (".gguf", ".dat", ".safetensors")


def write_stats(
    out: str | os.PathLike[str],
    found: Sequence[ActivationStats],
    *,
    names: Mapping[str, tuple[str, ...]] | None = None,
    text: str = "",
    n_windows: int = 1,
    window: int = 0,
    force: bool = False,
) -> None:
    """Write the statistics of `nbflow.calibration.collect_stats`.

    Parameters
    ----------
    out : path
        The suffix selects the format; only ``.safetensors`` stores second moments.
    found : sequence of ActivationStats
        The sums.
    names : mapping, optional
        GGUF names -> ours (`nbflow.conversion.importance_names`), for ``.gguf`` and ``.dat``; by
        default our names.
    text : str
        Name of the text, stored as metadata.
    n_windows, window : int
        Number of windows and tokens per window, stored as metadata.
    force : bool
        Replace `out` if it exists.

    Raises
    ------
    UsageError
        If the suffix is unknown, `out` exists, or its format cannot store second moments.
    """
    path = check_ending(out)
    if path.suffix == ".safetensors":
        with new_importance_file(path, force) as stream:
            _write_safetensors(stream, found)
        return
    if any(inputs.sums.ndim == 2 for inputs in found):
        raise UsageError(f"{path}: only .safetensors files store second moments")
    sums = _by_matrix(found, names or {})
    _write_sums(path, sums, [text] if text else [], n_windows, window, force)


def merge(
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Sums:
    """Merge importance files of one model, weighted by the length of their texts.

    Parameters
    ----------
    files : sequence of path
        All ``.gguf``, which count rows, or all ``.dat``, which count windows.
    out : path
        File of the same format.
    force : bool
        Replace `out` if it exists.

    Returns
    -------
    mapping
        Name -> sums of squares (experts, K) and counts (experts,).

    Raises
    ------
    UsageError
        If the formats differ or matrices of one name have different columns.
    """
    path = check_ending(out)
    kinds = {Path(file).suffix for file in files} | {path.suffix}
    if len(files) < 1 or len(kinds) != 1 or ".safetensors" in kinds:
        raise UsageError(
            "input and output files must be all .gguf (counts of rows) or all .dat (counts of "
            f"windows), got {', '.join(sorted(kinds))}"
        )
    total: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    for file in files:
        for name, (sums, counts) in read_sums(file).items():
            old = total.get(name)
            if old is not None and old[0].shape != sums.shape:
                raise UsageError(
                    f"{file}: {name} has sums of shape {sums.shape}, and {old[0].shape} in a file "
                    "before; they are of different models"
                )
            total[name] = (sums, counts) if old is None else (old[0] + sums, old[1] + counts)
    n_windows = max(1, int(max(counts.max() for _, counts in total.values())))
    _write_sums(path, total, [str(Path(f).name) for f in files], n_windows, 0, force)
    return total


def check_ending(out: str | os.PathLike[str]) -> Path:
    """Return the path of an importance file, or raise for an unknown suffix."""
    path = Path(out)
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path}: an importance file ends in {', '.join(ENDINGS)}")
    return path


@contextmanager
def new_importance_file(path: Path, force: bool) -> Iterator[BinaryIO]:
    """Open a new importance file, renamed to `path` on success."""
    check_output(path, path.with_name(path.name + ".source"), force=force, may_hold=frozenset())
    with replace_atomically(path) as temporary, temporary.open("wb") as stream:
        yield stream


def _write_sums(
    path: Path, sums: Sums, texts: list[str], n_windows: int, window: int, force: bool
) -> None:
    """Write one of llama.cpp's formats."""
    with new_importance_file(path, force) as stream:
        if path.suffix == ".gguf":
            _write_gguf(stream, sums, texts, n_windows, window)
        else:
            _write_dat(stream, sums, texts, n_windows)


def _by_matrix(found: Sequence[ActivationStats], names: Mapping[str, tuple[str, ...]]) -> Sums:
    """Return sums under GGUF's names, with the experts of a tensor stacked."""
    of = {name: inputs for inputs in found for name in inputs.names}
    result: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    taken: set[str] = set()
    for name, ours in names.items():
        members = [of[own] for own in ours if own in of]
        if not members or len(members) < len(ours):
            continue
        if all(member is members[0] for member in members):  # q, k, v in one tensor
            members = members[:1]
        taken.update(ours)
        result[name] = (
            np.stack([m.squares for m in members]),
            np.array([float(m.n_rows) for m in members]),
        )
    for own, inputs in of.items():
        if own not in taken:
            result[own] = (inputs.squares[None], np.array([float(inputs.n_rows)]))
    return result


def _write_gguf(file: BinaryIO, sums: Sums, texts: list[str], n_windows: int, window: int) -> None:
    metadata: dict[str, tuple[tuple[int, ...], Any]] = {
        "general.type": ((STRING,), "imatrix"),
        "imatrix.datasets": ((ARRAY, STRING), texts),
        "imatrix.chunk_count": ((U32,), n_windows),
        "imatrix.chunk_size": ((U32,), window),
    }
    tensors = []
    for name, (squares, counts) in sums.items():
        tensors.append(float32_plan(f"{name}.in_sum2", squares))
        tensors.append(float32_plan(f"{name}.counts", counts[:, None]))
    write_gguf(file, metadata, tensors)


def _write_dat(file: BinaryIO, sums: Sums, texts: list[str], n_windows: int) -> None:
    file.write(struct.pack("<i", len(sums)))
    for name, (squares, counts) in sums.items():
        text = name.encode()
        mean = mean_squares(squares, counts)
        file.write(struct.pack("<i", len(text)) + text + struct.pack("<ii", n_windows, mean.size))
        file.write((mean * n_windows).astype("<f4").tobytes())
    texts_as_bytes = ",".join(texts).encode()
    file.write(struct.pack("<ii", n_windows, len(texts_as_bytes)) + texts_as_bytes)


def _write_safetensors(file: BinaryIO, found: Sequence[ActivationStats]) -> None:
    used = [inputs for inputs in found if inputs.n_rows]
    tensors = [float32_plan(",".join(i.names), i.sums / i.n_rows) for i in used]
    write_safetensors(file, tensors)
