"""Factors of columns stored with quantized matrices: AWQ and SmoothQuant of several libraries.

The columns of a matrix X.weight (N, K) were divided by them before it was quantized, so that the
activations are multiplied by them: X.pre_quant_scale (K) of ModelOpt, X._weight_act_pre_scale of
torchao.  AutoAWQ stores their reciprocals, by which an activation function (`ScaledActivation`)
divides its results (`DIVISORS`).  A block format keeps them (`QuantTensor.column_scales`); a matrix
that is read as float32 is multiplied by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.dtypes import ITEM_BYTES, NUMPY, widen
from nbflow.checkpoint.strided_read import is_contiguous
from nbflow.checkpoint.weight_file import Read, ReorderedParts, Span, StoredParts, TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import FORMATS, QuantFormat, QuantTensor

ENDINGS = (".pre_quant_scale", "._weight_act_pre_scale")
"""Names of the factors, after that of the module."""
DIVISORS = {
    ".mlp.act.scales": (".mlp.c_proj", ".mlp.dense_4h_to_h", ".mlp.fc_out"),
    ".mlp.gelu_impl.scales": (".mlp.dense_4h_to_h",),
    ".ffn.act.scales": (".ffn.down_proj",),
}
"""Endings of divisors of activations, and of the modules that read these, one in each model."""
_FLOATS = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class ColumnScales:
    """Factors of the columns of a matrix in a block format, stored in order."""

    data: bytes = field(repr=False)
    """The factors, float32 (K,)."""
    dtype: str
    """Format of the matrix."""

    def of(self, columns: Span) -> NDArray[np.float32]:
        """Return the factors of a span of columns."""
        return np.frombuffer(self.data, np.float32)[slice(*columns)]

    def format(self, columns: Span) -> QuantFormat:
        """Return the format of a span of columns."""
        return FORMATS[self.dtype]

    def n_stored(self, columns: Span) -> int:
        """Return the stored columns of a span."""
        return columns[1] - columns[0]

    def extra_bytes(self, columns: Span) -> int:
        """Return the bytes of order and factors."""
        return 8 * (columns[1] - columns[0])


@dataclass(frozen=True)
class ScaledColumns:
    """Stored tensors of a matrix, and the factors of its columns."""

    matrix: StoredParts
    factors: TensorEntry
    column_scales: ColumnScales

    @property
    def codes(self) -> TensorEntry:
        """Codes of the matrix."""
        return self.matrix.codes

    @property
    def scales(self) -> TensorEntry:
        """Scales of the matrix."""
        return self.matrix.scales

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        return (*self.matrix.parts, self.factors)

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle as float32, times the factors."""
        found: NDArray[np.float32] = self.matrix.values(read, rows, columns)
        return found * self.column_scales.of(columns)

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return the storage bytes of a rectangle without the factors."""
        found: NDArray[np.uint8] = self.matrix.blocks(read, format, rows, columns)
        return found


@dataclass(frozen=True)
class ScaledColumnsOfBlocks(ScaledColumns):
    """Stored tensors of a matrix in a block format, and the factors of its columns."""

    @property
    def column_groups(self) -> ColumnScales:
        """The factors of columns, under the name that the planner reads."""
        return self.column_scales

    def quantized(self, read: Read, rows: Span, columns: Span) -> QuantTensor:
        """Return a rectangle, columns in whole blocks."""
        format = self.column_scales.format(columns)
        blocks = self.blocks(read, format, rows, columns)
        scales = self.column_scales.of(columns)
        shape = rows[1] - rows[0], columns[1] - columns[0]
        return QuantTensor(format, shape, blocks, column_scales=scales)


def with_column_scales(
    values: Sequence[TensorEntry], rest: Sequence[TensorEntry]
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join matrices with the factors of their columns; return tensors with values, and others."""
    endings = (*ENDINGS, *DIVISORS)
    factors = {entry.name: entry for entry in values if entry.name.endswith(endings)}
    if not factors:
        return list(values), list(rest)
    found = []
    left = dict(factors)
    for entry in values:
        module = entry.name.removesuffix(".weight")
        names = [name for name in _names_of(module) if name in factors]
        if names and module != entry.name:
            entry = _joined(entry, left.pop(names[0]), divides=names[0].endswith(tuple(DIVISORS)))
        if entry.name not in factors:
            found.append(entry)
    for entry in left.values():
        raise UsageError(
            f"{entry.file.path}: tensor {shown(entry.name)} is of a matrix that is missing; open "
            "the whole checkpoint, not one file of it"
        )
    return found, [*rest, *factors.values()]


def _names_of(module: str) -> list[str]:
    """Return the names that the factors of a module's columns may have."""
    own = [module + ending for ending in ENDINGS]
    return own + [
        module.removesuffix(reader) + ending
        for ending, readers in DIVISORS.items()
        for reader in readers
        if module.endswith(reader)
    ]


def _joined(entry: TensorEntry, factors: TensorEntry, divides: bool) -> TensorEntry:
    """Return a matrix with the factors of its columns, or their reciprocals if they divide."""
    where = f"{factors.file.path}: tensor {shown(factors.name)}"
    if entry.scaled is None or isinstance(entry.scaled, ReorderedParts) or len(entry.shape) != 2:
        raise UsageError(f"{where} must be of a quantized matrix with columns in order")
    strides = factors.strides
    contiguous = strides is None or is_contiguous(factors.shape, strides)
    n_columns = entry.shape[1]
    if factors.dtype not in _FLOATS or math.prod(factors.shape) != n_columns or not contiguous:
        raise UsageError(
            f"{where} must be {n_columns} floats, one for each column, got {factors.dtype} "
            f"{factors.shape}"
        )
    read = np.empty(n_columns, factors.order + NUMPY[factors.dtype])
    factors.file.read_into(read.view(np.uint8).data, factors.offset)
    read = read.astype(read.dtype.newbyteorder("="))
    wide = widen(read, factors.dtype) if factors.dtype == "bf16" else read.astype(np.float32)
    with np.errstate(divide="ignore", over="ignore"):
        found = 1 / wide if divides else wide
    wrong = np.flatnonzero(~np.isfinite(wide) | ~np.isfinite(found) | (wide == 0))
    if len(wrong):
        raise UsageError(
            f"{where} must be finite and not zero, got {wide[wrong[0]]} for column {wrong[0]}; the "
            "file is damaged: download or quantize it again"
        )
    of_columns = ColumnScales(found.tobytes(), entry.dtype)
    kind = ScaledColumns if entry.dtype in ITEM_BYTES else ScaledColumnsOfBlocks
    return replace(entry, scaled=kind(entry.scaled, factors, of_columns))
