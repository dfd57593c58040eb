#!/usr/bin/env python3
"""Measure what a sign sketch of the residual (QJL) adds to keys in a Lloyd-Max codebook.

    python tools/measure/sign_sketch.py results/kv_cache/MACHINE/sign_sketch.jsonl

A row is a format with or without a sketch of 128 signs, for 512 queries, keys and values of N(0, 1)
with heads of 128, as after a rotation; queries are scaled so that scores have a variance of 4.  The
errors are the same on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from published_rows import append, conditions

from nbflow_experiments.analysis.sign_sketch import sketch_errors

SETTINGS = (("lm2", 0), ("lm2", 128), ("lm3", 0), ("lm3", 128), ("lm4", 0), ("q4_0", 0))
HEAD, N = 128, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions()
    q, k, v = np.random.default_rng(0).standard_normal((3, N, HEAD))
    rows = [
        {"keys": name, "signs": signs} | sketch_errors(2 * q, k, v, name, signs=signs)._asdict()
        for name, signs in SETTINGS
    ]
    append(out, facts, rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
