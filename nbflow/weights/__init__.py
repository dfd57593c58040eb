"""Readers of weight files: one API for every format, lazy, by exact byte ranges.

A reader is one module with ``FORMAT``, ``matches(path, head)`` and ``open_file(path)``; it joins by
one line in `READERS`.  Files are recognised by content; the suffix only decides whose error message
a damaged file gets.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from nbflow.weights import gguf, llama2c, safetensors
from nbflow.weights.byte_file import ByteFile
from nbflow.weights.weight_file import TensorEntry, WeightFile
from nbflow_kernels.errors import UsageError

__all__ = ["TensorEntry", "WeightFile", "is_weight_file", "open_weights"]


class Reader(Protocol):
    """What a reader's module offers."""

    FORMAT: str
    """Name of the format, `WeightFile.format`."""

    def matches(self, path: Path, head: bytes) -> bool:
        """Return whether the file at `path`, which begins with `head`, is of this format."""

    def open_file(self, path: Path) -> WeightFile:
        """Open the file, or the folder, at `path`."""


READERS: tuple[Reader, ...] = (safetensors, gguf, llama2c)
_SUFFIXES: dict[str, Reader] = {
    ".safetensors": safetensors,
    ".gguf": gguf,
    ".bin": llama2c,
}
_HEAD_BYTES = 512


def open_weights(path: str | os.PathLike[str]) -> WeightFile:
    """Open a checkpoint and read its headers.

    Parameters
    ----------
    path : path
        A Hugging Face folder (``model.safetensors.index.json`` or ``model.safetensors``), one
        ``.safetensors`` file, a safetensors index, a ``.gguf`` file, or a llama2.c ``.bin``
        (legacy, version 1, or version 2 with int8 groups).

    Returns
    -------
    WeightFile
        A context manager; no tensor has been read yet.

    Raises
    ------
    UsageError
        If the file is missing, of no known format, or damaged; the message names file and tensor.

    Examples
    --------
    >>> from nbflow.spec import resolve
    >>> with open_weights(resolve("tiny_python").path) as weights:
    ...     name = "model.layers.0.self_attn.k_proj.weight"
    ...     weights.shape(name), weights.dtype(name), weights.array(name, rows=(5, 7)).shape
    ...     weights.bytes_read
    ((128, 256), 'f16', (2, 256))
    1024
    """
    path = Path(path)
    if path.is_dir() or path.name.endswith(".safetensors.index.json"):
        return safetensors.open_file(path)
    head = _head(path)
    for reader in READERS:
        if reader.matches(path, head):
            return reader.open_file(path)
    if head[:2] == b"PK" or head[:1] == b"\x80":
        raise UsageError(
            f"{path}: this is a torch pickle, which cannot be read; "
            "convert it to safetensors with safetensors.torch.save_file"
        )
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix].open_file(path)
    formats = ", ".join(reader.FORMAT for reader in READERS)
    raise UsageError(f"{path}: not a weight file of a known format ({formats})")


def is_weight_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a reader recognises the content of the file at `path`.

    Parameters
    ----------
    path : path
        An existing file.

    Returns
    -------
    bool
        True means that `open_weights` knows the format; the file may still be damaged.
    """
    path = Path(path)
    head = _head(path)
    return any(reader.matches(path, head) for reader in READERS)


def _head(path: Path) -> bytes:
    """Return the first bytes of a file."""
    file = ByteFile(path)
    try:
        return file.read(0, _HEAD_BYTES)
    finally:
        file.close()
