"""Lazy readers of weight files with one API for all formats, by exact byte ranges.

A reader is a module with ``FORMAT``, ``matches(path, head)`` and ``open_file(path)``, listed in
`READERS`.  The content identifies the format; the suffix only selects the error message of a
damaged file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from nbflow.checkpoint.readers import ggml_legacy, gguf, llama2c, safetensors, torch_pickle
from nbflow.checkpoint.shards import INDEXES, find_in_folder
from nbflow.checkpoint.weight_file import TensorEntry, WeightFile
from nbflow.utils.binary_file import read_head
from nbflow_kernels.errors import UsageError

__all__ = ["TensorEntry", "WeightFile", "is_weight_file", "open_weights"]


class Reader(Protocol):
    """Interface of a reader's module."""

    FORMAT: str
    """Name of the format, `WeightFile.format`."""

    def matches(self, path: Path, head: bytes) -> bool:
        """Return whether the file at `path`, which begins with `head`, has this format."""

    def open_file(self, path: Path) -> WeightFile:
        """Open the file, or the index of several, at `path`."""


READERS: tuple[Reader, ...] = (safetensors, gguf, ggml_legacy, torch_pickle, llama2c)
_SUFFIXES: dict[str, Reader] = {
    ".safetensors": safetensors,
    ".gguf": gguf,
    ".bin": llama2c,
    ".pt": torch_pickle,
    ".pth": torch_pickle,
}
_HEAD_BYTES = 512


def open_weights(path: str | os.PathLike[str]) -> WeightFile:
    """Open a checkpoint and read its headers.

    Parameters
    ----------
    path : path
        A Hugging Face folder (``model.safetensors`` or ``pytorch_model.bin``, or the index of
        either), such an index, one ``.safetensors`` file, a torch checkpoint (``.bin``, ``.pt``,
        ``.pth``; nothing in it is executed), a ``.gguf`` file (any part of a split one), a
        Llama in a ggml, ggmf or ggjt file, or a llama2.c ``.bin`` (legacy, version 1, or version 2
        with int8 groups).

    Returns
    -------
    WeightFile
        A context manager; no tensor has been read yet.

    Raises
    ------
    UsageError
        If the file is missing, damaged or of an unknown format; the message names file and tensor.

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
    target = find_in_folder(path) if path.is_dir() else path
    weights = _reader(target).open_file(target)
    weights.path = path
    return weights


def _reader(path: Path) -> Reader:
    """Return the reader for a file or an index."""
    if path.name.endswith(".index.json"):
        return torch_pickle if path.name == INDEXES[1] else safetensors
    head = read_head(path, _HEAD_BYTES)
    for reader in READERS:
        if reader.matches(path, head):
            return reader
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        raise UsageError(
            f"{path}: a plain pickle, not a file of torch.save; reading it would execute it, so it "
            "is refused"
        )
    if head[257:262] == b"ustar":
        raise UsageError(
            f"{path}: a tar archive, as torch wrote before 0.1.11; load and save it with torch"
        )
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    formats = ", ".join(reader.FORMAT for reader in READERS)
    raise UsageError(f"{path}: not a weight file of a known format ({formats})")


def is_weight_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a reader recognizes the content of the file at `path`.

    The file may still be damaged.
    """
    path = Path(path)
    head = read_head(path, _HEAD_BYTES)
    return any(reader.matches(path, head) for reader in READERS)
