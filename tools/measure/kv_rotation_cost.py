#!/usr/bin/env python3
"""Measure what a rotated KV cache costs: steps with and without it in turn, on one model.

    python tools/measure/kv_rotation_cost.py MODEL... --out results/kv_rotation/MACHINE/cost.jsonl

A row has the ratios rotated / plain of the time of a prompt of 512 tokens and of a token decoded
behind it, medians over the rounds, with a q8_0 cache and int8 activations.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from published_rows import append, conditions

import nbflow

PROMPT, ROUNDS = [(i * 37) % 2000 + 3 for i in range(512)], 7
ROTATIONS = ("none", "hadamard")


def seconds(model: nbflow.LLM, n: int) -> float:
    """Return the time of a prompt and `n` more tokens."""
    start = time.perf_counter()
    model.generate(PROMPT, max_tokens=n, ignore_eos=True)
    return time.perf_counter() - start


def measure(path: Path, n_decoded: int) -> dict[str, float]:
    """Return the ratios of one model."""
    options = {"kv": "q8_0", "activations": "int8", "max_context": 1024}
    models = [nbflow.load(path, kv_rotation=rotation, **options) for rotation in ROTATIONS]
    prompts, decoded = [], []
    for _ in range(ROUNDS):
        short = [seconds(model, 1) for model in models]
        long = [seconds(model, 1 + n_decoded) for model in models]
        tokens = [b - a for a, b in zip(short, long, strict=True)]
        prompts.append(short[1] / short[0])
        decoded.append(tokens[1] / tokens[0])
    return {"prompt": statistics.median(prompts), "decode": statistics.median(decoded)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--decoded", type=int, default=48)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    facts = conditions() | {"rounds": ROUNDS, "decoded": arguments.decoded}
    for path in arguments.models:
        row = {"model": path.stem, **measure(path, arguments.decoded)}
        append(arguments.out, facts, [row])
        print(row)


if __name__ == "__main__":
    main()
