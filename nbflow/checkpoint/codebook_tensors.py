"""4-bit matrices of bitsandbytes (NF4, FP4): codes of a codebook of 16 floats, a scale per block.

``X.weight`` has the codes of a matrix (N, K), two in a byte, the first in the high nibble, as bytes
(N K / 2, 1), or the same bytes as another type (``bnb_4bit_quant_storage``).  Blocks run over the
flattened matrix.  ``X.weight.quant_map`` is the codebook, ``X.weight.absmax`` the scales of blocks,
and ``X.weight.quant_state.bitsandbytes__nf4`` a JSON text with shape and block size.  With double
quantization, scales are uint8 codes of the codebook ``nested_quant_map``, times ``nested_absmax``
of their block, plus ``nested_offset``.

Matrices are read as `nbflow_kernels.formats.nf4_fp4`, bit for bit; those with other codebooks than
the method's, or rows that blocks of 16 do not divide, as float32.

Source: bitsandbytes 0.50, functional.py (QuantState, dequantize_4bit, dequantize_blockwise).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.checkpoint.weight_file import Read, Span, TensorEntry
from nbflow.utils.json_file import parse_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.nf4_fp4 import BLOCK_SIZES, CODEBOOKS, float_codebook_format

KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 16
"""Weights per scale; the library has at most 4096."""


@dataclass(frozen=True)
class CodebookParts:
    """Stored tensors of one matrix (N, K)."""

    codes: TensorEntry
    scales: TensorEntry
    codebook: TensorEntry
    nested: tuple[TensorEntry, TensorEntry] | None
    """Scales and codebook of the scales."""
    shape: tuple[int, int]
    block: int
    """Weights per scale."""
    nested_block: int
    """Scales per nested scale."""
    offset: float
    """Added to scales of double quantization."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        return (self.codes, self.scales, self.codebook, *(self.nested or ()))

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle as float32: codebook[code] * scale."""
        table = read(self.codebook, None, None).reshape(-1)
        found = table[self._codes(read, rows)] * self._row_scales(read, rows)
        return np.ascontiguousarray(found[:, columns[0] : columns[1]])

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return storage bytes (rows, row bytes) of a format; columns in whole blocks."""
        size, part = format.block_size, slice(*columns)
        codes = np.ascontiguousarray(self._codes(read, rows)[:, part]).reshape(-1, size)
        scales = self._row_scales(read, rows)[:, part][:, ::size]
        blocks: NDArray[np.uint8] = format.blocks(codes, np.ascontiguousarray(scales).reshape(-1))
        return blocks.reshape(rows[1] - rows[0], -1)

    def format(self, kind: str) -> str:
        """Return the name of the format that holds the matrix; `kind` is "nf4" or "fp4"."""
        table = np.empty(16, "<f4")
        self.codebook.file.read_into(table.view(np.uint8).data, self.codebook.offset)
        same = (table == np.array(CODEBOOKS[kind], np.float32)).all()
        return planned_format(kind, self.shape[1], self.block) if same else "f32"

    def _codes(self, read: Read, rows: Span) -> NDArray[np.uint8]:
        """Return the codes (rows, K)."""
        first, last = (row * self.shape[1] for row in rows)
        packed = read(self.codes, (first // 2, -(-last // 2)), None).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
        return codes[first % 2 : first % 2 + last - first].reshape(-1, self.shape[1])

    def _row_scales(self, read: Read, rows: Span) -> NDArray[np.float32]:
        """Return the scale of each weight (rows, K)."""
        first, last = (row * self.shape[1] for row in rows)
        blocks = first // self.block, -(-last // self.block)
        scales = np.repeat(self._scales(read, blocks), self.block)
        scales = scales[first - blocks[0] * self.block :][: last - first]
        return scales.reshape(-1, self.shape[1])

    def _scales(self, read: Read, blocks: Span) -> NDArray[np.float32]:
        """Return the scales of blocks."""
        stored = read(self.scales, blocks, None).reshape(-1)
        if self.nested is None:
            return stored
        scales, codebook = (read(part, None, None).reshape(-1) for part in self.nested)
        of_block = np.arange(*blocks) // self.nested_block
        return codebook[stored] * scales[of_block] + np.float32(self.offset)


def planned_format(kind: str, n_columns: int, block: int = 64) -> str:
    """Return the format of a matrix with the method's codebook and blocks of that size."""
    size = next((n for n in BLOCK_SIZES if block % n == 0 and n_columns % n == 0), None)
    return float_codebook_format(kind, size).name if size else "f32"


def with_codebooks(entries: Sequence[TensorEntry]) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join codes with codebooks and scales; return the tensors with values, and the others."""
    held = {entry.name: entry for entry in entries}
    states: dict[str, TensorEntry] = {}
    for kind in KINDS:
        ending = _STATE + kind
        states |= {n.removesuffix(ending): e for n, e in held.items() if n.endswith(ending)}
    joined = {name: _joined(held, name, state) for name, state in states.items()}
    used = {state.name for state in states.values()}
    for entry in joined.values():
        assert entry.scaled is not None
        used |= {part.name for part in entry.scaled.parts[1:]}
    values = [joined.get(name, entry) for name, entry in held.items() if name not in used]
    return values, [held[name] for name in held if name in used]


class _State(NamedTuple):
    """Facts of a matrix in its JSON text."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    """0 without double quantization."""
    offset: float


def _read_state(entry: TensorEntry) -> _State:
    """Read the JSON text of a matrix."""
    where = f"{entry.file.path}: tensor {shown(entry.name)}"
    if entry.dtype != "u8" or math.prod(entry.shape) > _MAX_STATE_BYTES:
        raise UsageError(f"{where} must be a JSON text of at most {_MAX_STATE_BYTES} bytes")
    text = np.empty(math.prod(entry.shape), np.uint8)
    entry.file.read_into(text.data, entry.offset)
    facts: dict[str, Any] = parse_object(text.tobytes(), where)
    shape: Any = facts.get("shape")
    block: Any = facts.get("blocksize")
    nested = facts.get("nested_blocksize", 0)
    offset = facts.get("nested_offset", 0.0)
    known = isinstance(shape, list) and len(shape) == 2 and all(map(_is_count, shape))
    if not known or not _is_count(block) or not (nested == 0 or _is_count(nested)):
        raise UsageError(f"{where} needs shape, two numbers, and blocksize, got {shown(facts)}")
    if block > _MAX_BLOCK:
        raise UsageError(f"{where}: blocksize must be at most {_MAX_BLOCK}, got {block}")
    if not isinstance(offset, int | float) or not abs(offset) < 2**128:
        raise UsageError(f"{where}: nested_offset must be a finite number, got {shown(offset)}")
    numbers: Any = (shape, block, nested)
    (n_rows, n_columns), block, nested = numbers
    return _State((n_rows, n_columns), block, nested, float(offset))


def _joined(held: Mapping[str, TensorEntry], name: str, stored: TensorEntry) -> TensorEntry:
    """Return the matrix `name`, described by the bytes of `stored`."""
    where = f"{stored.file.path}: tensor {shown(name)}"
    state, codes = _read_state(stored), held.get(name)
    n = math.prod(state.shape)
    n_bytes = -(-n // 2)
    if codes is None or math.prod(codes.shape) * ITEM_BYTES.get(codes.dtype, 0) != n_bytes:
        found = "nothing" if codes is None else f"{codes.dtype} {codes.shape}"
        raise UsageError(
            f"{where} must hold the {n} codes of {state.shape} in {n_bytes} bytes, got {found}"
        )
    nested, n_blocks = state.nested_block, -(-n // state.block)

    def part(ending: str, dtype: str, count: int) -> TensorEntry:
        entry = held.get(f"{name}.{ending}")
        if entry is None or entry.dtype != dtype or math.prod(entry.shape) != count:
            found = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
            raise UsageError(f"{where} needs {name}.{ending}, {dtype} ({count},), got {found}")
        return replace(entry, shape=(count,), strides=None)

    of_scales = None
    if nested:
        of_scales = (
            part("nested_absmax", "f32", -(-n_blocks // nested)),
            part("nested_quant_map", "f32", 256),
        )
    parts = CodebookParts(
        replace(codes, dtype="u8", shape=(n_bytes,), strides=None),
        part("absmax", "u8" if nested else "f32", n_blocks),
        part("quant_map", "f32", 16),
        of_scales,
        state.shape,
        state.block,
        nested,
        state.offset,
    )
    dtype = parts.format(stored.name.rpartition(_STATE)[2])
    return replace(codes, dtype=dtype, shape=parts.shape, strides=None, scaled=parts)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31
