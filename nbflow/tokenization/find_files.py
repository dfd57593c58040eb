"""Tokenizer file of a model, and the kind of a tokenizer file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbflow.checkpoint import is_weight_file
from nbflow.checkpoint.readers import gguf
from nbflow.utils.binary_file import read_head
from nbflow_kernels.errors import UsageError

NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
)
"""Tokenizer files of a folder, the most complete first."""
_RANKS = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
"""First line of a tiktoken file: a token in base64, and its rank."""
_SENTENCEPIECE = b"\x0a"  # field 1, length-delimited: the first piece


def tokenizer_of_weights(
    weights: Path, format: str, vocab_size: int, config: Mapping[str, Any]
) -> Path | None:
    """Return the tokenizer file of a model's weights, or None.

    For llama2.c this is ``tok{vocab_size}.bin`` or ``tokenizer.bin``; for GGUF the file itself if
    its configuration has a vocabulary; else the first of `NAMES` in the folder of the weights.
    """
    if format == "gguf" and weights.is_file():
        table: Any = config
        for key in ("tokenizer", "ggml", "model"):
            table = table.get(key) if isinstance(table, Mapping) else None
        if table not in (None, "no_vocab", "none"):
            return weights
    folder = weights if weights.is_dir() else weights.parent
    names = [f"tok{vocab_size}.bin", "tokenizer.bin"] if format == "llama2c" else []
    return in_folder(folder, *names)


def in_folder(folder: Path, *first: str) -> Path | None:
    """Return the tokenizer file in a folder, or None; the names `first` win."""
    for name in (*first, *NAMES):
        path = folder / name
        # vocab.json without merges.txt belongs to tokenizers of other kinds
        if path.is_file() and (name != "vocab.json" or path.with_name("merges.txt").is_file()):
            return path
    return None


def find_tokenizer(path: Path, kind: str | None = None) -> Path | None:
    """Return the tokenizer file at or in a path; None for weights and names of models."""
    if path.is_file() and path.suffix != ".toml":
        # a GGUF file is both; its tokenizer works even if its architecture is unknown
        own = kind is not None or not is_weight_file(path) or kind_of(path) == "gguf"
        return path if own else None
    return in_folder(path)


def kind_of(path: Path) -> str:
    """Return the kind of a tokenizer file by its name and its first bytes."""
    head = read_head(path, 64)
    if path.suffix != ".txt" and _RANKS.match(head):
        raise UsageError(
            f"{path}: tiktoken's ranks, which do not say how texts are divided; use the model's "
            "tokenizer.json (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    if head.startswith(gguf.MAGIC):
        return "gguf"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return "bpe" if path.name == "vocab.json" else "hf"
    if path.suffix == ".txt":
        return "wordpiece"
    if path.suffix in (".model", ".spm") or (
        head.startswith(_SENTENCEPIECE) and path.suffix != ".bin"
    ):
        return "sentencepiece"
    return "llama2c"
