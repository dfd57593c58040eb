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

import os
from importlib import import_module
from pathlib import Path

from nbflow.tokenizer.files import NAMES, in_folder, kind_of
from nbflow.tokenizer.special_ids import role_ids
from nbflow.tokenizer.tokenizer import DecodeStream, Tokenizer
from nbflow_kernels.errors import UsageError, unknown_name

__all__ = ["DecodeStream", "Tokenizer", "load_tokenizer"]

KINDS = {
    "hf": "nbflow.tokenizer.hf",
    "sentencepiece": "nbflow.tokenizer.sp_model",
    "bpe": "nbflow.tokenizer.bpe_files",
    "wordpiece": "nbflow.tokenizer.word_piece",
    "gguf": "nbflow.tokenizer.gguf_vocab",
    "llama2c": "nbflow.tokenizer.llama2c",
}
"""Kind of tokenizer file -> module whose ``from_file`` reads it."""


def load_tokenizer(model: str | os.PathLike[str], kind: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model, or a tokenizer file.

    Parameters
    ----------
    model : str or path
        A tokenizer file (``tokenizer.json``, ``tokenizer.model``, ``vocab.json``, ``vocab.txt``,
        llama2.c ``tokenizer.bin``, a ``.gguf``), a folder that holds one, or a model as for
        `nbflow.spec.resolve`.
    kind : {"hf", "sentencepiece", "bpe", "wordpiece", "gguf", "llama2c"}, optional
        Which kind of tokenizer file it is; by default its name and content decide.

    Returns
    -------
    Tokenizer
        With ``encode``, ``decode``, ``decode_stream``, ``vocab_size``, ``bos_id``, ``eos_ids``.

    Raises
    ------
    UsageError
        If there is no such model, no tokenizer beside it, or the file is damaged.
    MissingExtraError
        If the kind needs a package that is not installed.

    See Also
    --------
    nbflow.prompts.encode_chat : The ids of a conversation.

    Examples
    --------
    >>> import nbflow
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> tokenizer.decode(tokenizer.encode("def f(x):"))
    'def f(x):'
    """
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of tokenizer", kind, KINDS)
    path, template = _tokenizer_file(model, kind)
    tokenizer: Tokenizer = import_module(KINDS[kind or kind_of(path)]).from_file(path)
    tokenizer.named_tokens = {**tokenizer.named_tokens, **_roles(tokenizer, path.parent)}
    tokenizer.prompt_template = template
    return tokenizer


def _roles(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Return how the tokens are spelt that generation_config.json puts before messages."""
    roles = {}
    for role, token_id in role_ids(folder).items():
        if token_id >= tokenizer.vocab_size:
            raise UsageError(
                f"{folder / 'generation_config.json'}: {role}_id: token id must be "
                f"0..{tokenizer.vocab_size - 1}, got {token_id}"
            )
        roles[role] = tokenizer.piece(token_id)
    return roles


def _tokenizer_file(model: str | os.PathLike[str], kind: str | None) -> tuple[Path, str | None]:
    """Return the tokenizer file that `model` is or has, and its model file's template."""
    path = Path(model)
    if path.is_file() and path.suffix != ".toml" and (kind is not None or not _is_weights(path)):
        return path, None
    if path.is_file() and kind_of(path) == "gguf":
        return path, None  # before its architecture is known to be one we can run
    found = in_folder(path)
    if found is not None:
        return found, None
    from nbflow.spec import resolve  # late: tokenizer files need no model

    resolved = resolve(model)
    if resolved.tokenizer is None:
        raise UsageError(
            f"{resolved.path}: no tokenizer lies beside the weights; wanted one of "
            f"{', '.join(NAMES)}, or tokenizer.bin for llama2.c; name the tokenizer file itself"
        )
    return resolved.tokenizer, resolved.prompt_template


def _is_weights(path: Path) -> bool:
    """Return whether a file holds weights."""
    from nbflow.weights import is_weight_file

    return is_weight_file(path)
