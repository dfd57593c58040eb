"""llama2.c checkpoints: the legacy layout, version 1 (float32) and version 2 (int8 groups).

Legacy: seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len), then
float32 tensors; a negative vocab_size says that the classifier is not shared with the embedding.

===========================  =========================================================
legacy, in this order        tok_embeddings, attention_norm, wq, wk, wv, wo, ffn_norm,
                             w1, w2, w3, norm, two unused tables of max_seq_len *
                             head_size/2 rotary values, output unless shared
versions 1 and 2             attention_norm, ffn_norm, norm, tok_embeddings, wq, wk,
                             wv, wo, w1, w2, w3, output unless shared
===========================  =========================================================

Tensors of one kind are stored together, layer after layer.  Versions 1 and 2 begin with a header of
256 bytes: magic 0x616b3432, version, the seven int32, one byte "shared classifier" and, in version
2, int32 group_size.  In version 2 the norms are float32; any other tensor is its int8 values, then
one float32 scale per group_size consecutive values, ``w = value * scale``.

Layout: https://github.com/karpathy/llama2.c/blob/350e04fe35433e6d2941dce5a1f53308f87058eb/export.py
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbflow.checkpoint.weight_file import Span, TensorEntry, WeightFile
from nbflow.utils.binary_file import ByteFile
from nbflow_kernels.errors import UsageError

FORMAT = "llama2c"
MAGIC = struct.pack("<I", 0x616B3432)
_HEADER_BYTES = 256
_LEGACY_HEADER_BYTES = 28

# far above every published model
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
        return {"model_type": "llama2c"} | {name: getattr(self, name) for name in _BOUNDS}


class _Tensors(NamedTuple):
    """One kind of tensors, stored together; ``{i}`` in the name is the layer."""

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
        self, entry: TensorEntry, rows: Span | None, columns: Span | None, widen_bf16: bool = True
    ) -> np.ndarray[Any, Any]:
        """Read and dequantize the whole groups that contain the rows."""
        if entry.dtype != "i8":
            return super()._decode(entry, rows, columns, widen_bf16)
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
        floats = values.astype(np.float32)
        floats *= scales
        flat = floats.reshape(-1)
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
        _check_size(path, _header(path, head), path.stat().st_size)
    except UsageError:
        return False
    return True


def open_file(path: Path) -> WeightFile:
    """Open one file; see `nbflow.checkpoint.open_weights`."""
    file = ByteFile(path)
    try:
        head = file.read(0, _HEADER_BYTES)
        header = _header(path, head)
        entries = _entries(file, header, _check_size(path, header, file.size))
    except BaseException:
        file.close()
        raise
    arguments = (path, FORMAT, entries, [file], lambda: header.config)
    if header.version == 2:
        return _Int8WeightFile(*arguments, group_size=header.group_size)
    return WeightFile(*arguments)


def _header(path: Path, head: bytes) -> _Header:
    """Read the header of any version."""
    is_legacy = head[:4] != MAGIC
    n_bytes = _LEGACY_HEADER_BYTES if is_legacy else _HEADER_BYTES
    if len(head) < n_bytes:
        raise UsageError(
            f"{path}: a llama2.c header has {n_bytes} bytes, got {len(head)}; the file is truncated"
        )
    numbers = struct.unpack_from("<7i", head, 0 if is_legacy else 8)
    sizes: dict[str, int] = dict(zip(_BOUNDS, numbers, strict=True))
    dim, vocab = sizes["dim"], sizes["vocab_size"]
    if is_legacy:
        sizes["vocab_size"] = abs(vocab)
        legacy = _Header(**sizes, shared=vocab > 0, version=0, group_size=0, n_bytes=n_bytes)
        return _checked(path, legacy)
    (version,) = struct.unpack_from("<i", head, 4)
    shared, group_size = struct.unpack_from("<Bi", head, 36)
    if version not in (1, 2):
        raise UsageError(f"{path}: llama2.c version must be 1 or 2, got {version}")
    if shared not in (0, 1):
        raise UsageError(f"{path}: the shared classifier byte must be 0 or 1, got {shared}")
    if version == 1:
        group_size = 0
    elif not (1 <= group_size <= dim and dim % group_size == 0):
        raise UsageError(
            f"{path}: group_size must divide dim = {dim}, got {group_size} in the header"
        )
    header = _Header(
        **sizes, shared=bool(shared), version=version, group_size=group_size, n_bytes=n_bytes
    )
    return _checked(path, header)


def _checked(path: Path, header: _Header) -> _Header:
    """Return `header` if its numbers are valid."""
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


def _layout(header: _Header) -> list[_Tensors]:
    """Return the kinds of tensors in file order; an empty name is skipped bytes."""
    dim, hidden = header.dim, header.hidden_dim
    head_size = dim // header.n_heads
    kv_dim = header.n_kv_heads * head_size
    shapes = {
        "tok_embeddings": (header.vocab_size, dim),
        "norm": (dim,),
        "": (header.max_seq_len, head_size),  # rotary tables, unused
        "output": (header.vocab_size, dim),
        "layers.{i}.attention_norm": (dim,),
        "layers.{i}.ffn_norm": (dim,),
        "layers.{i}.attention.wq": (dim, dim),
        "layers.{i}.attention.wk": (kv_dim, dim),
        "layers.{i}.attention.wv": (kv_dim, dim),
        "layers.{i}.attention.wo": (dim, dim),
        "layers.{i}.feed_forward.w1": (hidden, dim),
        "layers.{i}.feed_forward.w2": (dim, hidden),
        "layers.{i}.feed_forward.w3": (hidden, dim),
    }
    embedding, norm, rotary, output, attention_norm, ffn_norm, *matrices = shapes
    attention, feed_forward = matrices[:4], matrices[4:]
    if header.version == 0:
        first = [embedding, attention_norm, *attention, ffn_norm]
        names = [*first, *feed_forward, norm, rotary]
    else:
        names = [attention_norm, ffn_norm, norm, embedding, *matrices]
    kinds = []
    for name in names if header.shared else [*names, output]:
        shape = shapes[name]
        dtype = "i8" if header.version == 2 and len(shape) == 2 else "f32"
        n_bytes = _n_bytes(shape, dtype, header.group_size)
        n_copies = header.n_layers if "{i}" in name else 1
        kinds.append(_Tensors(name and f"{name}.weight", shape, n_copies, n_bytes, dtype))
    return kinds


def _check_size(path: Path, header: _Header, size: int) -> list[_Tensors]:
    """Return the kinds of tensors if their sizes add up to that of the file."""
    kinds = _layout(header)
    wanted = header.n_bytes + sum(kind.n_copies * kind.n_bytes for kind in kinds)
    if wanted != size:
        layout = f"version {header.version}" if header.version else "legacy layout"
        raise UsageError(
            f"{path}: the llama2.c header ({layout}) asks for {wanted} bytes, the file has {size}; "
            f"it is {'truncated' if size < wanted else 'damaged'} or not a llama2.c checkpoint"
        )
    return kinds


def _entries(file: ByteFile, header: _Header, kinds: list[_Tensors]) -> list[TensorEntry]:
    """Return the tensors of all kinds, one per layer."""
    entries = []
    offset = header.n_bytes
    for kind in kinds:
        for i in range(kind.n_copies):
            name = kind.name.replace("{i}", str(i))
            if name:
                entries.append(TensorEntry(name, kind.dtype, kind.shape, file, offset))
            offset += kind.n_bytes
    return entries
