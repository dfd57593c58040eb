"""Rows of a checkpoint's tensors, read and quantized in chunks to bound memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.program.read_operand import read_operand, read_quantized_operand
from nbflow.program.records import Operand
from nbflow.quantization.quantizer_options import DEFAULT, QuantizerOptions
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError

Statistics = np.ndarray[Any, Any] | None
"""Statistics of a matrix's inputs: mean squares (K,), second moments (K, K), or None."""
_CHUNK_WEIGHTS = 1 << 22  # 16 MiB as float32


@dataclass(frozen=True)
class StoredRows:
    """A tensor of the checkpoint under its stored name."""

    file: WeightFile
    name: str
    group: int = 1

    @property
    def n_rows(self) -> int:
        """Number of rows; 1 for a vector."""
        return math.prod(self.file.shape(self.name)[:-1])

    @property
    def n_columns(self) -> int:
        """Weights of a row."""
        shape = self.file.shape(self.name)
        return shape[-1] if shape else 1

    @property
    def dtype(self) -> str:
        """Stored type; f32 for blocks whose columns are in another order, not to be copied."""
        reordered = self.file.column_groups(self.name) is not None
        return "f32" if reordered else self.file.dtype(self.name)

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop)."""
        whole = len(self.file.shape(self.name)) < 2
        return self.file.array(self.name, None if whole else (start, stop), flat=True)

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the bytes of rows [start, stop)."""
        whole = len(self.file.shape(self.name)) < 2
        return self.file.quantized(self.name, None if whole else (start, stop), flat=True).data

    def raw(self) -> Iterator[bytes]:
        """Yield the stored bytes."""
        entry = self.file.entry(self.name)
        if entry.scaled is not None:
            yield from quantized_chunks(self, self.dtype, self.name)
        elif entry.order == "<":
            yield from self.file.stored_chunks(self.name)
        elif self.dtype == "bf16":  # big-endian; exact, as the array is widened bfloat16
            yield nk.quantize(np.atleast_1d(self.file.array(self.name)), "bf16").data.tobytes()
        else:
            yield self.file.array(self.name).tobytes()


@dataclass(frozen=True)
class ModelRows:
    """Tensor by our name, located by the model's specification, rows first."""

    spec: ModelSpec
    file: WeightFile
    name: str
    group: int = 1
    """Rows that must stay together: those of a head if they are reordered."""
    interleaves: bool = False
    """True to interleave the rows of rotary pairs."""
    offset: float = 0.0
    factor: float = 1.0
    rates: bool = False
    """True to write the negative rates of a recurrent layer, of whose magnitudes a checkpoint holds
    the logarithms."""
    order: tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None] = None, None
    """Order of the rows, then all are read at once, and of the columns; None as they are."""

    @property
    def n_rows(self) -> int:
        """Number of rows; 1 for a vector."""
        return math.prod(self.spec.shape_of(self.name)[:-1])

    @property
    def n_columns(self) -> int:
        """Weights of a row."""
        return self.spec.shape_of(self.name)[-1]

    @property
    def dtype(self) -> str:
        """Stored format; tensors not stored as rows, or as `StoredRows.dtype`, are float32."""
        place = self.spec.tensor_layout(self.name)
        dtype = StoredRows(self.file, place.name).dtype
        changed = place.head_rows or self.factor != 1.0 or self.order[1] is not None
        return "f32" if changed and dtype not in ITEM_BYTES else dtype

    def _part(self, start: int, stop: int) -> Operand:
        is_vector = len(self.spec.shape_of(self.name)) < 2
        return Operand(self.name, rows=None if is_vector else (start, stop))

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop), with pairs interleaved."""
        rows = self._interleaved(read_operand(self.spec, self.file, self._part(start, stop)))
        if self.order[0] is not None:
            rows = rows[self.order[0]]
        if self.order[1] is not None:
            rows = np.ascontiguousarray(rows[:, self.order[1]])
        if self.rates:
            rows = -np.exp(rows.astype(np.float64)).astype(np.float32)
        if self.factor != 1.0:
            rows = rows.astype(np.float32) * np.float32(self.factor)
        return rows + np.float32(self.offset) if self.offset else rows

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the bytes of rows [start, stop), with pairs interleaved."""
        pieces = read_quantized_operand(self.spec, self.file, self._part(start, stop))
        rows = np.concatenate([piece.data for piece in pieces])
        return self._interleaved(rows if self.order[0] is None else rows[self.order[0]])

    def raw(self) -> Iterator[bytes]:
        """Yield the bytes of a plain type."""
        return quantized_chunks(self, self.dtype, self.name)

    def _interleaved(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Interleave rows (j, j + D/2) of each head, as in llama.cpp's files."""
        if not self.interleaves:
            return rows
        shape = rows.shape
        halves = rows.reshape(-1, 2, self.group // 2, *shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)


@dataclass(frozen=True)
class ArrayRows:
    """A computed float32 vector."""

    values: np.ndarray[Any, Any]
    n_rows: int = 1
    dtype: str = "f32"
    group: int = 1

    @property
    def n_columns(self) -> int:
        """Length of the vector."""
        return len(self.values)

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the vector."""
        return self.values

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the bytes of the vector."""
        return nk.quantize(self.values, "f32").data

    def raw(self) -> Iterator[bytes]:
        """Yield the bytes of the vector."""
        yield self.values.astype("<f4").tobytes()


Rows = StoredRows | ModelRows | ArrayRows
"""Source of the rows of a tensor, or of a part of it; chunks are multiples of `group` rows."""


def row_chunks(
    rows: Rows,
    format: str,
    where: str,
    options: QuantizerOptions = DEFAULT,
    importance: Statistics = None,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor in a format, in chunks of rows.

    Parameters
    ----------
    rows : Rows
        The tensor.
    format : str
        The new format; the stored format copies the bytes.
    where : str
        Name of the tensor in error messages.
    options : QuantizerOptions
        The quantizer.
    importance : array of float32, shape (K,) or (K, K), optional
        Mean squares, or second moments, of the matrix's inputs.

    Raises
    ------
    UsageError
        If a value is not finite or does not fit the format.
    """
    if format == rows.dtype and format in ITEM_BYTES:
        yield from rows.raw()
    elif format == rows.dtype:
        for start, stop in _spans(rows):
            yield np.ascontiguousarray(rows.blocks(start, stop)).reshape(-1).data
    else:
        yield from quantized_chunks(rows, format, where, options, importance)


def quantized_chunks(
    rows: Rows,
    format: str,
    where: str,
    options: QuantizerOptions = DEFAULT,
    importance: Statistics = None,
) -> Iterator[bytes]:
    """Yield the bytes of rows quantized to a format; see `row_chunks`."""
    for start, stop in _spans(rows):
        array = rows.array(start, stop)
        if array.dtype.type not in (np.float16, np.float32, np.float64):
            raise UsageError(f"tensor {where}: {rows.dtype} cannot be converted to {format}")
        try:
            piece = options.quantize(np.atleast_1d(array), format, importance)
        except UsageError as error:
            raise UsageError(f"tensor {where} does not fit into {format}: {error}") from error
        yield piece.data.tobytes()


def _spans(rows: Rows) -> Iterator[tuple[int, int]]:
    each = max(1, _CHUNK_WEIGHTS // max(1, rows.n_columns) // rows.group) * rows.group
    if isinstance(rows, ModelRows) and rows.order[0] is not None:
        each = max(1, rows.n_rows)
    for start in range(0, rows.n_rows, each):
        yield start, min(start + each, rows.n_rows)
