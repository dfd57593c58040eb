#!/usr/bin/env python3
"""Compute perplexities of the bundled model with Transformers, for the tests of scoring.

    python tools/golden/perplexity.py

Needs torch and transformers.  Two conventions: disjoint windows of which the second half counts
(llama-perplexity), and sliding windows with a stride (Transformers' documentation, "Perplexity of
fixed-length models": labels of tokens scored before are -100).  Texts begin without BOS.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "specs/nbflow_specs/checkpoints/tiny_python"
OUT = ROOT / "tests/golden/perplexity.json"
CONTEXT, STRIDE, TOKENS = 64, 24, 700


def main() -> None:
    """Write the file."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = (
        Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        .encode((FOLDER / "eval.txt").read_text(encoding="utf-8"), add_special_tokens=False)
        .ids[:TOKENS]
    )
    found = {"second_half": second_half(model, ids), "sliding": sliding(model, ids)}
    facts = {"context": CONTEXT, "stride": STRIDE, "tokens": TOKENS}
    OUT.write_text(json.dumps(facts | found, indent=1) + "\n")


@torch.no_grad()
def second_half(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Return -ln p of the tokens that have at least half a window before them."""
    result: list[float] = []
    for start in range(0, len(ids) - CONTEXT + 1, CONTEXT):
        window = torch.tensor([ids[start : start + CONTEXT]])
        log_p = model(window).logits[0].double().log_softmax(-1)
        result += [-float(log_p[i - 1, window[0, i]]) for i in range(CONTEXT // 2 + 1, CONTEXT)]
    return result


@torch.no_grad()
def sliding(model: torch.nn.Module, ids: list[int]) -> float:
    """Return the perplexity by sliding windows, every token after the first scored once."""
    text = torch.tensor([ids])
    total, count, done = 0.0, 0, 0
    for start in range(0, text.shape[1], STRIDE):
        end = min(start + CONTEXT, text.shape[1])
        window, labels = text[:, start:end], text[:, start:end].clone()
        labels[:, : -(end - done)] = -100
        n = int((labels[:, 1:] != -100).sum())
        total += float(model(window, labels=labels).loss.double()) * n
        count, done = count + n, end
        if end == text.shape[1]:
            break
    return float(torch.tensor(total / count).double().exp())


if __name__ == "__main__":
    main()
