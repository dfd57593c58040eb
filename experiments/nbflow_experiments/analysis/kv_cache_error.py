"""Errors of a KV-cache format in one layer: keys, values, and attention output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.executor import Step
from nbflow_experiments.analysis.layer_programs import Stage
from nbflow_experiments.analysis.ratios import ratio, relative_error
from nbflow_kernels.benchmarks.kv_cache_error import stored

Floats = NDArray[np.float32]
BUFFERS = ("k", "v", "a")  # cached keys and values, attention output


def split_kv(kv: str) -> tuple[str, str]:
    """Split ``q8`` or ``q8/q4`` into key format and value format."""
    keys, _, values = kv.partition("/")
    return keys, values or keys


class CacheErrors:
    """KV-cache errors of one layer, from the buffers of its exact run."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._exact: list[dict[str, Floats | None]] = []

    def keep(self, stage: Stage, step: Step) -> None:
        """Copy the buffers of the exact stage after a window."""
        self._exact.append({name: stage.buffer(name, len(step.ids)) for name in BUFFERS})

    def row(self, kv: str, attention: list[Floats | None]) -> dict[str, Any]:
        """Return the columns of a cache format.

        Parameters
        ----------
        kv : str
            Its name.
        attention : list of array, shape (T, heads * value_dim)
            Attention output of each window with this cache, from exact inputs.
        """
        keys, values = split_kv(kv)
        return {
            "keys_error": self._cache_error("k", keys),
            "values_error": self._cache_error("v", values),
            "attention_error": _relative(
                [(e["a"], a) for e, a in zip(self._exact, attention, strict=True)]
            ),
            "keys_channel_ratio": self._channel_ratio("k"),
            "values_channel_ratio": self._channel_ratio("v"),
        }

    def _heads(self, name: str) -> list[Floats]:
        arrays = [exact[name] for exact in self._exact]
        return [a.reshape(-1, self._head_dim) for a in arrays if a is not None]

    def _cache_error(self, name: str, format: str) -> float:
        """Return the relative round-trip error of head vectors through the cache format."""
        return _relative([(x, stored(x.astype(np.float64), format)) for x in self._heads(name)])

    def _channel_ratio(self, name: str) -> float:
        """Return the largest channel RMS of a head over the median channel RMS."""
        arrays = [exact[name] for exact in self._exact]
        if any(a is None for a in arrays):
            return np.nan
        sums = sum(np.square(a, dtype=np.float64).sum(axis=0) for a in arrays if a is not None)
        sizes = np.sqrt(np.asarray(sums))
        median = float(np.median(sizes))
        return ratio(float(sizes.max()), median)


def _relative(pairs: list[tuple[Any, Any]]) -> float:
    """Return ||found - exact|| / ||exact|| over pairs (exact, found); NaN if empty."""
    if not pairs or any(a is None or b is None for a, b in pairs):
        return np.nan
    lost = sum(float(np.square(b - a.astype(np.float64)).sum()) for a, b in pairs)
    norm = sum(float(np.square(a, dtype=np.float64).sum()) for a, _ in pairs)
    return relative_error(lost, norm)
