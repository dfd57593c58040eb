"""The logits of the unquantized model, computed once per text and kept in HDF5.

The reference is the same model with float32 weights and a float32 key/value cache, held by one
rank. Its file has the float32 dataset ``logits`` (windows, scored tokens, vocabulary); only
positions that are scored are kept.  The rank that leads a point reads it, so the results folder
must be visible there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from nbflow_experiments import engine
from nbflow_experiments.extras import require
from nbflow_experiments.files import replace_atomically
from nbflow_experiments.measures import METRICS_VERSION

WEIGHTS, KV, PARTITION = "f32", "f32", "0"


def reference_path(folder: Path, model_digest: str, windows: np.ndarray, first: int) -> Path:
    """Return where the reference of these windows is kept; `first` is `eval_context`."""
    facts = json.dumps([METRICS_VERSION, model_digest, list(windows.shape), first, WEIGHTS, KV])
    content = hashlib.sha256(facts.encode() + np.ascontiguousarray(windows, "<i8").tobytes())
    return folder / f"{content.hexdigest()[:12]}.h5"


def is_complete(path: Path) -> bool:
    """Return whether a file holds a whole reference."""
    h5py = require("h5py")
    try:
        with h5py.File(path, "r") as file:
            return "logits" in file
    except OSError:
        return False


def write_reference(path: Path, model: str, windows: np.ndarray, first: int, threads: int) -> None:
    """Run the reference over `windows` and write its logits to `path`.

    Parameters
    ----------
    path : Path
        File to write; it appears only when it is whole.
    model : str
        The model, as `nbflow.load` takes it.
    windows : array of int64, shape (n, window)
        What to evaluate.
    first : int
        Tokens at the start of each window that are not scored (`eval_context`).
    threads : int
        Threads to use; 0: the engine's choice.
    """
    h5py = require("h5py")
    n, width = windows.shape
    loaded = engine.load(
        model,
        weights=WEIGHTS,
        kv=KV,
        partition=PARTITION,
        max_context=0,
        threads=threads,
        comm=engine.Alone(),
    )
    try:
        with replace_atomically(path) as temporary, h5py.File(temporary, "w") as file:
            dataset = None
            for i, window in enumerate(windows):
                logits = np.asarray(loaded.logits(window), np.float32)[first - 1 : -1]
                if dataset is None:
                    shape = (n, width - first, logits.shape[1])
                    dataset = file.create_dataset(
                        "logits", shape, np.float32, chunks=(1, *shape[1:])
                    )
                    dataset.attrs["unit"] = "1"
                dataset[i] = logits
            file.create_dataset("windows", data=windows)
            file.attrs.update(
                model=model, weights=WEIGHTS, kv=KV, partition=PARTITION, eval_context=first
            )
    finally:
        loaded.close()
