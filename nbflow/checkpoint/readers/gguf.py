"""GGUF, versions 1 to 3: metadata and tensors of GGML types, in one file or in parts.

==============  =========================================================================
field           content
==============  =========================================================================
magic           ``GGUF``
version         u32: 1, 2 or 3
counts          tensors, metadata entries
metadata        per entry: string key, u32 type, value (array: u32 type, count, values)
tensor table    per tensor: string name, u32 dimensions, sizes (fastest first), u32 type,
                u64 offset
padding         up to a multiple of ``general.alignment`` (32)
data            each tensor at its offset, aligned
==============  =========================================================================

A string is its length and its bytes.  Counts, lengths and sizes are u64, in version 1 u32.  Numbers
are little-endian; version 3 may be big-endian, the numbers inside blocks included.

Parts of a model are called ``NAME-00001-of-00003.gguf``; each has its own table, and ``split.no``,
``split.count``, ``split.tensors.count``; the first one has the model's metadata.

Type numbers are those of the ``gguf`` package.  Its reader is not used: it is 60 times slower for a
vocabulary of 150,000 tokens, its errors name neither file nor tensor, and it allocates by counts
that it has not compared with the file's size.

Layout: https://github.com/ggml-org/ggml/blob/9b048bb72b811f50b0c30d9e5c84d6ff9f4bf005/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import re
import struct
import threading
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.checkpoint.dtypes import tensor_bytes
from nbflow.checkpoint.weight_file import TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteCursor, ByteFile
from nbflow_kernels.errors import UsageError

FORMAT = "gguf"
MAGIC = b"GGUF"

ACTIVATIONS = ("q8_1", "q8_k")
"""Types of activations, which files must not contain."""

BIG_ENDIAN_FIELDS: dict[str, tuple[int, ...]] = {
    "q4_0": (0,),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q6_k": (208,),
    "mxfp4": (),
    "nvfp4": (),
}
"""Offsets of the float16 numbers in a block, for the types that GGML's converter byte-swaps.

https://github.com/ggml-org/llama.cpp/blob/b6000/gguf-py/gguf/scripts/gguf_convert_endian.py
"""

SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Number of a scalar metadata type -> code of `struct`."""
STRING, ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays
_MAX_TABLES = 16  # nested by dots in a key; the rest stays one name
_MAX_VALUES = 1 << 22  # of all arrays: several times the largest vocabulary
_MAX_ENTRIES = 1 << 20
_MAX_NAME_BYTES = (1 << 16) - 1  # bound for keys in the specification
_AS_TENSORS = ("xielu.",)
"""Beginnings of keys whose arrays of float32 are weights: a number of each layer."""
_FLOAT32 = 6
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


_TYPES = (
    "0 f32, 1 f16, 2 q4_0, 3 q4_1, 6 q5_0, 7 q5_1, 8 q8_0, 9 q8_1, 10 q2_k, 11 q3_k, 12 q4_k, "
    "13 q5_k, 14 q6_k, 15 q8_k, 16 iq2_xxs, 17 iq2_xs, 18 iq3_xxs, 19 iq1_s, 20 iq4_nl, 21 iq3_s, "
    "22 iq2_s, 23 iq4_xs, 24 i8, 25 i16, 26 i32, 27 i64, 28 f64, 29 iq1_m, 30 bf16, 34 tq1_0, "
    "35 tq2_0, 39 mxfp4, 40 nvfp4, 41 q1_0, 42 q2_0"
)
"""Numbers and names of GGML's types, those of the package ``gguf`` (0.19) and q2_0."""


@cache
def tensor_types() -> dict[int, str]:
    """Return GGML's type number -> our name."""
    pairs = (entry.split() for entry in _TYPES.split(", "))
    return {int(number): name for number, name in pairs}


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` is GGUF."""
    return head[:4] == MAGIC


def open_file(path: Path) -> WeightFile:
    """Open one file, or all parts of a model if it is one; see `nbflow.checkpoint.open_weights`."""
    files: list[ByteFile] = []
    try:
        headers = _read_parts(path, files)
        entries = _joined(path, headers)
    except BaseException:
        for file in files:
            file.close()
        raise
    metadata = headers[0].metadata
    return _GgufFile(path, FORMAT, entries, files, lambda: config_of(metadata))


class _SharedHeaders:
    """Headers of files, while a `shared_headers` block is open in some thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n_blocks = 0
        self.found: dict[tuple[int, ...], _Header] = {}

    def read(self, file: ByteFile) -> _Header:
        """Return the header of a file, parsed once unless something changes the file."""
        status = os.fstat(file.fd)
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        header = self.found.get(key)
        if header is not None:
            return header.of(file)
        header = _Header(file)
        with self.lock:
            if self.n_blocks:
                self.found[key] = header
        return header


_shared = _SharedHeaders()


@contextlib.contextmanager
def shared_headers() -> Iterator[None]:
    """Parse the header of each file once within the block, in all threads.

    A model is opened several times while it is loaded, and a vocabulary takes time to parse.
    """
    with _shared.lock:
        _shared.n_blocks += 1
    try:
        yield
    finally:
        with _shared.lock:
            _shared.n_blocks -= 1
            if not _shared.n_blocks:
                _shared.found.clear()


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a file; for a model in parts, that of the first part."""
    return {key: value for key, (_, value) in read_typed_metadata(path).items()}


def read_typed_metadata(path: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the metadata as key -> (type numbers, value).

    An array has two type numbers: its own and that of its values.
    """
    files: list[ByteFile] = []
    try:
        header = _read_parts(path, files, only_first=True)[0]
        return {key: (header.kinds[key], value) for key, value in header.metadata.items()}
    finally:
        for file in files:
            file.close()


class _GgufFile(WeightFile):
    """A GGUF file; blocks of a big-endian one are byte-swapped on reading."""

    def _host_blocks(self, entry: TensorEntry, blocks: np.ndarray[Any, Any]) -> Any:
        """Return blocks (rows, bytes) with their float16 numbers little-endian."""
        if entry.order == "<":
            return blocks
        if entry.dtype not in BIG_ENDIAN_FIELDS:
            raise UsageError(
                f"{self.path}: tensor {entry.name!r:.120} of {entry.dtype} cannot be read from a "
                f"big-endian file; of block formats only {', '.join(BIG_ENDIAN_FIELDS)} can"
            )
        from nbflow_kernels.formats import FORMATS

        each = blocks.reshape(-1, FORMATS[entry.dtype].block_bytes)
        for at in BIG_ENDIAN_FIELDS[entry.dtype]:
            each[:, [at, at + 1]] = each[:, [at + 1, at]]
        return blocks


def config_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata without the vocabulary, with nested tables and a ``model_type``."""
    config: dict[str, Any] = {}
    for key, value in metadata.items():
        if isinstance(value, list) and key.startswith("tokenizer.") and len(value) > 64:
            continue  # vocabulary, read by the tokenizer; a list of layers may be as long
        *tables, last = key.split(".", _MAX_TABLES)
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


class _Header:
    """Metadata and tensors of one file, every number checked against its size."""

    def __init__(self, file: ByteFile) -> None:
        self.file = file
        self._cursor = ByteCursor(file)
        self._n_values = 0
        if self._cursor.take(4, "the magic") != MAGIC:
            raise UsageError(f"{file.path}: is not a GGUF file")
        self._size = "I" if self._read_version() == 1 else "Q"
        n_tensors, n_entries = (self._number(self._size, "the counts") for _ in range(2))
        # minimum sizes: a tensor without name and dimensions; an entry with an empty key
        least = struct.calcsize("=" + self._size)
        self._check_count("tensors", n_tensors, least + 16)
        self._check_count("metadata entries", n_entries, least + 5)
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, tuple[int, ...]] = {}
        self._arrays: list[TensorEntry] = []
        for i in range(n_entries):
            self._read_entry(i)
        records = [self._read_record(i) for i in range(n_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise UsageError(
                f"{file.path}: general.alignment must be 1..{1 << 20}, got {alignment!r:.40}"
            )
        self.entries = _entries(file, records, self._cursor.position, alignment, self._cursor.order)
        taken = {entry.name for entry in self.entries}
        self.entries += (array for array in self._arrays if array.name not in taken)

    def of(self, file: ByteFile) -> _Header:
        """Return this header for the same file, opened again."""
        header = copy.copy(self)
        header.file = file
        header.entries = [dataclasses.replace(entry, file=file) for entry in self.entries]
        return header

    def _read_version(self) -> int:
        """Return the version, and set the byte order."""
        data = self._cursor.take(4, "the version")
        version = int.from_bytes(data, "little")
        if version == 3 << 24:
            self._cursor.order = ">"
            return 3
        if version not in (1, 2, 3):
            raise UsageError(f"{self.file.path}: GGUF version must be 1, 2 or 3, got {version}")
        return version

    def _number(self, code: str, what: str) -> Any:
        return self._cursor.number(code, what)

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        """Refuse a count that does not fit into the file."""
        if count > _MAX_ENTRIES or count * least_bytes > self._cursor.left:
            raise UsageError(
                f"{self.file.path}: says it has {count} {what}; at most "
                f"{min(_MAX_ENTRIES, self._cursor.left // least_bytes)} are possible in its "
                f"{self.file.size} bytes; it is truncated or damaged"
            )

    def _read_entry(self, i: int) -> None:
        """Read one entry of the metadata."""
        key = self._cursor.text(self._size, f"the key of metadata entry {i}", _MAX_NAME_BYTES)
        what = f"metadata {key!r:.80}"
        if key in self.metadata:
            raise UsageError(f"{self.file.path}: {what} is there twice")
        kind = self._number("I", what)
        self.kinds[key] = (kind,)
        if kind == ARRAY:
            here = self._cursor.position
            self.kinds[key] = (kind, self._number("I", what))
            self._cursor.position = here
        self.metadata[key] = value = self._value(kind, what)
        if key.startswith(_AS_TENSORS) and self.kinds[key] == (ARRAY, _FLOAT32):
            at, order = self._cursor.position - 4 * len(value), self._cursor.order
            shape = (len(value),)
            self._arrays.append(TensorEntry(key, "f32", shape, self.file, at, None, order))

    def _value(self, kind: int, what: str, depth: int = 0) -> Any:
        """Return the next value of a metadata type."""
        if kind in SCALARS:
            return self._number(SCALARS[kind], what)
        if kind == STRING:
            return self._cursor.text(self._size, what)
        if kind != ARRAY or depth >= _MAX_DEPTH:
            raise UsageError(f"{self.file.path}: {what} has the unknown type {kind}")
        inner, count = self._number("I", what), self._number(self._size, what)
        smallest = struct.calcsize("=" + SCALARS.get(inner, self._size))
        if count * smallest > self._cursor.left:
            raise UsageError(
                f"{self.file.path}: {what} says it has {count} values, more than the file can "
                "hold; it is damaged"
            )
        self._n_values += count
        if self._n_values > _MAX_VALUES:
            raise UsageError(
                f"{self.file.path}: the metadata has more than {_MAX_VALUES} values in arrays"
            )
        if inner in SCALARS:
            return self._cursor.numbers(SCALARS[inner], count, what)
        if inner == STRING:
            return self._cursor.texts(self._size, count, what)
        return [self._value(inner, what, depth + 1) for _ in range(count)]

    def _read_record(self, i: int) -> _Record:
        """Return name, shape (rows first), type and offset of the next tensor of the table."""
        name = self._cursor.text(self._size, f"the name of tensor {i}", _MAX_NAME_BYTES)
        where = f"tensor {name!r:.80}"
        n_dimensions = self._number("I", where)
        if not n_dimensions <= 4:
            raise UsageError(
                f"{self.file.path}: {where} has {n_dimensions} dimensions; at most 4 are allowed"
            )
        shape = tuple(self._number(self._size, where) for _ in range(n_dimensions))[::-1]
        number, offset = self._number("I", where), self._number("Q", where)
        dtype = tensor_types().get(number)
        if dtype is None or dtype in ACTIVATIONS:
            reason = f"an unknown type (number {number})"
            if dtype is not None:
                reason = f"the type {dtype}, which is for activations"
            elif number < max(tensor_types()):
                reason = f"a type that GGML has removed (number {number})"
            raise UsageError(
                f"{self.file.path}: {where} has {reason}; convert the model again from its "
                "original weights"
            )
        return name, shape, dtype, offset


_Record = tuple[str, tuple[int, ...], str, int]


def _entries(
    file: ByteFile, records: list[_Record], position: int, alignment: int, order: str
) -> list[TensorEntry]:
    """Return the tensors, checked against the size of the file and for overlaps."""
    start = -(-position // alignment) * alignment
    entries, spans, seen = [], [], set()
    for name, shape, dtype, offset in records:
        where = f"{file.path}: tensor {name!r:.80}"
        if name in seen:
            raise UsageError(f"{where} is there twice")
        seen.add(name)
        n_bytes = tensor_bytes(dtype, shape, where)
        if offset % alignment:
            raise UsageError(f"{where}: offset must be a multiple of {alignment}, got {offset}")
        if start + offset + n_bytes > file.size:
            raise UsageError(
                f"{where}: shape {shape} of {dtype} needs {n_bytes} bytes at {start + offset}, but "
                f"the file ends at {file.size}; it is truncated or damaged"
            )
        if n_bytes:
            spans.append((offset, offset + n_bytes, name))
        entries.append(TensorEntry(name, dtype, shape, file, start + offset, None, order))
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise UsageError(f"{file.path}: tensors {first!r:.80} and {second!r:.80} overlap")
    return entries


def _read_parts(path: Path, files: list[ByteFile], only_first: bool = False) -> list[_Header]:
    """Return the headers of all parts in order; opened files are appended to `files`."""
    files.append(ByteFile(path))
    named = _shared.read(files[0])
    count = named.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= 99_999:
        raise UsageError(f"{path}: split.count must be 0..99999, got {count!r:.40}")
    if count <= 1:
        return [named]
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise UsageError(
            f"{path}: is one of {count} parts of a model and must be called "
            f"NAME-00001-of-{count:05d}.gguf, in one folder with the other parts"
        )
    here = int(match[2])
    headers = []
    for i in range(1, (2 if only_first else count + 1)):
        part = path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf")
        if i == here:
            header = named
        else:
            files.append(ByteFile(part))
            header = _shared.read(files[-1])
        for key, wanted in (("split.count", count), ("split.no", i - 1)):
            found = header.metadata.get(key)
            if found != wanted or type(found) is not int:
                raise UsageError(f"{part}: {key} must be {wanted}, got {found!r:.40}")
        headers.append(header)
    return headers


def _joined(path: Path, headers: list[_Header]) -> list[TensorEntry]:
    """Return the tensors of all parts."""
    entries: dict[str, TensorEntry] = {}
    for header in headers:
        for entry in header.entries:
            if entry.name in entries:
                raise UsageError(
                    f"{path}: tensor {entry.name!r:.80} is in both "
                    f"{entries[entry.name].file.path.name} and {header.file.path.name}"
                )
            entries[entry.name] = entry
    wanted = headers[0].metadata.get("split.tensors.count", len(entries))
    if len(headers) > 1 and wanted != len(entries):
        raise UsageError(
            f"{path}: split.tensors.count is {wanted!r:.40}, but the parts hold {len(entries)}"
        )
    return list(entries.values())
