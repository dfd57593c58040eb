"""Logits of a model file, ours and llama.cpp's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import nbflow
from nbflow.benchmark.llama_cpp import LlamaCpp

IDS = np.arange(1, 9)


def logits(model: Path, ids: np.ndarray = IDS, **options: Any) -> np.ndarray:
    """Return our logits after each token."""
    with nbflow.load(model, threads=1, **options) as loaded:
        return loaded.logits(ids)


def logits_of_llama_cpp(path: Path, ids: np.ndarray) -> np.ndarray:
    """Return llama.cpp's logits after each token."""
    peer = LlamaCpp(path, threads=1, context=64, sequences=1, exact=True)
    try:
        return peer.logits(ids)
    finally:
        peer.close()
