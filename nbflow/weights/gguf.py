"""GGUF, versions 2 and 3: metadata and tensors of GGML types in one file.

==============  =========================================================================
field           what
==============  =========================================================================
magic           ``GGUF``
version         u32: 2 or 3
counts          u64 tensors, u64 metadata entries
metadata        per entry: string key, u32 type, value (array: u32 type, u64 count, values)
tensor table    per tensor: string name, u32 dimensions, u64 each (fastest first), u32 type,
                u64 offset
padding         up to a multiple of ``general.alignment`` (32)
data            each tensor at its offset, aligned
==============  =========================================================================

A string is a u64 length and its bytes; all numbers are little-endian.

Why not the reader of the ``gguf`` package: its errors name neither file nor tensor, it believes
counts before it compares them with the file's size, and ranks here read exact byte ranges and count
them.  The types and their blocks are `nbflow_kernels.FORMATS`.

Layout: https://github.com/ggml-org/ggml/blob/9b048bb72b811f50b0c30d9e5c84d6ff9f4bf005/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from nbflow.weights.byte_file import ByteFile
from nbflow.weights.weight_file import TensorEntry, WeightFile, tensor_bytes
from nbflow_kernels.errors import UsageError

FORMAT = "gguf"
MAGIC = b"GGUF"

TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k",
    11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs",
    19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16",
    26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0",
    39: "mxfp4", 40: "nvfp4", 41: "q1_0", 42: "q2_0",
}  # fmt: skip
"""GGML's number of a type -> our name."""
REMOVED = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
"""Numbers of types that GGML has removed."""

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays
_CHUNK = 1 << 20


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` is GGUF."""
    return head[:4] == MAGIC


def open_file(path: Path) -> WeightFile:
    """Open one file; see `nbflow.weights.open_weights`."""
    file = ByteFile(path)
    try:
        metadata, entries = _read_header(file)
    except BaseException:
        file.close()
        raise
    return WeightFile(path, FORMAT, entries, [file], lambda: _config(metadata))


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a file, with the keys as they are in it."""
    file = ByteFile(path)
    try:
        return _read_header(file)[0]
    finally:
        file.close()


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata without long arrays, dotted keys as tables, with a ``model_type``."""
    config: dict[str, Any] = {}
    for key, value in metadata.items():
        if isinstance(value, list) and len(value) > 64:
            continue  # the vocabulary: for the tokenizer
        *tables, last = key.split(".")
        table = config
        for name in tables:
            inner = table.setdefault(name, {})
            table = inner if isinstance(inner, dict) else {}
        table[last] = value
    architecture = str(metadata.get("general.architecture"))
    config["model_type"] = f"gguf-{architecture}"
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and isinstance(config.get(architecture), dict):
        config[architecture].setdefault("vocab_size", len(tokens))
    return config


class _Cursor:
    """Reads numbers and strings one after the other, never past the end of the file."""

    def __init__(self, file: ByteFile) -> None:
        self._file = file
        self.position = 0
        self._start = 0
        self._data = b""

    def take(self, n: int, what: str) -> bytes:
        """Return the next `n` bytes."""
        if n > self._file.size - self.position:
            raise UsageError(
                f"{self._file.path}: {what} at byte {self.position} needs {n} bytes, but the file "
                f"ends at {self._file.size}; it is truncated or damaged"
            )
        begin = self.position - self._start
        if begin + n > len(self._data):
            self._start, begin = self.position, 0
            self._data = self._file.read(self.position, max(n, _CHUNK))
        self.position += n
        return self._data[begin : begin + n]

    def number(self, code: str, what: str) -> Any:
        """Return the next number of a type of `struct`."""
        return struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        """Return the next string."""
        data = self.take(self.number("Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data.decode(
                "utf-8", errors="surrogateescape"
            )  # pieces of characters in a vocabulary

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """Return the next value of a metadata type."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise UsageError(f"{self._file.path}: {what} has the unknown type {kind}")
        inner, count = self.number("I", what), self.number("Q", what)
        smallest = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
        if count * smallest > self._file.size - self.position:
            raise UsageError(
                f"{self._file.path}: {what} says it has {count} values, more than the file can "
                "hold; it is damaged"
            )
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code), what)))
        return [self.value(inner, what, depth + 1) for _ in range(count)]


def _read_header(file: ByteFile) -> tuple[dict[str, Any], list[TensorEntry]]:
    """Return metadata and tensors, every number checked against the file's size."""
    cursor = _Cursor(file)
    if cursor.take(4, "the magic") != MAGIC:
        raise UsageError(f"{file.path}: is not a GGUF file")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        hint = "; a big-endian file" if version in (2 << 24, 3 << 24) else ""
        raise UsageError(f"{file.path}: GGUF version must be 2 or 3, got {version}{hint}")
    n_tensors, n_entries = cursor.number("Q", "the counts"), cursor.number("Q", "the counts")
    metadata: dict[str, Any] = {}
    for i in range(n_entries):
        key = cursor.text(f"the key of metadata entry {i}")
        what = f"metadata {key!r:.80}"
        if key in metadata:
            raise UsageError(f"{file.path}: {what} is there twice")
        metadata[key] = cursor.value(cursor.number("I", what), what)
    records = [_read_record(cursor, file, i) for i in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise UsageError(f"{file.path}: general.alignment must be 1..{1 << 20}, got {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    return metadata, _entries(file, records, start)


_Record = tuple[str, tuple[int, ...], str, int]


def _read_record(cursor: _Cursor, file: ByteFile, i: int) -> _Record:
    """Return name, shape (rows first), type and offset of the next tensor of the table."""
    name = cursor.text(f"the name of tensor {i}")
    where = f"tensor {name!r:.80}"
    n_dimensions = cursor.number("I", where)
    if not n_dimensions <= 4:
        raise UsageError(
            f"{file.path}: {where} has {n_dimensions} dimensions; at most 4 are allowed"
        )
    shape = tuple(cursor.number("Q", where) for _ in range(n_dimensions))[::-1]
    number, offset = cursor.number("I", where), cursor.number("Q", where)
    if number not in TYPES:
        reason = "a type that GGML has removed" if number in REMOVED else "an unknown type"
        raise UsageError(
            f"{file.path}: {where} has {reason} (number {number}); convert the model again from "
            "its original weights"
        )
    return name, shape, TYPES[number], offset


def _entries(file: ByteFile, records: list[_Record], start: int) -> list[TensorEntry]:
    """Return the tensors with their places checked."""
    entries, seen = [], set()
    for name, shape, dtype, offset in records:
        where = f"{file.path}: tensor {name!r:.80}"
        if name in seen:
            raise UsageError(f"{where} is there twice")
        seen.add(name)
        n_bytes = tensor_bytes(dtype, shape, where)
        if start + offset + n_bytes > file.size:
            raise UsageError(
                f"{where}: shape {shape} of {dtype} needs {n_bytes} bytes at {start + offset}, but "
                f"the file ends at {file.size}; it is truncated or damaged"
            )
        entries.append(TensorEntry(name, dtype, shape, file, start + offset))
    return entries
