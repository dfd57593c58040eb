"""All second moments of a model's inputs, with a bound on the memory that they take.

A matrix with K columns has K^2 moments: 8 of them in float64 for 11008 columns are 8 GB.  So only
those of some inputs are summed at once, as many as fit, and the text is read again for the others.
Those that are done wait on disk, as float32, beside the file that is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from nbflow.calibration.collect import ActivationStats, collector_of
from nbflow.calibration.imatrix_files import check_ending, new_inputs_file, tensor
from nbflow.checkpoint.writers.safetensors import write_safetensors
from nbflow.conversion.plan import TensorPlan
from nbflow.engine.llm import LLM
from nbflow.quantization.encoding import BEST
from nbflow_kernels.errors import UsageError

LIMIT_BYTES = 4 << 30
Key = tuple[str, ...]


def write_moments(
    out: str | os.PathLike[str],
    model: LLM,
    windows: Sequence[Sequence[int] | NDArray[Any]],
    *,
    limit_bytes: int = LIMIT_BYTES,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Run a model over a text and write all second moments of what its matrices read.

    Parameters
    ----------
    out : path
        A ``.safetensors``; see `nbflow.calibration.imatrix_files`.
    model : Model
        As for `nbflow.calibration.collect`.
    windows : sequence of array of int, shape (T,)
        Token ids; each window begins with an empty cache.
    limit_bytes : int
        What sums may take at once.  One input is always summed, if it alone takes more.  Beside
        them there is room for the products of one window, as many bytes as the largest sum.
    force : bool
        Whether `out` may be replaced.
    progress : callable, optional
        Called with the number of windows read, all times together, and of all.

    Returns
    -------
    int
        How often the text was read.

    Raises
    ------
    UsageError
        As `nbflow.calibration.collect`; if there is no window, or `out` exists.

    Examples
    --------
    >>> import nbflow, tempfile
    >>> with nbflow.load("tiny_python") as model, tempfile.TemporaryDirectory() as folder:
    ...     n = write_moments(f"{folder}/x.safetensors", model, [[0, 5, 7]], limit_bytes=3 << 20)
    >>> n  # in each of 4 layers 3 inputs of 256 columns, 1.5 MiB, and one of 768, 4.5 MiB; the head
    9
    """
    path = check_ending(out)
    if path.suffix != ".safetensors":
        raise UsageError(f"{path}: all second moments go into a .safetensors file only")
    if not len(windows):
        raise UsageError("there is no window to read; give a longer text")
    collector = collector_of(model)
    run = model.logits if model.spec.head else model.hidden
    run(windows[0][:1])
    sizes = {inputs.names: len(inputs.squares) for inputs in collector.found()}
    if not sizes:
        raise UsageError("the model has run before, and is not observed; load it anew")
    parts = _parts(sizes, limit_bytes)
    tensors: list[TensorPlan] = []
    with TemporaryFile(dir=path.parent) as spool, new_inputs_file(path, force) as stream:
        for i, part in enumerate(parts):
            collector.restart(full=True, only=part)
            for j, window in enumerate(windows):
                run(window)
                if progress is not None:
                    progress(i * len(windows) + j + 1, len(parts) * len(windows))
            tensors += _spooled(collector.found(), spool)
            collector.restart()
        write_safetensors(stream, tensors, BEST)
    return len(parts)


def _parts(sizes: dict[Key, int], limit_bytes: int) -> list[frozenset[Key]]:
    """Return the inputs that are summed together, in the order of the model."""
    parts: list[list[Key]] = [[]]
    taken = 0
    for key, K in sizes.items():
        if parts[-1] and taken + 8 * K * K > limit_bytes:
            parts.append([])
            taken = 0
        parts[-1].append(key)
        taken += 8 * K * K
    return [frozenset(part) for part in parts]


def _spooled(found: Sequence[ActivationStats], spool: BinaryIO) -> list[TensorPlan]:
    """Put means aside in a file, and return the tensors that will be read from there."""
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
        tensors.append(tensor(",".join(inputs.names), values))
    return tensors
