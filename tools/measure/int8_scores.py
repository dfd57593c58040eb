#!/usr/bin/env python3
"""Measure what int8 scores of attention cost in divergence, for q8_0 keys of the bundled model.

    python tools/measure/int8_scores.py results/kv_cache/MACHINE/int8_scores.jsonl

A row has weights, a cache format, and int8 activations with scores of floats or of int8: divergence
from the float32 model with a float16 cache, over 16 windows of 512 tokens.  With float32 weights
int8 activations change the scores alone.  It takes two minutes and needs AVX-512 VNNI.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from published_rows import append, conditions

import nbflow
from nbflow.spec import resolve
from nbflow_experiments.analysis.logit_comparison import Comparison
from nbflow_kernels.attention.cpu import launch

MODEL, WINDOW, N_WINDOWS = "tiny_python", 512, 16


def logits(windows: list[list[int]], **options: Any) -> list[Any]:
    """Return the logits of each window, computed by one thread."""
    with nbflow.load(MODEL, threads=1, **options) as model:
        return [np.array(model.logits(window)) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions()
    with nbflow.load(MODEL) as model:
        text = (resolve(MODEL).path / "eval.txt").read_text(encoding="utf-8")
        ids = np.array(model.tokenizer.encode(text))[: N_WINDOWS * WINDOW]
    windows = ids.reshape(N_WINDOWS, WINDOW).tolist()
    exact = logits(windows)
    for weights in ("f32", "q8_0", "q4_k"):
        for kv in ("q8_0", "q8_0/f16"):
            for scores in ("float", "int8"):
                keep = launch.has_int8_scores if scores == "int8" else lambda *_: False
                with mock.patch.object(launch, "has_int8_scores", keep):
                    found = logits(windows, weights=weights, kv=kv, activations="int8")
                compared = Comparison()
                for a, b, window in zip(exact, found, windows, strict=True):
                    compared.add(a[:-1], b[:-1], np.array(window[1:], np.int32))
                row = {"weights": weights, "kv": kv, "scores": scores, **compared.row()}
                print(row, flush=True)
                append(out, facts, [row])


if __name__ == "__main__":
    main()
