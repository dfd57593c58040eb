"""Rows of a checkpoint's tensors, read in pieces, so that no whole tensor lies in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.checkpoint.dtypes import ITEM_BYTES
from nbflow.program.read_operand import read_operand, read_quantized_operand
from nbflow.program.records import Operand
from nbflow.quantization.encoding import BEST, QuantizerOptions
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError

Statistics = np.ndarray[Any, Any] | None
"""What is known about a matrix's inputs: mean squares (K,), second moments (K, K), or nothing."""
_PIECE_WEIGHTS = 1 << 22  # 16 MiB as float32


class Rows(Protocol):
    """Where the rows of one tensor, or of a part of one, come from."""

    @property
    def n_rows(self) -> int:
        """Rows in all."""

    @property
    def n_columns(self) -> int:
        """Weights in a row."""

    @property
    def dtype(self) -> str:
        """How they are stored: a plain type, or a block format."""

    @property
    def group(self) -> int:
        """How many rows belong together: pieces are multiples of it."""

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop), in a type of NumPy."""

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop) of a tensor that is stored in blocks, as their bytes."""

    def raw(self) -> Iterator[bytes]:
        """Yield the bytes as they are stored, if they are little-endian plain elements."""


@dataclass(frozen=True)
class StoredRows:
    """A tensor of the checkpoint as it lies there, under the checkpoint's own name."""

    file: WeightFile
    name: str
    group: int = 1

    @property
    def n_rows(self) -> int:
        """Rows in all; a vector is one."""
        return math.prod(self.file.shape(self.name)[:-1])

    @property
    def n_columns(self) -> int:
        """Weights in a row."""
        shape = self.file.shape(self.name)
        return shape[-1] if shape else 1

    @property
    def dtype(self) -> str:
        """Stored type."""
        return self.file.dtype(self.name)

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
            yield from convert(self, self.dtype, self.name)
        elif entry.order == "<":
            yield from self.file.stored_chunks(self.name)
        elif self.dtype == "bf16":  # the other order; exact, as the array is the widened bfloat16
            yield nk.quantize(np.atleast_1d(self.file.array(self.name)), "bf16").data.tobytes()
        else:
            yield self.file.array(self.name).tobytes()


@dataclass(frozen=True)
class ModelRows:
    """One of our tensors, found through the model's specification, rows first."""

    spec: ModelSpec
    file: WeightFile
    name: str
    group: int = 1
    """How many rows belong together: those of a head, where its rows are reordered."""
    turns: bool = False
    """Whether the rows of rotary pairs become neighbours."""
    offset: float = 0.0
    """Added to the values."""

    @property
    def n_rows(self) -> int:
        """Rows in all; a vector is one."""
        return math.prod(self.spec.shape_of(self.name)[:-1])

    @property
    def n_columns(self) -> int:
        """Weights in a row."""
        return self.spec.shape_of(self.name)[-1]

    @property
    def dtype(self) -> str:
        """Stored type; what is not stored as rows is read as float32."""
        place = self.spec.tensor_layout(self.name)
        dtype = self.file.dtype(place.name)
        return "f32" if place.head_rows and dtype not in ITEM_BYTES else dtype

    def _part(self, start: int, stop: int) -> Operand:
        is_vector = len(self.spec.shape_of(self.name)) < 2
        return Operand(self.name, rows=None if is_vector else (start, stop))

    def array(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return rows [start, stop), with the pairs reordered."""
        rows = self._ordered(read_operand(self.spec, self.file, self._part(start, stop)))
        return rows + np.float32(self.offset) if self.offset else rows

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Return the bytes of rows [start, stop), with the pairs reordered."""
        pieces = read_quantized_operand(self.spec, self.file, self._part(start, stop))
        return self._ordered(np.concatenate([piece.data for piece in pieces]))

    def raw(self) -> Iterator[bytes]:
        """Yield the elements of a plain type in its own bytes."""
        return convert(self, self.dtype, self.name)

    def _ordered(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Bring rows (j, j + D/2) of each head next to each other, as llama.cpp's files have it."""
        if not self.turns:
            return rows
        shape = rows.shape
        halves = rows.reshape(-1, 2, self.group // 2, *shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(shape)


def write_rows(
    rows: Rows,
    format: str,
    where: str,
    encoding: QuantizerOptions = BEST,
    importance: Statistics = None,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor in a format, piece by piece.

    Parameters
    ----------
    rows : Rows
        The tensor.
    format : str
        What it becomes; the type it is stored as copies it.
    where : str
        What the error messages call the tensor.
    encoding : Encoding
        How it gets there.
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
        yield from convert(rows, format, where, encoding, importance)


def convert(
    rows: Rows,
    format: str,
    where: str,
    encoding: QuantizerOptions = BEST,
    importance: Statistics = None,
) -> Iterator[bytes]:
    """Yield the bytes of rows that are put into a format; see `write_rows`."""
    for start, stop in _spans(rows):
        array = rows.array(start, stop)
        if array.dtype.type not in (np.float16, np.float32, np.float64):
            raise UsageError(f"tensor {where}: {rows.dtype} cannot be put into {format}")
        try:
            piece = encoding.put(np.atleast_1d(array), format, importance)
        except UsageError as error:
            raise UsageError(f"tensor {where} does not fit into {format}: {error}") from error
        yield piece.data.tobytes()


def _spans(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield the first and last row of each piece."""
    each = max(1, _PIECE_WEIGHTS // max(1, rows.n_columns) // rows.group) * rows.group
    for start in range(0, rows.n_rows, each):
        yield start, min(start + each, rows.n_rows)
