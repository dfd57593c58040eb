"""Tiny encoders and encoder-decoders with a word vocabulary, from the golden families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
BERT_TOKENS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
M2M_TOKENS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "__en__": 76, "__zh__": 77, "__fr__": 78}


def word_tokenizer(
    special: dict[str, int], single: list[str], pair: list[str] | None = None
) -> dict[str, Any]:
    """Return a tokenizer.json of the 97 tokens of the families: ``w5`` is token 5.

    `single` and `pair` are the tokens around one and two texts, which they call $A and $B.
    """
    names = {i: text for text, i in special.items()}
    added = [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, text in sorted(names.items())
    ]  # fmt: skip

    def pieces(tokens: list[str]) -> list[dict[str, Any]]:
        found, kind = [], 0
        for token in tokens:
            kind = 1 if token == "$B" else kind
            name = "Sequence" if token[0] == "$" else "SpecialToken"
            found.append({name: {"id": token.removeprefix("$"), "type_id": kind}})
        return found

    around = sorted({t for t in [*single, *(pair or ())] if t[0] != "$"})
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": pieces(single),
            "pair": pieces(pair or ["$A", "$B"]),
            "special_tokens": {
                t: {"id": t, "ids": [special[t]], "tokens": [t]} for t in around
            },
        },
        "model": {
            "type": "WordLevel", "unk_token": names[special.get("[UNK]", 3)],
            "vocab": {names.get(i, f"w{i}"): i for i in range(97)},
        },
    }  # fmt: skip


def with_tokenizer(name: str, folder: Path, tokenizer: dict[str, Any], **config: Any) -> Path:
    """Copy a golden family with a tokenizer and changes of its configuration."""
    folder.mkdir()
    shutil.copy(FAMILIES / name / "model.safetensors", folder)
    stated = json.loads((FAMILIES / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def translator(folder: Path, **config: Any) -> Path:
    """Write an M2M-100 with three languages."""
    tokenizer = word_tokenizer(M2M_TOKENS, ["__en__", "$A", "</s>"])
    return with_tokenizer("m2m_100", folder, tokenizer, **config)


def bert(folder: Path, name: str = "bert", **config: Any) -> Path:
    """Write a BERT with its special tokens."""
    pair = ["[CLS]", "$A", "[SEP]", "$B", "[SEP]"]
    return with_tokenizer(name, folder, word_tokenizer(BERT_TOKENS, pair[:3], pair), **config)


HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "classifier"),
}
"""Tensors of the classification head."""


def classifier(folder: Path, name: str = "bert", n_labels: int = 3, **config: Any) -> Path:
    """Write a classifier: the encoder of a golden family with a random head."""
    stated = {"id2label": {str(i): f"label {i}" for i in range(n_labels)}} if n_labels != 2 else {}
    bert(folder, name, **stated, **config)
    path, rng = folder / "model.safetensors", np.random.default_rng(7)
    tensors = {k: v for k, v in load_file(path).items() if k.startswith(f"{name}.")}
    for part, n in zip(HEADS[name], (36, n_labels), strict=True):
        tensors[f"{part}.weight"] = rng.standard_normal((n, 36)).astype(np.float32) / 4
        tensors[f"{part}.bias"] = rng.standard_normal(n).astype(np.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
