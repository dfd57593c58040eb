"""Drift of free generation: how long quantized models write what the float32 model writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow
from nbflow.distributed.comm import SelfComm
from nbflow_experiments.analysis.all_tensor_errors import as_treatments
from nbflow_experiments.analysis.ratios import Table, table_of
from nbflow_experiments.analysis.treatments import Format, StoredWeights, Treatment
from nbflow_experiments.scoring.estimates import estimate_share
from nbflow_experiments.scoring.greedy_divergence import common_prefixes, greedy_tokens
from nbflow_kernels.errors import UsageError

PROMPT = 32
"""First tokens of a window that are given."""
TOKENS = 64
"""Tokens that are generated."""
EXACT = {"weights": "f32", "kv": "f32"}


def generation_drift(
    model: str | os.PathLike[str],
    treatments: Sequence[str | Treatment],
    windows: Sequence[Sequence[int] | NDArray[Any]] | NDArray[Any],
    *,
    tokens: int = TOKENS,
    spec: str | os.PathLike[str] | None = None,
) -> Table:
    """Continue texts greedily and compare with the float32 model's continuations.

    Parameters
    ----------
    model : str or path
        As for `nbflow.load`.
    treatments : sequence of str or Treatment
        Formats, and quantized checkpoints (`StoredWeights`).
    windows : sequence of array of int
        Texts; the first `PROMPT` tokens of each, at most half of it, are the prompt.
    tokens : int
        Tokens that are generated after each prompt.
    spec : path, optional
        As for `nbflow.load`.

    Returns
    -------
    pandas.DataFrame
        A row for each treatment and power of two up to `tokens`: ``same_share`` of the prompts
        continue alike for that many tokens, with its standard error.

    Raises
    ------
    UsageError
        If a treatment is neither a format nor a checkpoint.
    """
    prompts = [list(map(int, w[: min(PROMPT, len(w) // 2)])) for w in windows]
    steps = [2**k for k in range(tokens.bit_length()) if 2**k <= tokens]
    exact = _continued(str(model), {**EXACT, "spec": spec}, prompts, tokens)
    rows = []
    for treatment in as_treatments(treatments):
        name, options = _options(treatment, str(model))
        found = _continued(name, {**EXACT, "spec": spec, **options}, prompts, tokens)
        common = common_prefixes(found, exact, tokens).common
        for n in steps:
            same = estimate_share(common >= n)
            rows.append({
                "change": treatment.label, "tokens": n, "prompts": len(prompts),
                "same_share": same.mean, "same_share_stderr": same.stderr,
                "common_tokens_median": float(np.median(common)),
            })  # fmt: skip
    return table_of(rows)


def _options(treatment: Treatment, model: str) -> tuple[str, dict[str, Any]]:
    """Return the model to load for a treatment, and how."""
    if isinstance(treatment, StoredWeights):
        return str(treatment.path), {"weights": None, "spec": None}
    if not isinstance(treatment, Format):
        raise UsageError(
            f"generation runs whole models in formats, or quantized checkpoints, got {treatment!r}"
        )
    known = None if treatment.statistics is None else dict(treatment.statistics)
    return model, {
        "weights": treatment.format, "quantizer": treatment.quantizer, "importance": known,
        "outliers": treatment.outliers,
    }  # fmt: skip


def _continued(
    model: str, options: dict[str, Any], prompts: list[list[int]], n_tokens: int
) -> list[Sequence[int]]:
    with nbflow.load(model, comm=SelfComm(), **options) as loaded:
        return greedy_tokens(loaded, prompts, n_tokens)
