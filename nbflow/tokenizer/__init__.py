"""Tokenizers: Hugging Face tokenizer.json and llama2.c tokenizer.bin behind one interface."""

from __future__ import annotations

import os
from pathlib import Path

from nbflow.tokenizer.hf import HfTokenizer
from nbflow.tokenizer.llama2c import Llama2cTokenizer
from nbflow.tokenizer.tokenizer import DecodeStream, Tokenizer
from nbflow_kernels.errors import UsageError, unknown_name

__all__ = ["DecodeStream", "Tokenizer", "load_tokenizer"]

KINDS: dict[str, type[HfTokenizer] | type[Llama2cTokenizer]] = {
    "hf": HfTokenizer,
    "llama2c": Llama2cTokenizer,
}


def load_tokenizer(model: str | os.PathLike[str], kind: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model, or a tokenizer file.

    Parameters
    ----------
    model : str or path
        A tokenizer file (``tokenizer.json``, llama2.c ``tokenizer.bin``), a folder that holds
        ``tokenizer.json``, or a model as for `nbflow.spec.resolve`.
    kind : {"hf", "llama2c"}, optional
        Which kind of tokenizer file it is; by default its content decides.

    Returns
    -------
    Tokenizer
        With ``encode``, ``decode``, ``decode_stream``, ``vocab_size``, ``bos_id``, ``eos_ids``.

    Raises
    ------
    UsageError
        If there is no such model, no tokenizer beside it, or the file is damaged.

    Examples
    --------
    >>> import nbflow
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> tokenizer.decode(tokenizer.encode("def f(x):"))
    'def f(x):'
    """
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of tokenizer", kind, KINDS)
    path = _tokenizer_file(model, kind)
    if kind is None:
        kind = _kind(path)
    return KINDS[kind](path)


def _tokenizer_file(model: str | os.PathLike[str], kind: str | None) -> Path:
    """Return the tokenizer file that `model` is or has."""
    path = Path(model)
    if path.is_file() and path.suffix != ".toml" and (kind is not None or not _is_weights(path)):
        return path
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    from nbflow.spec import resolve  # late: tokenizer files need no model

    resolved = resolve(model)
    if resolved.tokenizer is None:
        raise UsageError(
            f"{resolved.path}: no tokenizer lies beside the weights; wanted tokenizer.json, or "
            "tokenizer.bin for llama2.c; name the tokenizer file itself"
        )
    return resolved.tokenizer


def _is_weights(path: Path) -> bool:
    """Return whether a file holds weights."""
    from nbflow.weights import is_weight_file

    return is_weight_file(path)


def _kind(path: Path) -> str:
    """Return the kind of a tokenizer file: JSON begins with a brace."""
    with open(path, "rb") as file:
        head = file.read(64)
    return "hf" if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") else "llama2c"
