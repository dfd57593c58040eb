"""Make tests/golden/beam.json: results of transformers' beam search on the golden models.

    pip install transformers torch
    python tools/golden/beam_search.py

Contrastive search is computed here from its definition, with a full forward pass per candidate:
transformers has removed it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
MODELS = {"gpt2": AutoModelForCausalLM, "qwen2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}
OPTIONS = [
    {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 3, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": False},
]
PROMPT = [5, 17, 31, 8]
N_NEW = 12


def beams(model, options, end):
    n = options["num_beams"]
    if n == 1:  # transformers has no beam search of one beam: greedy, with its sum
        options = {"num_beams": 1}
    out = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), do_sample=False,
        max_new_tokens=N_NEW, num_return_sequences=n, eos_token_id=end, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    encoder = model.config.is_encoder_decoder
    first = 1 if encoder else len(PROMPT)
    found = []
    for b in range(n):
        ids = out.sequences[b, first:].tolist()
        if end in ids:
            ids = ids[: ids.index(end)]
        score = float(out.sequences_scores[b]) if n > 1 else None
        found.append({"ids": ids, "score": score})
    return found


@torch.no_grad()
def contrastive(model, top_k, alpha):
    ids = list(PROMPT)
    for _ in range(N_NEW):
        out = model(torch.tensor([ids]), output_hidden_states=True)
        before = out.hidden_states[-1][0]
        p, candidates = torch.softmax(out.logits[0, -1].double(), -1).topk(top_k)
        scores = []
        for share, token in zip(p.tolist(), candidates.tolist(), strict=True):
            text = torch.tensor([[*ids, token]])
            hidden = model(text, output_hidden_states=True).hidden_states[-1][0, -1]
            likeness = torch.cosine_similarity(before.double(), hidden.double()[None], dim=-1).max()
            scores.append((1 - alpha) * share - alpha * float(likeness))
        ids.append(int(candidates[scores.index(max(scores))]))
    return ids[len(PROMPT) :]


def main():
    found = {}
    for name, kind in MODELS.items():
        model = kind.from_pretrained(GOLDEN / "families" / name, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        greedy = beams(model, {"num_beams": 1}, 10**6)[0]["ids"]
        ends = [greedy[5], 3]
        runs = [
            {"options": options, "end": end, "found": beams(model, dict(options), end)}
            for options in OPTIONS
            for end in ends
        ]
        found[name] = {"beam": runs}
        if kind is AutoModelForCausalLM:
            found[name]["contrastive"] = [
                {"top_k": k, "penalty_alpha": a, "ids": contrastive(model, k, a)}
                for k, a in ((4, 0.6), (3, 0.2), (6, 0.9))
            ]
    path = GOLDEN / "beam.json"
    text = {"prompt": PROMPT, "n_new": N_NEW, "models": found}
    path.write_text(json.dumps(text, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
