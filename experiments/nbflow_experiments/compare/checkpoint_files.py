"""Several checkpoints of one model against one float32 reference: divergence, bits, size, speed.

The reference's logits of the scored tokens are computed once and stored in an HDF5 file, from which
every candidate is compared.  A candidate runs in a process of its own, so that its peak of memory
is its own, and one that fails is a row with the reason.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import nbflow
from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.weight_file import ITEM_BYTES
from nbflow.distributed import SelfComm
from nbflow.spec import resolve
from nbflow_experiments import backend
from nbflow_experiments.scoring.logits_file import create, open_logits
from nbflow_experiments.scoring.score_text import file_reference, model_reference, score_text
from nbflow_experiments.scoring.statistics_table import as_json, statistics
from nbflow_experiments.scoring.token_scores import Scores
from nbflow_experiments.scoring.windows import Window
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugins

FLOAT32: dict[str, Any] = {"weights": "f32", "kv": "f32", "activations": "f32"}
"""Load options of the reference."""
N_PROMPT, N_GENERATED, N_REPEATS = 128, 16, 3
"""Tokens and repetitions of the speed columns."""


@dataclass(frozen=True)
class Row:
    """Measurements of one checkpoint; numbers are None if it failed."""

    file: str
    status: str
    """"done", or the reason why it failed."""
    formats: str | None = None
    """Formats of the matrices of layers, the most frequent first."""
    bits_per_weight: float | None = None
    """Stored bits of all tensors, scales included, per parameter of the model."""
    size_bytes: int | None = None
    """Bytes of all tensors in the file."""
    kld_mean: float | None = None
    """Mean KL(reference || checkpoint) of the scored tokens, nats."""
    kld_mean_stderr: float | None = None
    ppl: float | None = None
    ppl_stderr: float | None = None
    same_top_p: float | None = None
    """Tokens for which both give the same token the highest probability, %."""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    peak_rss_bytes: int | None = None
    """Peak of the process' resident memory, Python and libraries included."""

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def write_reference(
    path: Path, model: str, windows: Sequence[Window], threads: int | None
) -> tuple[Row, Scores]:
    """Store the reference's logits; return its row, and its noise floor.

    The noise floor compares the reference with itself under bfloat16 rounding of all products.
    """
    with nbflow.load(model, comm=SelfComm(), threads=threads, **FLOAT32) as reference:
        with create(path, {"model": model, **FLOAT32}) as file:
            scores = score_text(reference, windows, save=file)
        row = _row(model, reference, scores)
        options = FLOAT32 | {"activations": "bf16"}
        with nbflow.load(model, comm=SelfComm(), threads=threads, **options) as rounded:
            floor = score_text(rounded, windows, reference=model_reference(reference))
    return row, floor


def measure_files(
    files: Sequence[str],
    windows: Sequence[Window],
    reference: Path,
    activations: str,
    threads: int | None,
    plugins: Sequence[str] = (),
) -> Iterator[Row]:
    """Measure checkpoints one after the other, each in a new process.

    `plugins` are imported by each process.
    """
    how = activations, threads, tuple(plugins)
    for file in files:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            task = pool.submit(_measure, file, list(windows), reference, *how)
            try:
                yield task.result()
            except BrokenProcessPool:
                yield Row(file, "its process was ended, perhaps for lack of memory")


def _measure(
    file: str,
    windows: list[Window],
    reference: Path,
    activations: str,
    threads: int | None,
    plugins: tuple[str, ...],
) -> Row:
    """Measure one checkpoint; the program of its process."""
    try:
        load_plugins(plugins)
        with (
            open_logits(reference) as logits,
            nbflow.load(
                file, comm=SelfComm(), kv="f32", activations=activations, threads=threads
            ) as model,
        ):
            n_vocab = logits.n_vocab
            if model.spec.vocab_size != n_vocab:
                return Row(
                    file,
                    f"has a vocabulary of {model.spec.vocab_size} tokens, the reference {n_vocab}",
                )
            return _row(file, model, score_text(model, windows, reference=file_reference(logits)))
    except (UsageError, OSError) as error:
        return Row(file, str(error))


def _row(file: str, model: nbflow.LLM, scores: Scores) -> Row:
    """Return the measurements of a loaded model."""
    found = as_json(statistics(scores))
    n_prompt = min(N_PROMPT, model.spec.max_context // 2)
    prefill = backend.time_prefill(model, n_prompt, 1, N_REPEATS, 1)
    decode = backend.time_decode(model, n_prompt, N_GENERATED, 1, N_REPEATS, 1)
    with open_weights(resolve(file).path) as weights:
        size = sum(weights.n_bytes(name) for name in weights.names())
        formats = _formats(weights)
    return Row(
        file,
        "done",
        formats,
        8 * size / model.spec.n_parameters,
        size,
        found.get("kld_mean"),
        found.get("kld_mean_stderr"),
        found["ppl"],
        found["ppl_stderr"],
        found.get("same_top_p"),
        n_prompt / median(prefill),
        N_GENERATED / median(decode),
        max(rank["peak_rss_bytes"] for rank in model.memory()),
    )


def _formats(weights: WeightFile) -> str:
    """Return the stored formats of matrices, the one with the most bytes first."""
    sizes: dict[str, int] = {}
    for name in weights.names():
        entry = weights.entry(name)
        if len(entry.shape) > 1:
            stored = entry.stored_dtype if entry.dtype in ITEM_BYTES else entry.dtype
            sizes[stored] = sizes.get(stored, 0) + weights.n_bytes(name)
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))


def label(file: str) -> str:
    """Return a short name of a file for tables and figures."""
    path = Path(os.path.normpath(file))
    return path.name or str(path)


def finite(value: float | None) -> bool:
    """Return whether a number is there and finite."""
    return value is not None and bool(np.isfinite(value))
