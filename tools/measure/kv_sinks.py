#!/usr/bin/env python3
"""Measure KV caches of the bundled model whose first tokens stay in floats.

    python tools/measure/kv_sinks.py results/kv_cache/MACHINE/kv_sinks.jsonl

A row is a cache format, plain or rotated, with 0, 1 or 4 exact tokens at the start of each of 12
windows of 256 tokens, which begin with the end-of-text token as documents do.  Computed in NumPy
float64: the numbers are the same on every machine.  It takes five minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from published_rows import append, conditions

import nbflow
from nbflow.spec import resolve
from nbflow_experiments.analysis.kv_sinks import sink_divergence

MODEL, WINDOW, N_WINDOWS = "tiny_python", 256, 12
FORMATS = ("q4_0/f16", "q2/f16", "q2")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions()
    with nbflow.load(MODEL) as model:
        text = (resolve(MODEL).path / "eval.txt").read_text(encoding="utf-8")
        ids = np.array(model.tokenizer.encode(text))[: N_WINDOWS * (WINDOW - 1)]
    first = np.zeros((N_WINDOWS, 1), np.int64)  # the end-of-text token
    windows = np.concatenate([first, ids.reshape(N_WINDOWS, -1)], axis=1).tolist()
    for rotation in ("none", "hadamard"):
        found = sink_divergence(MODEL, FORMATS, windows, rotation=rotation)
        print(found.to_string(), flush=True)
        append(out, facts, found.to_dict("records"))


if __name__ == "__main__":
    main()
