#!/usr/bin/env python3
"""Measure attention over q4_0 keys with large channels, without and with a Hadamard rotation.

    python tools/measure/key_bias.py results/kv_rotation/MACHINE/key_bias.jsonl

Two of 64 channels of N(0, 1) keys are large in one of two ways: multiplied by a factor (a channel
with outliers) or shifted by the factor less one (a bias, which adds the same to all scores of a
query and so changes no exact result).  A row is the relative root mean square error of the output
of 256 queries over 512 keys, queries scaled so that scores have a variance of 4.  The errors are
the same on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published_rows import append, conditions

import nbflow_kernels as nk

HEAD, N_KEYS, N_QUERIES, CHANNELS = 64, 512, 256, [5, 40]
FACTORS = (1, 4, 16, 64)
VARIANCE = 4.0


def attention(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return softmax(q k^T) v."""
    scores = q @ k.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def errors(kind: str, factor: float) -> dict[str, float]:
    """Return the errors of plain and of rotated keys."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, HEAD)) for n in (N_QUERIES, N_KEYS, N_KEYS))
    if kind == "outliers":
        k[:, CHANNELS] *= factor
    else:
        k[:, CHANNELS] += factor - 1
    centred = q @ (k - k.mean(axis=0)).T
    q *= np.sqrt(VARIANCE / centred.var())
    exact = attention(q, k, v)
    found = {}
    for name, turned in (("plain", False), ("rotated", True)):
        keys, queries = k.astype(np.float32), q.astype(np.float32)
        if turned:
            keys, queries = (nk.hadamard_transform(x, HEAD) for x in (keys, queries))
        stored = nk.dequantize(nk.quantize(keys, "q4_0", quantizer="reference"))
        out = attention(queries.astype(np.float64), stored.astype(np.float64), v)
        found[name] = float(np.sqrt(np.square(out - exact).mean() / np.square(exact).mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions()
    rows = [
        {"kind": kind, "factor": factor, **errors(kind, factor)}
        for kind in ("outliers", "bias")
        for factor in FACTORS
    ]
    append(out, facts, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
