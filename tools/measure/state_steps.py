#!/usr/bin/env python3
"""Measure the divergence of rounded states along a text, read in chunks and token by token.

    python tools/measure/state_steps.py results/state_bits/MACHINE/steps.jsonl

Windows of the bundled hybrid's text go through the model as prompts, whose states are rounded after
each 8 tokens, and one token at a time, as generated text does.  A row is the mean KL divergence, in
nat per token, of a quarter of the windows' positions to float32 states in the same form, with the
standard error over the windows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published_rows import append, conditions

import nbflow
from nbflow.spec import resolve

MODEL, WINDOW, N_WINDOWS = "tiny_python_hybrid", 512, 16
FORMATS = ("f32", "f16", "bf16", "q8_0")


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the logarithms of softmax(logits), float64 (windows, positions, vocabulary)."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def read(model: nbflow.LLM, windows: list[list[int]], by_token: bool) -> NDArray[np.float64]:
    """Return the log-probabilities of all positions, in one call or one token at a time."""
    with model.session() as session:
        names = [session.begin() for _ in windows]
        length = 1 if by_token else WINDOW
        parts = []
        for t in range(0, WINDOW, length):
            ids = {n: w[t : t + length] for n, w in zip(names, windows, strict=True)}
            found = session.run(ids)
            parts.append(np.stack([found[n].logits for n in names]))
    return log_probabilities(np.concatenate(parts, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts = parser.parse_args().out, conditions()
    folder = resolve(MODEL).path
    rows: list[dict[str, object]] = []
    exact: dict[bool, NDArray[np.float64]] = {}
    for format in FORMATS:
        with nbflow.load(MODEL, weights="f32", kv="f32", state=format, threads=1) as model:
            assert model.tokenizer is not None
            ids = model.tokenizer.encode((folder / "eval.txt").read_text(encoding="utf-8"))
            windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(N_WINDOWS)]
            for by_token in (False, True):
                found = read(model, windows, by_token)
                wanted = exact.setdefault(by_token, found)
                kld = (np.exp(wanted) * (wanted - found)).sum(axis=-1)
                for quarter, part in enumerate(np.split(kld, 4, axis=1)):
                    means = part.mean(axis=1)
                    error = float(means.std(ddof=1) / N_WINDOWS**0.5)
                    rows.append(
                        {
                            "state": format, "form": "steps" if by_token else "chunks",
                            "first_position": quarter * WINDOW // 4,
                            "kld_mean_nats": float(means.mean()), "kld_mean_nats_stderr": error,
                        }
                    )  # fmt: skip
                    print(rows[-1], flush=True)
    append(out, facts, rows)


if __name__ == "__main__":
    main()
