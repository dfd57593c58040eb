"""Logits of the unquantized model, computed once per text and stored in HDF5.

The reference is the same model with float32 weights and a float32 key/value cache, held by one
rank; only the logits of scored positions are stored (`nbflow_experiments.scoring.logits_file`).
The rank that leads a point reads the file, so the results folder must be visible there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from nbflow_experiments import backend
from nbflow_experiments.measures import METRICS_VERSION
from nbflow_experiments.measures.evaluation import scored_windows
from nbflow_experiments.scoring.logits_file import LAYOUT, create
from nbflow_experiments.scoring.score_text import predictions

WEIGHTS, KV, PARTITION = "f32", "f32", "0"


def reference_path(folder: Path, model_digest: str, windows: np.ndarray, first: int) -> Path:
    """Return the path of the reference of these windows; `first` is `eval_context`."""
    facts = json.dumps(
        [METRICS_VERSION, model_digest, list(windows.shape), first, WEIGHTS, KV, LAYOUT]
    )
    content = hashlib.sha256(facts.encode() + np.ascontiguousarray(windows, "<i8").tobytes())
    return folder / f"{content.hexdigest()[:12]}.h5"


def write_reference(path: Path, model: str, windows: np.ndarray, first: int, threads: int) -> None:
    """Run the reference over `windows` and write its logits to `path`."""
    loaded = backend.load(
        model,
        weights=WEIGHTS,
        kv=KV,
        partition=PARTITION,
        max_context=0,
        threads=threads,
        comm=backend.SelfComm(),
    )
    facts = {"model": model, "weights": WEIGHTS, "kv": KV, "eval_context": first}
    try:
        with create(path, facts) as stored:
            for window in scored_windows(windows, first):
                stored.append(predictions(loaded, window), window.targets)
    finally:
        loaded.close()
