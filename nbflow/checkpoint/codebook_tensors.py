"""4-bit matrices of bitsandbytes (NF4, FP4): codes of a codebook of 16 floats, a scale per block.

``X.weight`` has the codes of a matrix (N, K), two in a byte, the first in the high nibble, as bytes
(N K / 2, 1).  Blocks run over the flattened matrix.  ``X.weight.quant_map`` is the codebook,
``X.weight.absmax`` the scales of blocks, and ``X.weight.quant_state.bitsandbytes__nf4`` a JSON text
with shape and block size.  With double quantization, scales are uint8 codes of the codebook
``nested_quant_map``, times ``nested_absmax`` of their block, plus ``nested_offset``.

The codebooks are floats, for which kernels have no integer form: matrices are read as float32.

Source: bitsandbytes 0.50, functional.py (QuantState, dequantize_4bit, dequantize_blockwise).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.weight_file import Read, Span, TensorEntry
from nbflow.utils.json_file import parse_object
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError

KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 16


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
        n_columns = self.shape[1]
        first, last = rows[0] * n_columns, rows[1] * n_columns
        packed = read(self.codes, (first // 2, -(-last // 2)), None).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
        codes = codes[first % 2 : first % 2 + last - first]
        table = read(self.codebook, None, None).reshape(-1)
        blocks = first // self.block, -(-last // self.block)
        scales = np.repeat(self._scales(read, blocks), self.block)
        scales = scales[first - blocks[0] * self.block :][: last - first]
        found = (table[codes] * scales).reshape(-1, n_columns)
        return np.ascontiguousarray(found[:, columns[0] : columns[1]])

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Raise: matrices are read as floats."""
        raise UsageError(f"{self.codes.file.path}: {shown(self.codes.name)} is read as float32")

    def _scales(self, read: Read, blocks: Span) -> NDArray[np.float32]:
        """Return the scales of blocks."""
        stored = read(self.scales, blocks, None).reshape(-1)
        if self.nested is None:
            return stored
        scales, codebook = (read(part, None, None).reshape(-1) for part in self.nested)
        of_block = np.arange(*blocks) // self.nested_block
        return codebook[stored] * scales[of_block] + np.float32(self.offset)


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
    shape, block = facts.get("shape"), facts.get("blocksize")
    nested = facts.get("nested_blocksize", 0)
    offset = facts.get("nested_offset", 0.0)
    known = isinstance(shape, list) and len(shape) == 2 and all(map(_is_count, shape))
    if not known or not _is_count(block) or not (nested == 0 or _is_count(nested)):
        raise UsageError(f"{where} needs shape, two numbers, and blocksize, got {shown(facts)}")
    if not isinstance(offset, int | float):
        raise UsageError(f"{where}: nested_offset must be a number, got {shown(offset)}")
    numbers: Any = (shape, block, nested)
    (n_rows, n_columns), block, nested = numbers
    return _State((n_rows, n_columns), block, nested, float(offset))


def _joined(held: Mapping[str, TensorEntry], name: str, stored: TensorEntry) -> TensorEntry:
    """Return the matrix `name`, described by the bytes of `stored`."""
    where = f"{stored.file.path}: tensor {shown(name)}"
    state, codes = _read_state(stored), held.get(name)
    n = math.prod(state.shape)
    if codes is None or codes.dtype != "u8" or math.prod(codes.shape) != -(-n // 2):
        found = "nothing" if codes is None else f"{codes.dtype} {codes.shape}"
        raise UsageError(f"{where} must hold the {n} codes of {state.shape} as u8, got {found}")
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
        replace(codes, shape=(-(-n // 2),), strides=None),
        part("absmax", "u8" if nested else "f32", n_blocks),
        part("quant_map", "f32", 16),
        of_scales,
        state.shape,
        state.block,
        nested,
        state.offset,
    )
    return replace(codes, dtype="f32", shape=parts.shape, strides=None, scaled=parts)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31
