"""llama2.c checkpoints: the legacy layout, version 1 (float32) and version 2 (int8 groups).

Legacy: seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len), then
float32 tensors; a negative vocab_size says that the classifier is not shared with the embedding.

===========================  =========================================================
legacy, in this order        tok_embeddings, attention_norm, wq, wk, wv, wo, ffn_norm,
                             w1, w2, w3, norm, two tables of max_seq_len * head_size/2
                             rotary values that nobody reads, output unless shared
versions 1 and 2             attention_norm, ffn_norm, norm, tok_embeddings, wq, wk,
                             wv, wo, w1, w2, w3, output unless shared
===========================  =========================================================

A per-layer kind lies together, layer after layer.  Versions 1 and 2 begin with a header of 256
bytes: magic 0x616b3432, version, the seven int32, one byte "shared classifier" and, in version 2,
int32 group_size.  In version 2 the norms are float32; any other tensor is its int8 values followed
by one float32 scale per group_size consecutive values, ``w = value * scale``.

Layout: https://github.com/karpathy/llama2.c/blob/350e04fe35433e6d2941dce5a1f53308f87058eb/export.py
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from nbflow.checkpoint.weight_file import Span, TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteFile
from nbflow_kernels.errors import UsageError

FORMAT = "llama2c"
MAGIC = struct.pack("<I", 0x616B3432)
_HEADER_BYTES = 256
_LEGACY_HEADER_BYTES = 28

# Far above every published model, low enough that no product of them is absurd.
_BOUNDS = {
    "dim": 1 << 20,
    "hidden_dim": 1 << 22,
    "n_layers": 1 << 12,
    "n_heads": 1 << 12,
    "n_kv_heads": 1 << 12,
    "vocab_size": 1 << 24,
    "max_seq_len": 1 << 24,
}


@dataclass(frozen=True)
class _Header:
    """The numbers of one file."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    shared: bool
    version: int
    group_size: int
    n_bytes: int

    @property
    def config(self) -> dict[str, Any]:
        """The seven numbers by name, with the model type."""
        names = [field.name for field in fields(self)][:7]
        return {"model_type": "llama2c"} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Group:
    """One kind of tensor; ``{i}`` in the name stands for a tensor per layer."""

    name: str
    shape: tuple[int, ...]
    n_copies: int
    n_bytes: int
    dtype: str


class _Int8WeightFile(WeightFile):
    """Version 2: matrices are int8 with a float32 scale per group, dequantized on reading."""

    def __init__(self, *args: Any, group_size: int) -> None:
        super().__init__(*args)
        self._group_size = group_size

    def n_bytes(self, name: str) -> int:
        """Return the bytes tensor `name` takes in the file, scales included."""
        return _n_bytes(self.shape(name), self.dtype(name), self._group_size)

    def _decode(
        self, entry: TensorEntry, rows: Span | None, columns: Span | None
    ) -> np.ndarray[Any, Any]:
        """Read whole groups that hold the rows asked for, and dequantize them."""
        if entry.dtype != "i8":
            return super()._decode(entry, rows, columns)
        size = self._group_size
        n_rows, n_columns = entry.shape
        start, stop = rows if rows is not None else (0, n_rows)
        first = start * n_columns // size
        last = -(-stop * n_columns // size) if stop > start else first
        values = np.empty((last - first, size), np.int8)
        scales = np.empty((last - first, 1), np.float32)
        self._fill(entry.file, values, entry.offset + first * size)
        scales_offset = entry.offset + n_rows * n_columns
        self._fill(entry.file, scales, scales_offset + first * 4)
        wide = values.astype(np.float32)
        wide *= scales
        flat = wide.reshape(-1)
        skip = start * n_columns - first * size
        whole = flat[skip : skip + (stop - start) * n_columns].reshape(stop - start, n_columns)
        return np.ascontiguousarray(whole if columns is None else whole[:, slice(*columns)])


def matches(path: Path, head: bytes) -> bool:
    """Return whether the file has the magic, or a legacy header that agrees with its size."""
    if head[:4] == MAGIC:
        return True
    if len(head) < _LEGACY_HEADER_BYTES:
        return False
    try:
        _check_size(path, _legacy_header(path, head), path.stat().st_size)
    except UsageError:
        return False
    return True


def open_file(path: Path) -> WeightFile:
    """Open one file; see `nbflow.checkpoint.open_weights`."""
    file = ByteFile(path)
    try:
        head = file.read(0, _HEADER_BYTES)
        header = _header(path, head) if head[:4] == MAGIC else _legacy_header(path, head)
        groups = _check_size(path, header, file.size)
        entries = _entries(file, header, groups)
    except BaseException:
        file.close()
        raise
    arguments = (path, FORMAT, entries, [file], lambda: header.config)
    if header.version == 2:
        return _Int8WeightFile(*arguments, group_size=header.group_size)
    return WeightFile(*arguments)


def _legacy_header(path: Path, head: bytes) -> _Header:
    """Read the seven integers of the legacy layout."""
    if len(head) < _LEGACY_HEADER_BYTES:
        raise UsageError(
            f"{path}: a llama2.c header has {_LEGACY_HEADER_BYTES} bytes, got {len(head)}; "
            "the file is truncated"
        )
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", head)
    sizes = (dim, hidden, layers, heads, kv_heads, abs(vocab), context)
    return _checked(path, _Header(*sizes, vocab > 0, 0, 0, _LEGACY_HEADER_BYTES))


def _header(path: Path, head: bytes) -> _Header:
    """Read the header of versions 1 and 2."""
    if len(head) < _HEADER_BYTES:
        raise UsageError(
            f"{path}: a llama2.c header has {_HEADER_BYTES} bytes, got {len(head)}; "
            "the file is truncated"
        )
    numbers = struct.unpack_from("<8i", head, 4)
    version, dim, hidden, layers, heads, kv_heads, vocab, context = numbers
    if version not in (1, 2):
        raise UsageError(f"{path}: llama2.c version must be 1 or 2, got {version}")
    shared, group_size = struct.unpack_from("<Bi", head, 36)
    if shared not in (0, 1):
        raise UsageError(f"{path}: the shared classifier byte must be 0 or 1, got {shared}")
    group_size = group_size if version == 2 else 0
    sizes = (dim, hidden, layers, heads, kv_heads, vocab, context)
    header = _Header(*sizes, bool(shared), version, group_size, _HEADER_BYTES)
    if version == 2 and not (1 <= group_size <= header.dim and header.dim % group_size == 0):
        raise UsageError(
            f"{path}: group_size must divide dim = {header.dim}, got {group_size} in the header"
        )
    return _checked(path, header)


def _checked(path: Path, header: _Header) -> _Header:
    """Return `header` if its numbers can belong to a model."""
    for name, bound in _BOUNDS.items():
        value = getattr(header, name)
        if not 1 <= value <= bound:
            raise UsageError(
                f"{path}: {name} in the llama2.c header must be 1..{bound}, got {value}; "
                "the file is damaged or not a llama2.c checkpoint"
            )
    if header.dim % (2 * header.n_heads) or header.n_heads % header.n_kv_heads:
        raise UsageError(
            f"{path}: dim must be an even multiple of n_heads, n_heads a multiple of n_kv_heads, "
            f"got {header.dim}, {header.n_heads} and {header.n_kv_heads} in the llama2.c header"
        )
    return header


def _n_bytes(shape: tuple[int, ...], dtype: str, group_size: int) -> int:
    """Return the bytes of a tensor, scales included."""
    n_elements = math.prod(shape)
    return n_elements * 4 if dtype == "f32" else n_elements + n_elements // group_size * 4


def _groups(header: _Header) -> list[_Group]:
    """Return the kinds of tensors in file order; an empty name is skipped bytes."""
    dim, hidden, n_layers = header.dim, header.hidden_dim, header.n_layers
    head_size = dim // header.n_heads
    kv_dim = header.n_kv_heads * head_size
    layer = "layers.{i}."
    embedding = ("tok_embeddings.weight", (header.vocab_size, dim), 1)
    attention_norm = (f"{layer}attention_norm.weight", (dim,), n_layers)
    ffn_norm = (f"{layer}ffn_norm.weight", (dim,), n_layers)
    norm = ("norm.weight", (dim,), 1)
    attention = [
        (f"{layer}attention.wq.weight", (dim, dim), n_layers),
        (f"{layer}attention.wk.weight", (kv_dim, dim), n_layers),
        (f"{layer}attention.wv.weight", (kv_dim, dim), n_layers),
        (f"{layer}attention.wo.weight", (dim, dim), n_layers),
    ]
    feed_forward = [
        (f"{layer}feed_forward.w1.weight", (hidden, dim), n_layers),
        (f"{layer}feed_forward.w2.weight", (dim, hidden), n_layers),
        (f"{layer}feed_forward.w3.weight", (hidden, dim), n_layers),
    ]
    rotary = ("", (header.max_seq_len, head_size), 1)
    output = [] if header.shared else [("output.weight", (header.vocab_size, dim), 1)]
    kinds: list[tuple[str, tuple[int, ...], int]]
    if header.version == 0:
        kinds = [embedding, attention_norm, *attention, ffn_norm, *feed_forward, norm, rotary]
    else:
        kinds = [attention_norm, ffn_norm, norm, embedding, *attention, *feed_forward]
    groups = []
    for name, shape, n_copies in [*kinds, *output]:
        dtype = "i8" if header.version == 2 and len(shape) == 2 else "f32"
        n_bytes = _n_bytes(shape, dtype, header.group_size)
        groups.append(_Group(name, shape, n_copies, n_bytes, dtype))
    return groups


def _check_size(path: Path, header: _Header, size: int) -> list[_Group]:
    """Return the kinds of tensors if together they are exactly as long as the file."""
    groups = _groups(header)
    wanted = header.n_bytes + sum(group.n_copies * group.n_bytes for group in groups)
    if wanted != size:
        layout = f"version {header.version}" if header.version else "legacy layout"
        raise UsageError(
            f"{path}: the llama2.c header ({layout}) asks for {wanted} bytes, the file has {size}; "
            f"it is {'truncated' if size < wanted else 'damaged'} or not a llama2.c checkpoint"
        )
    return groups


def _entries(file: ByteFile, header: _Header, groups: list[_Group]) -> list[TensorEntry]:
    """Write the kinds out, a tensor per layer."""
    entries = []
    offset = header.n_bytes
    for group in groups:
        for i in range(group.n_copies):
            name = group.name.replace("{i}", str(i))
            if name:
                entries.append(TensorEntry(name, group.dtype, group.shape, file, offset))
            offset += group.n_bytes
    return entries
