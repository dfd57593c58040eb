"""Tokenizers of every kind behind one interface.

=================  =====================================================================
kind               files
=================  =====================================================================
``hf``             ``tokenizer.json``
``sentencepiece``  ``tokenizer.model``, ``spiece.model``, ``source.spm`` with ``vocab.json`` (extra
                   ``sentencepiece``)
``bpe``            ``vocab.json`` with ``merges.txt`` (GPT-2, RoBERTa, Qwen2)
``wordpiece``      ``vocab.txt`` (BERT)
``gguf``           a ``.gguf`` that holds its vocabulary
``llama2c``        llama2.c's ``tokenizer.bin``
=================  =====================================================================
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from nbflow.tokenization.find_files import kind_of
from nbflow.tokenization.special_tokens import role_ids
from nbflow.tokenization.tokenizer import DecodeStream, Tokenizer
from nbflow.tokenization.tokenizer_config import read_tokenizer_config
from nbflow_kernels.errors import UsageError, unknown_name

__all__ = ["DecodeStream", "Tokenizer", "load_tokenizer_file"]

KINDS = {
    "hf": "nbflow.tokenization.huggingface",
    "sentencepiece": "nbflow.tokenization.sentencepiece",
    "bpe": "nbflow.tokenization.gpt2_bpe",
    "wordpiece": "nbflow.tokenization.wordpiece",
    "gguf": "nbflow.tokenization.gguf_vocabulary",
    "llama2c": "nbflow.tokenization.llama2c",
}
"""Kind of tokenizer file -> module whose ``from_file`` reads it."""


def load_tokenizer_file(path: Path, kind: str | None = None) -> Tokenizer:
    """Load a tokenizer file.

    `kind` is a name of `KINDS`; by default the file's name and content decide.

    See Also
    --------
    nbflow.load_tokenizer : The tokenizer of a model by its name.
    """
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of tokenizer", kind, KINDS)
    tokenizer: Tokenizer = import_module(_module(path, kind or kind_of(path))).from_file(path)
    tokenizer.named_tokens = {**tokenizer.named_tokens, **_role_tokens(tokenizer, path.parent)}
    return tokenizer


def _module(path: Path, kind: str) -> str:
    """Return the module that reads a file; some models renumber SentencePiece's pieces."""
    if kind == "sentencepiece" and path.name == "source.spm":
        return "nbflow.tokenization.marian"
    if kind == "sentencepiece":
        tokenizer_class = read_tokenizer_config(path.parent).tokenizer_class
        if tokenizer_class == "M2M100Tokenizer":
            return "nbflow.tokenization.m2m100"
    return KINDS[kind]


def _role_tokens(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Return the spelling of the role tokens in generation_config.json."""
    roles = {}
    for role, token_id in role_ids(folder).items():
        if token_id >= tokenizer.vocab_size:
            raise UsageError(
                f"{folder / 'generation_config.json'}: {role}_id: token id must be "
                f"0..{tokenizer.vocab_size - 1}, got {token_id}"
            )
        roles[role] = tokenizer.piece(token_id)
    return roles
