"""Write GGUF, version 3, little-endian; the layout is in `nbflow.checkpoint.readers.gguf`.

`gguf.GGUFWriter` is not used: it needs whole tensors, while these are quantized in chunks of rows,
and it refuses empty arrays, which metadata copied from another file may contain.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from nbflow.checkpoint.readers.gguf import ACTIVATIONS, ARRAY, MAGIC, SCALARS, STRING, tensor_types
from nbflow.checkpoint.writers.tensor_plan import TensorHeader, TensorPlan
from nbflow_kernels.errors import UsageError

U32, I32, F32, BOOL = 4, 5, 6, 7
"""Metadata types for models without GGUF metadata."""

Kind = tuple[int, ...]
"""A metadata type; for an array, `ARRAY` and the type of its values."""
Metadata = Mapping[str, tuple[Kind, Any]]
"""Key -> type and value."""

_MAX_DIMENSIONS = 4


def write_gguf(file: BinaryIO, metadata: Metadata, tensors: Sequence[TensorPlan]) -> None:
    """Write header and tensors to an open file."""
    alignment = metadata["general.alignment"][1] if "general.alignment" in metadata else 32
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, (kind, value) in metadata.items():
        head += [_string(key), struct.pack("<I", kind[0]), _value(key, kind, value)]
    offset = 0
    numbers = {name: number for number, name in tensor_types().items()}
    for tensor in tensors:
        head.append(_record(tensor, numbers[tensor.format], offset))
        offset += -(-tensor.n_bytes // alignment) * alignment
    file.write(b"".join(head))
    file.write(bytes(-file.tell() % alignment))
    for tensor in tensors:
        tensor.write(file)
        file.write(bytes(-file.tell() % alignment))


def check_types(tensors: Sequence[TensorHeader]) -> None:
    """Raise if GGUF cannot store the format or the dimensions of a tensor."""
    known = [name for name in tensor_types().values() if name not in ACTIVATIONS]
    for tensor in tensors:
        if tensor.format not in known:
            raise UsageError(
                f"tensor {tensor.name}: GGUF has no type for {tensor.format}; it has "
                f"{', '.join(known)}, safetensors (a folder as OUT) takes all formats"
            )
        if len(tensor.shape) > _MAX_DIMENSIONS:
            raise UsageError(
                f"tensor {tensor.name}: GGUF has at most {_MAX_DIMENSIONS} dimensions, "
                f"got {tensor.shape}"
            )


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")  # as the reader decodes
    return struct.pack("<Q", len(data)) + data


def _value(key: str, kind: Kind, value: Any) -> bytes:
    """Return the bytes of a metadata value, without its type."""
    if kind[0] == STRING:
        return _string(value)
    if kind[0] != ARRAY:
        return struct.pack(f"<{SCALARS[kind[0]]}", value)
    if kind[1] == ARRAY:
        raise UsageError(f"metadata {key!r:.80} is an array of arrays, which is not written")
    head = struct.pack("<IQ", kind[1], len(value))
    if kind[1] == STRING:
        return head + b"".join(map(_string, value))
    return head + struct.pack(f"<{len(value)}{SCALARS[kind[1]]}", *value)


def _record(tensor: TensorHeader, number: int, offset: int) -> bytes:
    """Return the entry of the tensor table."""
    sizes = tensor.shape[::-1]
    return _string(tensor.name) + struct.pack(
        f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset
    )
