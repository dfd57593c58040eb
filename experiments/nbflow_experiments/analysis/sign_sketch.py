r"""Sign sketch of what a codebook loses of a key (TurboQuant, QJL), in NumPy float64.

A cache in a codebook loses r = k - k_stored.  The sketch keeps the length of r and the signs of m
random projections S r, with S of N(0, 1) numbers, and estimates

.. math:: q \cdot r \approx \frac{\sqrt{\pi / 2}}{m} \lVert r \rVert
          \, (S q) \cdot \mathrm{sign}(S r),

without bias over S (QJL, arXiv:2406.03482, lemma 3.2).  The kernels of attention do not use it:
this measures what it would be worth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kv_format
from nbflow_kernels.kv_cache.reference import decode, encode

Floats = NDArray[np.float64]
LENGTH_BITS = 16
"""Bits of the length of a residual, a float16 per key."""


class SketchErrors(NamedTuple):
    """Errors of attention over stored keys, of one format with or without a sketch."""

    bits: float
    """Stored bits per number of a key."""
    slope: float
    """Regression of stored on exact scores: below 1, large scores come out too small."""
    score_error: float
    """Root mean square error of scores, relative to their standard deviation."""
    attention_error: float
    """Root mean square error of the output, relative to its root mean square."""


def sketch_errors(
    q: Floats, k: Floats, v: Floats, format: str, *, signs: int = 0, seed: int = 0
) -> SketchErrors:
    """Measure scores and outputs of attention over keys in a format, with a sign sketch or without.

    Parameters
    ----------
    q, k, v : array, shapes (T, D), (N, D) and (N, D_v)
        Queries, keys and values of one head, rotated already.
    format : str
        Cache format of the keys; see `nbflow_kernels.kv_format`.
    signs : int
        Projections m of the sketch; 0 for none.
    seed : int
        Seed of the projections.

    Returns
    -------
    SketchErrors

    Raises
    ------
    UsageError
        If the number of signs is negative, or the format is unknown.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 64, 64))
    >>> plain = sketch_errors(q, k, v, "lm2")
    >>> sketched = sketch_errors(q, k, v, "lm2", signs=64)
    >>> round(plain.bits, 2), round(sketched.bits, 2)
    (2.5, 3.75)
    >>> plain.slope < 0.95 < sketched.slope
    True
    """
    if signs < 0:
        raise UsageError(f"signs must not be negative, got {signs}")
    there, D = kv_format(format), k.shape[1]
    rows = encode(np.asarray(k, np.float32), there.dtype, there.name)
    stored = decode(rows, there.name, D)
    scores, exact = q @ stored.T, q @ k.T
    bits = there.bits_per_value(D)
    if signs:
        projections = np.random.default_rng(seed).standard_normal((signs, D))
        rest = k - stored
        length = np.linalg.norm(rest, axis=1).astype(np.float16).astype(np.float64)
        products = (q @ projections.T) @ np.sign(rest @ projections.T).T
        scores = scores + np.sqrt(np.pi / 2) / signs * length * products
        bits += (signs + LENGTH_BITS) / D
    error = float(np.sqrt(np.square(scores - exact).mean()) / exact.std())
    slope = float((scores * exact).sum() / np.square(exact).sum())
    wanted = _attend(exact, v, D)
    lost = float(np.square(_attend(scores, v, D) - wanted).mean())
    return SketchErrors(bits, slope, error, float(np.sqrt(lost / np.square(wanted).mean())))


def _attend(scores: Floats, v: Floats, D: int) -> Floats:
    """Return softmax(scores / sqrt(D)) v."""
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)) / np.sqrt(D))
    found: Floats = weights / weights.sum(axis=1, keepdims=True) @ v
    return found
