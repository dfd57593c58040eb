"""Divergence of KV-cache formats where the first tokens of a sequence stay in floats.

Attention of trained models often rests on the first tokens ("attention sinks", StreamingLLM,
arXiv:2309.17453), and KVQuant (arXiv:2401.18079, section 3.5) keeps the first token in float16.
The engine's caches hold all tokens in one format: this measures what an exception is worth.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from nbflow.checkpoint import open_weights
from nbflow.executor import ReferenceExecutor, WeightLoader
from nbflow.kv_cache.rotation import with_rotation
from nbflow.program import build, fuse
from nbflow.spec import resolve
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_formats
from nbflow_kernels.kv_cache.reference import decode, encode

Floats = NDArray[np.float64]


def sink_divergence(
    model: str | os.PathLike[str],
    formats: Sequence[str],
    windows: Sequence[Sequence[int]],
    *,
    sinks: Sequence[int] = (0, 1, 4),
    rotation: str = "none",
) -> pd.DataFrame:
    """Measure cache formats with and without the first tokens in floats, in NumPy float64.

    Parameters
    ----------
    model : str or path
        Decoder, as `nbflow.load` takes it.
    formats : sequence of str
        Cache formats: ``q4_0``, or ``q4_0/f16`` for keys and values.
    windows : sequence of sequences of int
        Token ids; each window is a sequence of its own.
    sinks : sequence of int
        How many of the first tokens of each window keep exact keys and values.
    rotation : str
        ``hadamard`` rotates the sides in block formats, as the engine's ``kv_rotation``.

    Returns
    -------
    DataFrame
        A row per format and number of sinks: ``kld`` from the exact cache (nat per token) over the
        tokens behind the largest number of sinks and its standard error over windows, and
        ``gain``, the divergence without sinks less this, with the standard error of the pairs.

    Raises
    ------
    UsageError
        If there are fewer than two windows, a window is not longer than the sinks, or a format or
        the model is unknown.

    Examples
    --------
    >>> found = sink_divergence("tiny_python", ["q2/f16"], [[0, 5, 7, 9, 4], [3, 8, 8, 1, 2]])
    >>> found.sinks.tolist()
    [0, 1, 4]
    """
    skipped = max(sinks)
    if len(windows) < 2 or min(map(len, windows)) <= skipped:
        raise UsageError(
            f"wanted two windows or more of more than {skipped} tokens, found windows of "
            f"{sorted(map(len, windows))} tokens"
        )
    float_cache = _Model(model, None, 0, "none")
    exact = [float_cache.log_probabilities(w)[skipped:] for w in windows]
    rows = []
    for format in formats:
        plain = np.zeros(len(windows))
        for n in sorted({0, *sinks}):
            cached = _Model(model, format, n, rotation)
            found = [cached.log_probabilities(w)[skipped:] for w in windows]
            kld = np.array([_kld(a, b) for a, b in zip(exact, found, strict=True)])
            plain = kld if n == 0 else plain
            if n in sinks:
                means = {"kld": _mean(kld), "gain": _mean(plain - kld)}
                flat = {k: v for k, (v, _) in means.items()}
                errors = {f"{k}_stderr": e for k, (_, e) in means.items()}
                rows.append({"kv": format, "kv_rotation": rotation, "sinks": n, **flat, **errors})
    return pd.DataFrame(rows)


class _Model:
    """A model in float64 whose cache is rounded to a format, but for the first tokens."""

    def __init__(
        self, model: str | os.PathLike[str], format: str | None, sinks: int, rotation: str
    ) -> None:
        resolved = resolve(model)
        self._names = None if format is None else kv_formats(format)
        self._sinks = sinks
        spec = resolved.spec
        if format is not None and rotation != "none":
            spec = with_rotation(spec, rotation, format)
        self._program = fuse(build(spec))
        with open_weights(resolved.path) as file:
            self._weights = WeightLoader(self._program, file, None)

    def log_probabilities(self, ids: Sequence[int]) -> Floats:
        """Return the log-probabilities after each token, shape (T, V)."""
        executor = ReferenceExecutor(self._program, self._weights, cached=self._round)
        logits = executor.logits(np.asarray(ids, np.int64))
        logits -= logits.max(axis=1, keepdims=True)
        found: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return found

    def _round(self, rows: Floats, side: int, first: int) -> Floats:
        if self._names is None:
            return rows
        format = self._names[side]
        stored = encode(np.asarray(rows, np.float32), format.dtype, format.name)
        found = np.array(decode(stored, format.name, rows.shape[-1]), np.float64)
        kept = max(0, self._sinks - first)
        found[:kept] = rows[:kept]
        return found


def _kld(exact: Floats, found: Floats) -> float:
    return float((np.exp(exact) * (exact - found)).sum(axis=1).mean())


def _mean(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))
