"""Matrices of torchao in safetensors files: tensors X._weight_PART for a matrix X.weight (N, K).

========================  ====================================  ==================================
class of torchao          parts of G groups of columns          weight
========================  ====================================  ==================================
Int4Tensor                qdata uint8 (N, K / 2), scale and     code * scale + zero_point, code
                          zero_point (G, N)                     in -8..7, first in low nibbles
Int8Tensor,               qdata int8 (N, K), scale (N, G),      (code - zero_point) * scale
IntxUnpackedToInt8Tensor  zero_point int8 (N, G), or none
Float8Tensor              qdata FP8 (N, K), scale (N, G) or     code * scale
                          one for a block of rows and columns
MXTensor                  qdata uint8 (N, K / 2), scale E8M0    value(code) * scale: mxfp4
                          (N, K / 32)
NVFP4Tensor               qdata uint8 (N, K / 2), scale E4M3    value(code) * scale
                          (N, K / 16) or in tiles (swizzled),   * per_tensor_scale: e2m1_g16_f32
                          per_tensor_scale float32 (), or none
========================  ====================================  ==================================

Parts are told apart by their types.  Int4Tensor becomes a grouped format with a base
(`nbflow_kernels.formats.grouped`).  Layouts of one device (Int4TilePackedTo4dTensor,
Int4PlainInt32Tensor) are refused.

Source: torchao 0.18, prototype/safetensors (names) and quantization/quantize_/workflows; packing of
Int4Tensor: MSLK 1.0, quantize/shuffle.py (pack_int4, int4_row_quantize_zp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.dequantize_scaled import MXFP4_BLOCK, Scaled, joined_parts
from nbflow.checkpoint.fp4_tensors import GROUP, Fp4Parts, swizzled_shape
from nbflow.checkpoint.grouped_tensors import (
    FLOATS,
    GroupedParts,
    GroupedStorage,
    grid_block,
    group_blocks,
)
from nbflow.checkpoint.weight_file import Read, Span, TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.e2m1 import E2M1_G16_F32
from nbflow_kernels.formats.grouped import group_format

_QDATA = "_qdata"
_IGNORED = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")
"""Parts that say nothing about weights."""
_FLOAT8 = ("f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")


@dataclass(frozen=True)
class Int4Parts:
    """Stored tensors of one Int4Tensor."""

    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry
    shape: tuple[int, int]
    group: int
    """Columns of a group."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        return self.codes, self.scales, self.zeros

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle as float32: the scale times the code, plus the base."""
        scales, bases = self._parameters(read, rows)
        groups = np.arange(*columns) // self.group
        found = self._codes(read, rows, columns).astype(np.float32)
        found *= scales[:, groups]
        found += bases[:, groups]
        return found

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return storage bytes (rows, row bytes) of a format with a base."""
        scales, bases = self._parameters(read, rows)
        groups = np.arange(*columns, format.block_size) // self.group
        return group_blocks(format, self._codes(read, rows, columns), scales, bases, groups)

    def _codes(self, read: Read, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return codes 0..15, 8 above torchao's, (rows, columns)."""
        first = columns[0] // 2
        packed = read(self.codes, rows, (first, -(-columns[1] // 2)))
        codes = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1) ^ np.uint8(8)
        return np.ascontiguousarray(
            codes[:, columns[0] - 2 * first :][:, : columns[1] - columns[0]]
        )

    def _parameters(
        self, read: Read, rows: Span
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return scales and bases (rows, groups)."""
        scales = read(self.scales, None, rows).astype(np.float32).T
        zeros = read(self.zeros, None, rows).astype(np.float32).T
        with np.errstate(all="ignore"):  # a file may hold inf
            return scales, zeros - np.float32(8) * scales


def with_torchao(entries: Sequence[TensorEntry]) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join codes with scales and zero points; return the tensors with values, and the others."""
    held = {entry.name: entry for entry in entries}
    values, used = joined_parts(entries, lambda entry: _joined(entry, held))
    ignored = {e.name for e in values if e.name.rpartition("._weight_")[2] in _IGNORED}
    codes = {name.removesuffix("qdata") for name in held}
    zeros = (name for name in held if name.endswith("zero_point"))  # those of symmetric codes are 0
    ignored |= {name for name in zeros if name.removesuffix("zero_point") in codes}
    rest = [entry for entry in values if entry.name in ignored]
    return [entry for entry in values if entry.name not in ignored], used + rest


def _joined(entry: TensorEntry, held: Mapping[str, TensorEntry]) -> TensorEntry:
    """Return codes with their parameters as one tensor; others unchanged."""
    module, _, part = entry.name.rpartition("._")
    if not part.endswith(_QDATA):
        return entry
    stem, where = entry.name.removesuffix("qdata"), f"{entry.file.path}: tensor {shown(entry.name)}"
    scales, zeros = held.get(stem + "scale"), held.get(stem + "zero_point")
    if scales is None or len(entry.shape) != 2:
        raise UsageError(
            f"{where} must be a matrix of codes with scales, {stem}scale, as Int4Tensor, "
            "Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor, MXTensor and NVFP4Tensor have "
            f"them; got {entry.dtype} {entry.shape}; layouts of one device are not supported"
        )
    name = f"{module}.{part.removesuffix(_QDATA)}"
    dtype, shape, parts = _parts(entry, scales, zeros, held.get(stem + "per_tensor_scale"), where)
    return replace(entry, name=name, dtype=dtype, shape=shape, strides=None, scaled=parts)


def _parts(
    entry: TensorEntry,
    scales: TensorEntry,
    zeros: TensorEntry | None,
    of_tensor: TensorEntry | None,
    where: str,
) -> tuple[str, tuple[int, int], Any]:
    """Return the type that a matrix is read as, its shape, and its stored tensors."""
    n_rows, n_columns = entry.shape
    if entry.dtype == "u8" and scales.dtype in ("u8", "f8_e8m0"):
        shape = (n_rows, 2 * n_columns)
        _check(scales, (n_rows, shape[1] // MXFP4_BLOCK), ("u8", "f8_e8m0"), where)
        as_bytes = replace(scales, dtype="u8")
        return "mxfp4", shape, Scaled(entry, as_bytes, (1, MXFP4_BLOCK))
    if entry.dtype == "u8" and scales.dtype == "f8_e4m3":
        shape = (n_rows, 2 * n_columns)
        return E2M1_G16_F32.name, shape, _nvfp4(entry, scales, of_tensor, shape, where)
    if entry.dtype == "u8" and zeros is not None:
        return _int4(entry, scales, zeros, where)
    if entry.dtype == "i8":
        return _int8(entry, scales, zeros, where)
    if entry.dtype in _FLOAT8:
        return _float8(entry, scales, where)
    raise UsageError(f"{where}: codes of type {entry.dtype} are not supported")


def _int4(
    entry: TensorEntry, scales: TensorEntry, zeros: TensorEntry, where: str
) -> tuple[str, tuple[int, int], Any]:
    """Return `_parts` of int4 codes in groups of columns, with scales and zeros."""
    n_rows, shape = entry.shape[0], (entry.shape[0], 2 * entry.shape[1])
    group = _group(scales.shape[:1], shape[1], where)
    for part in (scales, zeros):
        _check(part, (shape[1] // group, n_rows), FLOATS, where)
    block = grid_block(group, shape[1])
    kind = "f16" if (scales.dtype, zeros.dtype) == ("f16", "f16") else "f32"
    format = group_format(4, block, kind, False, True).name if block else "f32"
    return format, shape, Int4Parts(entry, scales, zeros, shape, group)


def _int8(
    entry: TensorEntry, scales: TensorEntry, zeros: TensorEntry | None, where: str
) -> tuple[str, tuple[int, int], Any]:
    """Return `_parts` of int8 codes in rows or groups of columns."""
    n_rows, n_columns = entry.shape
    group = _group(scales.shape[1:] or (1,), n_columns, where)
    storage = GroupedStorage("int8", 8, None if group == n_columns else group, zeros is None)
    grid = (n_rows, n_columns // group)
    _check(scales, grid, FLOATS, where)
    if zeros is not None:
        _check(zeros, grid, ("i8",), where)
        if not _any(zeros):  # stored for symmetric codes, too
            zeros, storage = None, replace(storage, symmetric=True)
    found = storage.format(n_columns, scales.dtype, zeros is not None)
    parts = GroupedParts(storage, entry, scales, zeros, (n_rows, n_columns))
    return found or "f32", (n_rows, n_columns), parts


def _float8(
    entry: TensorEntry, scales: TensorEntry, where: str
) -> tuple[str, tuple[int, int], Any]:
    """Return `_parts` of float8 numbers with a scale for each of equal blocks."""
    n_rows, n_columns = entry.shape
    grid = scales.shape if len(scales.shape) == 2 else (1, 1)
    if scales.dtype not in FLOATS or min(grid) < 1 or n_rows % grid[0] or n_columns % grid[1]:
        raise UsageError(
            f"{where}: scales must be floats for equal blocks of {entry.shape}, got "
            f"{scales.dtype} {scales.shape}"
        )
    matrix = replace(scales, shape=grid, strides=None)
    block_shape = (n_rows // grid[0], n_columns // grid[1])
    return "f32", (n_rows, n_columns), Scaled(entry, matrix, block_shape)


def _nvfp4(
    codes: TensorEntry,
    scales: TensorEntry,
    of_tensor: TensorEntry | None,
    shape: tuple[int, int],
    where: str,
) -> Fp4Parts:
    """Return the stored tensors of an NVFP4Tensor, checked."""
    plain, swizzled = (shape[0], shape[1] // GROUP), swizzled_shape(*shape)
    if shape[1] % GROUP or scales.shape not in (plain, swizzled):
        raise UsageError(
            f"{where}: {shown(scales.name)} must have shape {plain}, one scale for {GROUP} "
            f"weights, or {swizzled} (is_swizzled_scales), got {scales.shape}"
        )
    if of_tensor is not None and (of_tensor.dtype != "f32" or math.prod(of_tensor.shape) != 1):
        raise UsageError(
            f"{where}: {shown(of_tensor.name)} must be one float32, got {of_tensor.dtype} "
            f"{of_tensor.shape}"
        )
    return Fp4Parts(codes, scales, of_tensor, swizzled=scales.shape == swizzled)


def _group(n_groups: tuple[int, ...], n_columns: int, where: str) -> int:
    """Return the columns of a group."""
    if len(n_groups) != 1 or n_groups[0] < 1 or n_columns < 1 or n_columns % n_groups[0]:
        raise UsageError(f"{where}: {n_columns} columns must be equal groups, got {n_groups}")
    return n_columns // n_groups[0]


def _any(part: TensorEntry) -> bool:
    """Return whether a tensor of bytes has numbers other than 0."""
    numbers = np.empty(part.shape, np.int8)
    part.file.read_into(numbers.view(np.uint8).reshape(-1).data, part.offset)
    return bool(numbers.any())


def _check(part: TensorEntry, shape: tuple[int, ...], types: Sequence[str], where: str) -> None:
    """Raise unless a part has a type and a shape; whole rows may leave the last dimension out."""
    allowed = {shape} | ({shape[:1]} if shape[-1] == 1 else set())
    if part.dtype not in types or part.shape not in allowed:
        raise UsageError(
            f"{where}: {shown(part.name)} must be {' or '.join(types)} {shape}, got {part.dtype} "
            f"{part.shape}"
        )
