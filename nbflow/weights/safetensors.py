"""Safetensors: one file, or the shards that an index names.

========  =======  ==================================================================
offset    bytes    field
========  =======  ==================================================================
0         8        N, length of the header, u64 little-endian
8         N        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]};
                   ``__metadata__`` is a table of strings
8 + N     rest     the elements, little-endian, rows first, without gaps
========  =======  ==================================================================

A tensor in a block format is one of bytes, (rows, bytes of a row); ``nbflow.formats`` of the
metadata says its format and shape (`nbflow.writing.safetensors_file`).

Why not the ``safetensors`` package: it has no NumPy bfloat16, and we widen it without torch; ranks
read exact byte ranges of rows and columns and count them; and every error here names file, tensor,
what was wanted and what was found.  Nothing the header promises is believed before it is checked
against the file, so a damaged file cannot cause a large allocation.

Layout: https://github.com/huggingface/safetensors/blob/v0.4.5/README.md#format
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nbflow.weights.byte_file import ByteFile
from nbflow.weights.json_file import parse_object
from nbflow.weights.shards import open_checkpoint
from nbflow.weights.shown import shown
from nbflow.weights.weight_file import TensorEntry, WeightFile, tensor_bytes
from nbflow_kernels.errors import UsageError

FORMAT = "safetensors"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FORMATS_KEY = "nbflow.formats"
"""Entry of ``__metadata__`` that says which tensors of bytes are in a block format."""
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation

DTYPES = {
    "BOOL": "bool",
    "F4": "f4",
    "F6_E2M3": "f6_e2m3",
    "F6_E3M2": "f6_e3m2",
    "U8": "u8",
    "I8": "i8",
    "F8_E5M2": "f8_e5m2",
    "F8_E4M3": "f8_e4m3",
    "F8_E8M0": "f8_e8m0",
    "F8_E4M3FNUZ": "f8_e4m3fnuz",
    "F8_E5M2FNUZ": "f8_e5m2fnuz",
    "I16": "i16",
    "U16": "u16",
    "F16": "f16",
    "BF16": "bf16",
    "I32": "i32",
    "U32": "u32",
    "F32": "f32",
    "C64": "c64",
    "F64": "f64",
    "I64": "i64",
    "U64": "u64",
}


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` looks like safetensors."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32


def open_file(path: Path) -> WeightFile:
    """Open an index or one file; see `nbflow.weights.open_weights`."""
    return open_checkpoint(path, FORMAT, _read_header)


def _read_header(file: ByteFile) -> list[TensorEntry]:
    """Return the tensors of one file, every number checked against the file's size."""
    if file.size < 8:
        raise UsageError(f"{file.path}: a safetensors file has at least 8 bytes, got {file.size}")
    n_header = int.from_bytes(file.read(0, 8), "little")
    limit = min(file.size - 8, MAX_HEADER_BYTES)
    if n_header > limit:
        raise UsageError(
            f"{file.path}: the header says it has {n_header} bytes, but at most {limit} are "
            f"possible in this file of {file.size} bytes; it is truncated or not a safetensors file"
        )
    header = parse_object(file.read(8, n_header), f"{file.path}: safetensors header")
    start = 8 + n_header
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_string_table(metadata):
        raise UsageError(
            f"{file.path}: __metadata__ must be a table of strings, got {shown(metadata)}"
        )
    formats = _formats(file, metadata or {}, header)
    spans = []
    entries = []
    for name, record in header.items():
        dtype, shape, begin, end = _check_record(file, name, record, file.size - start)
        spans.append((begin, end, name))
        if name in formats:
            dtype, shape = _blocks(file, name, formats[name], dtype, shape)
        entries.append(TensorEntry(name, dtype, shape, file, start + begin))
    _check_cover(file, sorted(spans), file.size - start)
    return entries


def _check_record(
    file: ByteFile, name: str, record: Any, n_data: int
) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of one tensor, or say what is wrong with them."""
    where = f"{file.path}: tensor {shown(name)}"
    wanted = {"dtype", "shape", "data_offsets"}
    if not isinstance(record, dict) or set(record) != wanted:
        raise UsageError(f"{where}: must have dtype, shape and data_offsets, got {shown(record)}")
    code, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise UsageError(f"{where}: unknown dtype {shown(code)}; known are {', '.join(DTYPES)}")
    dtype = DTYPES[code]
    if not _are_counts(shape) or len(shape) > 16:
        raise UsageError(f"{where}: shape must be at most 16 numbers >= 0, got {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= n_data:
        raise UsageError(
            f"{where}: data_offsets must be [begin, end] within the {n_data} bytes of data in this "
            f"file, got {shown(offsets)}; the file is truncated or damaged"
        )
    n_bytes = tensor_bytes(dtype, tuple(shape), where)
    if n_bytes != offsets[1] - offsets[0]:
        raise UsageError(
            f"{where}: shape {shown(shape)} of {dtype} needs {n_bytes} bytes, "
            f"but data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _formats(
    file: ByteFile, metadata: dict[str, str], header: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return what the metadata says of tensors in block formats."""
    if FORMATS_KEY not in metadata:
        return {}
    where = f"{file.path}: {FORMATS_KEY}"
    formats = parse_object(metadata[FORMATS_KEY].encode("utf-8", "surrogatepass"), where)
    absent = formats.keys() - header.keys()
    if absent:
        raise UsageError(f"{where}: the file has no tensor {shown(min(absent))}")
    return formats


def _blocks(
    file: ByteFile, name: str, record: Any, dtype: str, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Return format and shape of a tensor of bytes that holds blocks, checked."""
    from nbflow_kernels.formats import FORMATS

    where = f"{file.path}: tensor {shown(name)}"
    if not isinstance(record, dict) or set(record) != {"format", "shape", "block"}:
        raise UsageError(f"{where}: {FORMATS_KEY} must say format, shape, block; {shown(record)}")
    format, weights, block = record["format"], record["shape"], record["block"]
    if not isinstance(format, str) or FORMATS.get(format) is None:
        raise UsageError(
            f"{where}: unknown format {shown(format)}; if it is one of your own, register it before"
        )
    known = FORMATS[format]
    if block != [known.block_size, known.block_bytes]:
        raise UsageError(
            f"{where}: blocks of {known.name} must be of {known.block_size} weights in "
            f"{known.block_bytes} bytes, got {shown(block)}; the format has changed since"
        )
    if not _are_counts(weights) or not 1 <= len(weights) <= 16:
        raise UsageError(f"{where}: shape must be 1 to 16 numbers >= 0, got {shown(weights)}")
    n_bytes = tensor_bytes(known.name, tuple(weights), where)
    n_rows = math.prod(weights[:-1])
    if dtype != "u8" or len(shape) != 2 or shape[0] != n_rows or math.prod(shape) != n_bytes:
        raise UsageError(
            f"{where}: {shown(weights)} of {known.name} must be U8 of {n_rows} rows and {n_bytes} "
            f"bytes, got {dtype} {shape}"
        )
    return known.name, tuple(weights)


def _is_string_table(value: Any) -> bool:
    """Return whether `value` is a table of strings."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_counts(value: Any) -> bool:
    """Return whether `value` is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_cover(file: ByteFile, spans: list[tuple[int, int, str]], n_data: int) -> None:
    """Raise unless the tensors, ordered by position, cover the data exactly once."""
    position, previous = 0, "the header"
    for begin, end, name in spans:
        if begin < position:
            raise UsageError(
                f"{file.path}: tensors {shown(previous)} and {shown(name)} overlap: "
                f"one ends at byte {position} of the data, the other begins at {begin}"
            )
        if begin > position:
            raise UsageError(
                f"{file.path}: bytes {position}..{begin} of the data, before tensor {shown(name)}, "
                "belong to no tensor; safetensors allows no gaps"
            )
        position, previous = end, name
    if position != n_data:
        raise UsageError(
            f"{file.path}: the tensors end at byte {position} of the data, "
            f"but the file has {n_data}; safetensors allows nothing after them"
        )
