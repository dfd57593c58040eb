"""Second moments (Hessians) of a model's inputs, within a memory limit.

A matrix with K columns has K^2 moments: 8 of them in float64 for 11008 columns are 8 GB.  So each
pass over the text sums only the inputs that fit, and the text is read again for the others.
Finished moments wait as float32 in a temporary file in the output folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nbflow.calibration.collect import ActivationStats, collector_of
from nbflow.calibration.imatrix_files import check_ending, new_importance_file
from nbflow.checkpoint.writers.safetensors import write_safetensors
from nbflow.checkpoint.writers.tensor_plan import TensorPlan, float32_plan
from nbflow.engine.llm import LLM
from nbflow_kernels.errors import UsageError

LIMIT_BYTES = 4 << 30
Key = tuple[str, ...]


def write_hessians(
    out: str | os.PathLike[str],
    model: LLM,
    windows: Sequence[Sequence[int] | NDArray[Any]],
    *,
    limit_bytes: int = LIMIT_BYTES,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Run a model over a text and write the second moments of the inputs of its matrices.

    Parameters
    ----------
    out : path
        A ``.safetensors``; see `nbflow.calibration.imatrix_files`.
    model : LLM
        As for `nbflow.calibration.collect_stats`.
    windows : sequence of array of int, shape (T,)
        Token ids; each window begins with an empty cache.
    limit_bytes : int
        Memory for sums; a single input may exceed it.  In addition, the products of one window
        take as much as the largest sum.
    force : bool
        Replace `out` if it exists.
    progress : callable, optional
        Called with the number of windows read in all passes, and the total.

    Returns
    -------
    int
        Number of passes over the text.

    Raises
    ------
    UsageError
        As `nbflow.calibration.collect_stats`; if `windows` is empty or `out` exists.

    Examples
    --------
    >>> import nbflow, tempfile
    >>> with nbflow.load("tiny_python") as model, tempfile.TemporaryDirectory() as folder:
    ...     n = write_hessians(f"{folder}/x.safetensors", model, [[0, 5, 7]], limit_bytes=3 << 20)
    >>> n  # in each of 4 layers 3 inputs of 256 columns, 1.5 MiB, and one of 768, 4.5 MiB; the head
    9
    """
    path = check_ending(out)
    if path.suffix != ".safetensors":
        raise UsageError(f"{path}: only .safetensors files store second moments")
    if not len(windows):
        raise UsageError("the text is shorter than a window; give a longer text")
    collector = collector_of(model)
    run = model.logits if model.spec.head else model.hidden
    run(windows[0][:1])
    sizes = {inputs.names: len(inputs.squares) for inputs in collector.found()}
    if not sizes:
        raise UsageError("the model has run before and its inputs are not observed; load it again")
    passes = _passes(sizes, limit_bytes)
    tensors: list[TensorPlan] = []
    with TemporaryFile(dir=path.parent) as spool, new_importance_file(path, force) as stream:
        for i, names in enumerate(passes):
            collector.restart(full=True, only=names)
            for j, window in enumerate(windows):
                run(window)
                if progress is not None:
                    progress(i * len(windows) + j + 1, len(passes) * len(windows))
            tensors += _spooled(collector.found(), spool)
            collector.restart()
        write_safetensors(stream, tensors)
    return len(passes)


def _passes(sizes: dict[Key, int], limit_bytes: int) -> list[frozenset[Key]]:
    """Return the inputs to be summed in each pass, in the order of the model."""
    passes: list[list[Key]] = [[]]
    taken = 0
    for key, K in sizes.items():
        if passes[-1] and taken + 8 * K * K > limit_bytes:
            passes.append([])
            taken = 0
        passes[-1].append(key)
        taken += 8 * K * K
    return [frozenset(names) for names in passes]


def _spooled(found: Sequence[ActivationStats], spool: BinaryIO) -> list[TensorPlan]:
    """Write means to a temporary file and return tensors that read them back."""
    tensors = []
    for inputs in found:
        if not inputs.n_rows:  # an expert that no token went to
            continue
        spool.seek(0, os.SEEK_END)
        at, shape = spool.tell(), inputs.sums.shape
        inputs.sums /= inputs.n_rows
        for row in inputs.sums:
            spool.write(row.astype("<f4").tobytes())
        spool.flush()
        values = np.memmap(spool, "<f4", "r", at, shape)
        tensors.append(float32_plan(",".join(inputs.names), values))
    return tensors
