"""Llama models in GGML's formats before GGUF: ggml, ggmf and ggjt versions 1 to 3.

==========  ====================================================================================
field       content (u32 each, little-endian, unless stated)
==========  ====================================================================================
magic       ``lmgg`` (ggml), ``fmgg`` (ggmf), ``tjgg`` (ggjt)
version     ggmf: 1; ggjt: 1, 2 or 3; ggml has none
numbers     n_vocab, n_embd, n_mult, n_head, n_layer, n_rot, ftype
vocabulary  n_vocab times: length, bytes, f32 score (ggml has no scores)
tensors     to the end of the file: dimensions, length of the name, type, sizes (fastest first),
            name, in ggjt zeros up to a multiple of 32 bytes, data
==========  ====================================================================================

Types and blocks of ggjt version 3 are those of GGUF.  Older layouts (all block formats before
version 2; q4_0, q4_1 and q8_0 in version 2), other architectures and models in several parts are
refused.

Layout: https://github.com/ggerganov/llama.cpp/blob/02240912ff3621da378ed62cb5d0f279f17fc9d1/\
convert-llama-ggml-to-gguf.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbflow.checkpoint.dtypes import tensor_bytes
from nbflow.checkpoint.readers.gguf import tensor_types
from nbflow.checkpoint.weight_file import TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteCursor, ByteFile
from nbflow_kernels.errors import UsageError

FORMAT = "ggml"

_VERSIONS = {b"lmgg": (0,), b"fmgg": (1,), b"tjgg": (1, 2, 3)}
_OTHERS = {b"algg": "a LoRA adapter", b"nsgg": "a saved session", b"ccgg": "a Falcon model"}
_BOUNDS = {
    "n_vocab": 1 << 20,
    "n_embd": 1 << 20,
    "n_mult": 1 << 20,
    "n_head": 1 << 12,
    "n_layer": 1 << 12,
    "n_rot": 1 << 16,
    "ftype": 1 << 16,
}
_MAX_TENSORS = 1 << 16
_MAX_TOKEN_BYTES = 1 << 12
_MAX_NAME_BYTES = 1 << 12
_FLOATS = ("f32", "f16")
_CHANGED_IN_3 = ("q4_0", "q4_1", "q8_0")
_LAST_TYPE = 14  # q6_k; later types exist in GGUF only


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` is one of these, or another file of GGML."""
    return head[:4] in _VERSIONS or head[:4] in _OTHERS


def open_file(path: Path) -> WeightFile:
    """Open one file; see `nbflow.checkpoint.open_weights`."""
    file = ByteFile(path)
    try:
        config, entries = _read_header(file)
    except BaseException:
        file.close()
        raise
    return WeightFile(path, FORMAT, entries, [file], lambda: dict(config))


def _read_header(file: ByteFile) -> tuple[dict[str, Any], list[TensorEntry]]:
    """Return configuration and tensors, every number checked against the file's size."""
    cursor = ByteCursor(file)
    magic = cursor.take(4, "the magic")
    if magic not in _VERSIONS:
        what = _OTHERS.get(magic, "not a GGML file")
        raise UsageError(f"{file.path}: is {what}; expected a Llama model in GGML's old layout")
    version = 0 if magic == b"lmgg" else cursor.number("I", "the version")
    if version not in _VERSIONS[magic]:
        raise UsageError(
            f"{file.path}: version of a {magic[::-1].decode()} file must be one of "
            f"{_VERSIONS[magic]}, got {version}"
        )
    numbers = {name: cursor.number("I", name) for name in _BOUNDS}
    for name, bound in _BOUNDS.items():
        if numbers[name] > bound or (numbers[name] == 0 and name != "ftype"):
            raise UsageError(
                f"{file.path}: {name} must be 1..{bound}, got {numbers[name]}; the file is damaged "
                "or of another architecture than Llama"
            )
    for i in range(numbers["n_vocab"]):
        cursor.text("I", f"token {i} of the vocabulary", _MAX_TOKEN_BYTES)
        if magic != b"lmgg":
            cursor.number("f", f"the score of token {i}")
    entries: dict[str, TensorEntry] = {}
    while cursor.left:
        entry = _read_tensor(cursor, len(entries), magic, version)
        if entry.name in entries:
            raise UsageError(f"{file.path}: tensor {entry.name!r:.80} is there twice")
        if len(entries) >= _MAX_TENSORS:
            raise UsageError(f"{file.path}: has more than {_MAX_TENSORS} tensors")
        entries[entry.name] = entry
    return _config(file, numbers, entries), list(entries.values())


def _read_tensor(cursor: ByteCursor, i: int, magic: bytes, version: int) -> TensorEntry:
    """Read the record of the next tensor and skip its data."""
    path = cursor.file.path
    n_dimensions, n_name, number = (cursor.number("I", f"tensor {i}") for _ in range(3))
    if n_dimensions > 4 or n_name > _MAX_NAME_BYTES:
        raise UsageError(
            f"{path}: tensor {i} has {n_dimensions} dimensions and a name of {n_name} bytes; the "
            "file is damaged"
        )
    shape = tuple(cursor.numbers("I", n_dimensions, f"tensor {i}"))[::-1]
    name = cursor.take(n_name, f"the name of tensor {i}").decode("utf-8", "surrogateescape")
    where = f"{path}: tensor {name!r:.80}"
    dtype = tensor_types().get(number) if number <= _LAST_TYPE else None
    if dtype is None:
        raise UsageError(f"{where} has the unknown type {number}")
    is_old = magic != b"tjgg" or version < 2 or (version == 2 and dtype in _CHANGED_IN_3)
    if is_old and dtype not in _FLOATS:
        raise UsageError(
            f"{where} is {dtype} in a layout from before ggjt version {3 if version == 2 else 2}, "
            "which is not supported; convert the model again from its original weights"
        )
    if magic == b"tjgg":
        cursor.take(-cursor.position % 32, f"the padding of tensor {i}")
    n_bytes = tensor_bytes(dtype, shape, where)
    if n_bytes > cursor.left:
        raise UsageError(
            f"{where}: shape {shape} of {dtype} needs {n_bytes} bytes at {cursor.position}, but "
            f"the file ends at {cursor.stop}; it is truncated or damaged"
        )
    entry = TensorEntry(name, dtype, shape, cursor.file, cursor.position)
    cursor.position += n_bytes
    return entry


def _config(
    file: ByteFile, numbers: dict[str, int], entries: dict[str, TensorEntry]
) -> dict[str, Any]:
    """Return the numbers by name, with those that follow from the tensors' shapes."""
    shapes = {name: entry.shape for name, entry in entries.items()}
    embedding = shapes.get("tok_embeddings.weight")
    if embedding != (numbers["n_vocab"], numbers["n_embd"]):
        raise UsageError(
            f"{file.path}: tok_embeddings.weight must have shape (n_vocab, n_embd) = "
            f"({numbers['n_vocab']}, {numbers['n_embd']}), got {embedding}; the file is one of "
            "several parts, or of another architecture than Llama"
        )
    config: dict[str, Any] = {"model_type": "ggml-llama", **numbers}
    up = shapes.get("layers.0.feed_forward.w1.weight", ())
    key = shapes.get("layers.0.attention.wk.weight", ())
    head_dim = numbers["n_embd"] // numbers["n_head"]
    if len(up) == len(key) == 2 and head_dim and key[0] % head_dim == 0:
        config |= {"n_ff": up[0], "n_head_kv": key[0] // head_dim}
    return config
