"""Safetensors: one file, or the shards that an index names.

========  =======  ==================================================================
offset    bytes    field
========  =======  ==================================================================
0         8        N, length of the header, u64 little-endian
8         N        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]};
                   ``__metadata__`` is a table of strings
8 + N     rest     the elements, little-endian, rows first, without gaps
========  =======  ==================================================================

A tensor in a block format is stored as bytes (rows, bytes per row); ``nbflow.formats`` of the
metadata states its format and shape (`nbflow.checkpoint.writers.safetensors`).

The ``safetensors`` package checks the header against the file: types, shapes, offsets, no gaps and
no overlaps.  The bytes are read here, because the package lacks NumPy types for bfloat16 and FP8,
and ranks read byte ranges of rows and columns.

Layout: https://github.com/huggingface/safetensors/blob/v0.4.5/README.md#format
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nbflow.checkpoint.dtypes import ITEM_BITS, tensor_bytes
from nbflow.checkpoint.shards import open_checkpoint
from nbflow.checkpoint.weight_file import TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteFile
from nbflow.utils.json_file import parse_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

FORMAT = "safetensors"
FORMATS_KEY = "nbflow.formats"
"""Entry of ``__metadata__`` with the block formats of tensors of bytes."""

_MAX_DIMENSIONS = 16

DTYPES = {name.upper(): name for name in ITEM_BITS if name not in ("c32", "c128")}
"""Types of the file format -> our names."""


def matches(path: Path, head: bytes) -> bool:
    """Return whether a file that begins with `head` looks like safetensors."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32


def open_file(path: Path) -> WeightFile:
    """Open an index or one file; see `nbflow.checkpoint.open_weights`."""
    return open_checkpoint(path, FORMAT, _read_header)


def _read_header(file: ByteFile) -> list[TensorEntry]:
    """Return the tensors of one file, in the order of their bytes."""
    from safetensors import SafetensorError, safe_open  # late: other checkpoints do not need it

    entries = []
    try:
        with safe_open(file.path, framework="np") as header:
            offset = 8 + int.from_bytes(file.read(0, 8), "little")
            names = header.offset_keys()
            formats = _formats(file, header.metadata() or {}, set(names))
            for name in names:
                record = header.get_slice(name)
                code, shape = record.get_dtype(), tuple(record.get_shape())
                dtype = DTYPES.get(code, code)
                where = f"{file.path}: tensor {shown(name)}"
                if len(shape) > _MAX_DIMENSIONS:
                    raise UsageError(f"{where}: must have at most 16 dimensions, has {len(shape)}")
                n_bytes = tensor_bytes(dtype, shape, where)
                if name in formats:
                    dtype, shape = _blocks(file, name, formats[name], dtype, shape)
                entries.append(TensorEntry(name, dtype, shape, file, offset))
                offset += n_bytes
    except SafetensorError as error:
        raise UsageError(
            f"{file.path}: not a valid safetensors file, or truncated (it has {file.size} bytes): "
            f"{str(error).removeprefix('Error while deserializing header: '):.400}; download or "
            "convert it again"
        ) from error
    return entries


def _formats(
    file: ByteFile, metadata: dict[str, str], names: set[str]
) -> dict[str, dict[str, Any]]:
    """Return the metadata of tensors in block formats."""
    if FORMATS_KEY not in metadata:
        return {}
    where = f"{file.path}: {FORMATS_KEY}"
    formats = parse_object(metadata[FORMATS_KEY].encode("utf-8", "surrogatepass"), where)
    absent = formats.keys() - names
    if absent:
        raise UsageError(f"{where}: the file has no tensor {shown(min(absent))}")
    return formats


def _blocks(
    file: ByteFile, name: str, record: Any, dtype: str, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Return the format and shape of a tensor of blocks, checked."""
    from nbflow_kernels.formats import FORMATS

    where = f"{file.path}: tensor {shown(name)}"
    if not isinstance(record, dict) or set(record) != {"format", "shape", "block"}:
        raise UsageError(
            f"{where}: {FORMATS_KEY} must state format, shape and block, got {shown(record)}"
        )
    format, weights, block = record["format"], record["shape"], record["block"]
    if not isinstance(format, str) or FORMATS.get(format) is None:
        raise UsageError(
            f"{where}: unknown format {shown(format)}; a format of your own comes with "
            "--plugins FILE, or nbflow.load_plugin(FILE) in Python"
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


def _are_counts(value: Any) -> bool:
    """Return whether `value` is a list of non-negative integers."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
