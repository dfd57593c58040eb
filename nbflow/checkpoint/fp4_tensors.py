"""NVFP4 matrices of ModelOpt and compressed-tensors; MXFP4 of compressed-tensors and Quark.

==================  =====================================  ====================================
method              tensors of a matrix X (N, K)           scale of 16 weights
==================  =====================================  ====================================
modelopt            weight, weight_scale, weight_scale_2   weight_scale * weight_scale_2
compressed-tensors  weight_packed, weight_scale,           weight_scale / weight_global_scale
                    weight_global_scale
==================  =====================================  ====================================

Codes are E2M1, two in a byte (N, K / 2), the first in the low nibble; scales are E4M3 (N, K / 16),
or (N, K / 32), and float32 (1,) for the tensor.  A weight is the product of its value and the scale
of its block, which is rounded to float32: the format e2m1_g16_f32.  MXFP4 has one E8M0 byte
(N, K / 32) and is read as the format mxfp4; Quark stores it as weight and weight_scale.

Sources: compressed-tensors 0.20, compressors/nvfp4 and compressors/mxfp4; ModelOpt 0.39,
torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.dequantize_scaled import MXFP4_BLOCK, Scaled, joined_parts
from nbflow.checkpoint.weight_file import Read, Span, TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.e2m1 import E2M1_G16_F32

GROUP = 16
"""Weights per scale of NVFP4."""
TILE_ROWS, TILE_BLOCKS = 128, 4
"""Rows and blocks of a tile of swizzled scales."""
NAMES = {
    "modelopt": (".weight", ".weight_scale_2"),
    "compressed-tensors": (".weight_packed", ".weight_global_scale"),
    "compressed-mxfp4": (".weight_packed", ".weight_global_scale"),
    "quark-mxfp4": (".weight", ".weight_scale_2"),
}
"""Names of codes and of the tensor's scale, by method."""
_UNUSED = (".input_scale", ".input_global_scale")


@dataclass(frozen=True)
class Fp4Parts:
    """Stored tensors of one NVFP4 matrix."""

    codes: TensorEntry
    scales: TensorEntry
    tensor_scale: TensorEntry | None
    """None: scales of blocks alone."""
    divides: bool = False
    """True if the scale of the tensor divides."""
    group: int = GROUP
    """Weights per scale: 16, or a multiple."""
    swizzled: bool = False
    """True if scales are stored in the tiles that cuBLAS reads (`swizzled_shape`)."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        found = self.codes, self.scales, self.tensor_scale
        return tuple(part for part in found if part is not None)

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle as float32, columns in whole blocks."""
        blocks = self.blocks(read, E2M1_G16_F32, rows, columns)
        found = E2M1_G16_F32.dequantize_blocks(blocks.reshape(-1, E2M1_G16_F32.block_bytes))
        return found.reshape(rows[1] - rows[0], -1)

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return the bytes of rows in e2m1_g16_f32, columns in whole blocks."""
        codes = read(self.codes, rows, (columns[0] // 2, columns[1] // 2))
        blocks = columns[0] // GROUP, columns[1] // GROUP
        scales: NDArray[Any] = self._block_scales(read, rows, blocks)
        if self.tensor_scale is not None:
            of_tensor = read(self.tensor_scale, None, None).reshape(())
            with np.errstate(all="ignore"):  # a file may hold 0 or NaN
                scales = scales / of_tensor if self.divides else scales * of_tensor
        found = np.empty((*scales.shape, format.block_bytes), np.uint8)
        found[..., :4] = scales.astype("<f4")[..., None].view(np.uint8)
        found[..., 4:] = codes.reshape(*scales.shape, GROUP // 2)
        return found.reshape(len(codes), -1)

    def _block_scales(self, read: Read, rows: Span, blocks: Span) -> NDArray[np.float32]:
        """Return the scales of blocks, float32 (rows, blocks)."""
        if not self.swizzled:
            each = self.group // GROUP
            first, last = blocks[0] // each, -(-blocks[1] // each)
            stored = read(self.scales, rows, (first, last)).astype(np.float32)
            of_blocks = np.repeat(stored, each, axis=1)[:, blocks[0] - first * each :]
            return of_blocks[:, : blocks[1] - blocks[0]]
        first = rows[0] // TILE_ROWS
        stored = read(self.scales, (32 * first, 32 * -(-rows[1] // TILE_ROWS)), None)
        # (row tile, column tile, row % 32, row // 32 % 4, column): rows of tiles are contiguous
        tiles = stored.astype(np.float32).reshape(len(stored) // 32, -1, 32, 4, 4)
        found = tiles.transpose(0, 3, 2, 1, 4).reshape(TILE_ROWS * len(tiles), -1)
        start = rows[0] - TILE_ROWS * first
        return found[start : start + rows[1] - rows[0], blocks[0] : blocks[1]]


def swizzled_shape(n_rows: int, n_columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a matrix in tiles of 128 rows and 4 blocks.

    Source: cuBLAS documentation, 1D block scaling factors layout.

    Examples
    --------
    >>> swizzled_shape(200, 128)
    (64, 32)
    """
    return 32 * -(-n_rows // TILE_ROWS), 4 * TILE_BLOCKS * -(-n_columns // (TILE_BLOCKS * GROUP))


def with_fp4(
    entries: Sequence[TensorEntry], method: str
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join codes with scales; return the tensors with values, and the others."""
    held = {entry.name: entry for entry in entries}
    return joined_parts(entries, lambda entry: _joined(entry, held, method), _UNUSED)


def _joined(entry: TensorEntry, held: Mapping[str, TensorEntry], method: str) -> TensorEntry:
    """Return codes with their scales as one tensor; others unchanged."""
    code_name, tensor_name = NAMES[method]
    stem = entry.name.removesuffix(code_name)
    if stem == entry.name or entry.dtype != "u8":
        return entry
    where = f"{entry.file.path}: tensor {shown(entry.name)}"
    scales, of_tensor = held.get(f"{stem}.weight_scale"), held.get(stem + tensor_name)
    if scales is None or len(entry.shape) != 2:
        raise UsageError(
            f"{where} must be a matrix of FP4 codes with scales, {stem}.weight_scale; open the "
            "whole checkpoint, not one file of it"
        )
    n_rows, n_columns = entry.shape[0], 2 * entry.shape[1]
    if scales.dtype == "u8" and of_tensor is None:
        _check(where, scales, ("u8",), (n_rows, n_columns // MXFP4_BLOCK), n_columns, MXFP4_BLOCK)
        scaled = Scaled(entry, scales, (1, MXFP4_BLOCK))
        return _matrix(entry, stem, "mxfp4", (n_rows, n_columns), scaled)
    group = 2 * GROUP if scales.shape == (n_rows, n_columns // (2 * GROUP)) else GROUP
    _check(where, scales, ("f8_e4m3",), (n_rows, n_columns // group), n_columns, group)
    if of_tensor is None or of_tensor.dtype != "f32" or math.prod(of_tensor.shape) != 1:
        raise UsageError(f"{where} needs the scale of the tensor, {stem}{tensor_name}, one float32")
    divides = method == "compressed-tensors"
    parts = Fp4Parts(entry, scales, of_tensor, divides, group)
    return _matrix(entry, stem, E2M1_G16_F32.name, (n_rows, n_columns), parts)


def _matrix(
    entry: TensorEntry, stem: str, dtype: str, shape: tuple[int, int], scaled: Any
) -> TensorEntry:
    return replace(
        entry, name=f"{stem}.weight", dtype=dtype, shape=shape, strides=None, scaled=scaled
    )


def _check(
    where: str,
    scales: TensorEntry,
    types: tuple[str, ...],
    shape: tuple[int, int],
    n_columns: int,
    group: int,
) -> None:
    """Raise unless scales have a type and a shape."""
    if scales.dtype not in types or scales.shape != shape or n_columns % group:
        raise UsageError(
            f"{where}: scales must be {' or '.join(types)} of shape {shape}, one for {group} "
            f"weights, got {scales.dtype} {scales.shape}"
        )
