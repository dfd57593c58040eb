"""Matrices of integer codes with scales and zero points in tensors of their own.

==========  ==================================================================================
layout      tensors of a matrix (N, K) with G groups of columns, b bits a code
==========  ==================================================================================
gptq        qweight int32 (K b / 32, N), packed along K; scales (G, N); qzeros int32
            (G, N b / 32), packed along N; g_idx (K): the group of each column
awq         qweight int32 (K, N / 8) and qzeros int32 (G, N / 8), 8 columns a word in the order
            0 2 4 6 1 3 5 7; scales (G, N)
packed      weight_packed int32 (N, K b / 32) of codes + 2**(b - 1); weight_scale (N, G);
            weight_zero_point int32 (N b / 32, G), packed along N; weight_g_idx (K)
quark       weight and weight_zero_point as qweight and qzeros of awq, or in the order of columns;
            codes and zero points less 8 if they are signed; weight_scale (G, N)
row_pairs   weight uint8 (N / 2, K): codes less 8 of rows 2 i, in low nibbles, and 2 i + 1;
            weight_scale (N, G), whose shape gives the groups
int8        weight int8 (N, K); weight_scale (N, G), or SCB (N), 127 times the scale;
            weight_zero_point int8 (N, G)
==========  ==================================================================================

Words are little-endian streams of bits: 3-bit codes cross the borders of words, unless their planes
are stored apart (`GroupedStorage.planar`).  A matrix is read
as a grouped format of `nbflow_kernels.formats.grouped`, with columns sorted by group where they
belong to groups in any order (`nbflow_kernels.formats.column_order`).  One that no format holds (a
group that 16 does not divide, or zero points with float32 scales) is read as float32.

Sources: AutoGPTQ 0.7 (qlinear_cuda_old.py), GPTQModel 7.7 (converter.py,
planar_packing.py), AutoAWQ 0.2
(packing_utils.py), compressed-tensors 0.20 (pack_quantized/helpers.py), bitsandbytes 0.50,
Quark 0.13 (torch/utils/pack.py), ModelOpt 0.47 (torch/export/quant_utils.py, row_pairs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.column_groups import ColumnGroups
from nbflow.checkpoint.dequantize_scaled import joined_parts
from nbflow.checkpoint.strided_read import is_contiguous
from nbflow.checkpoint.weight_file import Read, Span, TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.formats.grouped import BLOCK_SIZES, GroupFormat, group_format

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position of column j of 8 in a word."""
FLOATS = ("f32", "bf16", "f16")
"""Types of scales."""
_BNB_INT8 = np.float32(1 / 127)
_NAMES = {  # layout -> names of codes, scales, zero points, groups of columns
    "gptq": (".qweight", (".scales",), ".qzeros", ".g_idx"),
    "awq": (".qweight", (".scales",), ".qzeros", ".g_idx"),
    "quark": (".weight", (".weight_scale",), ".weight_zero_point", ".weight_g_idx"),
    "packed": (".weight_packed", (".weight_scale",), ".weight_zero_point", ".weight_g_idx"),
    "int8": (".weight", (".weight_scale", ".SCB"), ".weight_zero_point", ".weight_g_idx"),
    "row_pairs": (".weight", (".weight_scale",), ".weight_zero_point", ".weight_g_idx"),
}
_TYPES = {"int8": "i8", "row_pairs": "u8"}
"""Type of codes that are not words of 32 bits."""
_UNUSED = (
    ".weight_shape", ".weight_format", ".input_scale", ".input_zero_point", ".weight_scale_2",
)  # fmt: skip
"""Tensors that say nothing more about the weights."""


@dataclass(frozen=True)
class GroupedStorage:
    """Storage of the matrices of a checkpoint, by its configuration."""

    layout: str
    """"gptq", "awq", "quark", "packed", "row_pairs" or "int8"."""
    bits: int
    """Bits per code."""
    group: int | None = None
    """Columns per scale; None: all columns of a row, or of the tensor."""
    symmetric: bool = False
    """True if all zero points are 2**(bits - 1)."""
    zero_offset: int = 0
    """Added to stored zero points: 1 in the first version of GPTQ's layout."""
    signed: bool = False
    """True if quark's codes and zero points are signed."""
    in_order: bool = False
    """True if quark's words have the order of columns."""
    planar: bool = False
    """True if words hold the planes of 32 codes one after the other, instead of a stream."""

    def unpack(self, words: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the numbers in rows of words, (n, W) to (n, 32 W / bits)."""
        return unpack_planes(words, self.bits) if self.planar else unpack_words(words, self.bits)

    def word_span(self, numbers: Span) -> tuple[Span, int]:
        """Return the words that hold a span of numbers, and the first number in them."""
        each = 32 if self.planar else 32 // np.gcd(32, self.bits)  # they fill whole words
        words = each * self.bits // 32
        first, last = numbers[0] // each, -(-numbers[1] // each)
        return (first * words, last * words), first * each

    @property
    def in_words(self) -> bool:
        """True if codes are in words of 32 bits."""
        return self.layout not in _TYPES

    @property
    def words_of_rows(self) -> bool:
        """True if a word has codes of 8 rows of the matrix."""
        return self.layout in ("awq", "quark")

    @property
    def by_column(self) -> bool:
        """True if scales are (groups, rows)."""
        return self.layout == "gptq" or self.words_of_rows

    def block(self, n_columns: int) -> int | None:
        """Return the block size of the grouped format, or None if none divides the groups."""
        return grid_block(self.group or n_columns, n_columns)

    def format(self, n_columns: int, scale_type: str, has_zeros: bool) -> str | None:
        """Return the name of the grouped format that holds a matrix, or None."""
        block = self.block(n_columns)
        if block is None or (has_zeros and scale_type == "f32"):
            return None  # the base of a zero point is exact only with shorter scales
        found = group_format(self.bits, block, "f16" if scale_type == "f16" else "f32", has_zeros)
        return found.name

    def planned_format(self, n_columns: int, dtype: object) -> str:
        """Return the format of a matrix of a checkpoint whose scales have the type of config.json.

        Zero points are as the configuration says, and groups have one size.
        """
        has_zeros = not self.symmetric
        scale_type = "f16" if dtype == "float16" else "bf16"
        return self.format(n_columns, scale_type, has_zeros) or "f32"


@dataclass(frozen=True)
class GroupedParts:
    """Stored tensors of one matrix (N, K)."""

    storage: GroupedStorage
    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    shape: tuple[int, int]

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        found = (self.codes, self.scales, self.zeros)
        return tuple(part for part in found if part is not None)

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle as float32: scale * (code - zero), rounded once."""
        codes = self._codes(read, rows, columns)
        scales, zeros = self._scales(read, rows), self._zeros(read, rows)
        groups = self._groups_of(columns)
        steps = codes.astype(np.float32) - zeros[:, groups]  # exact
        steps *= scales[:, groups]
        return steps

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return storage bytes (rows, row bytes) of a `GroupFormat`; columns in whole blocks."""
        groups = self._groups_of(columns)[:: format.block_size]
        codes, zeros = self._codes(read, rows, columns), self._stored_zeros(read, format, rows)
        return group_blocks(format, codes, self._scales(read, rows), zeros, groups)

    def _groups_of(self, columns: Span) -> NDArray[np.integer]:
        """Return the group of each column of a span."""
        return np.arange(*columns) // (self.storage.group or self.shape[1])

    def _stored_zeros(
        self, read: Read, format: GroupFormat, rows: Span
    ) -> NDArray[np.uint8] | None:
        """Return the zero points (rows, groups) that the blocks of a format store, if any."""
        zeros = None if self.zeros is None else self._zeros(read, rows)  # checked if symmetric
        return zeros if format.has_zeros else None

    @property
    def _where(self) -> str:
        return f"{self.codes.file.path}: tensor {shown(self.codes.name)}"

    def _codes(self, read: Read, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return codes (rows, columns) in 0 .. 2**bits - 1."""
        layout = self.storage.layout
        if layout == "int8":
            return read(self.codes, rows, columns).view(np.uint8) ^ np.uint8(128)
        if layout == "row_pairs":
            pairs = read(self.codes, (rows[0] // 2, -(-rows[1] // 2)), columns)
            found = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, pairs.shape[1])
            return np.ascontiguousarray(found[rows[0] % 2 :][: rows[1] - rows[0]]) ^ np.uint8(8)
        if self.storage.words_of_rows:
            words = rows[0] // 8, -(-rows[1] // 8)
            found = self._of_rows(read(self.codes, columns, words))
            return np.ascontiguousarray(
                found[:, rows[0] - 8 * words[0] :][:, : rows[1] - rows[0]].T
            )
        (first, last), start = self.storage.word_span(columns)
        if layout == "packed":
            packed = read(self.codes, rows, (first, min(last, self.codes.shape[1])))
        else:
            packed = read(self.codes, (first, last), rows).T
        codes = self.storage.unpack(packed)[:, columns[0] - start : columns[1] - start]
        return np.ascontiguousarray(codes)

    def _of_rows(self, words: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the codes or zero points of words of 8 rows, (n, W) to (n, 8 W)."""
        found = unpack_words(words, self.storage.bits)
        if not self.storage.in_order:
            found = _awq_order(found)
        return found ^ np.uint8(8) if self.storage.signed else found

    def _scales(self, read: Read, rows: Span) -> NDArray[np.float32]:
        """Return the scales (rows, groups)."""
        n_rows = rows[1] - rows[0]
        if self.storage.by_column:
            return read(self.scales, None, rows).astype(np.float32).T
        if self.scales.shape[0] == 1 and self.shape[0] != 1:  # one scale for the tensor
            whole = read(self.scales, None, None).astype(np.float32).reshape(1, -1)
            return np.broadcast_to(whole, (n_rows, whole.shape[1]))
        found = read(self.scales, rows, None).astype(np.float32).reshape(n_rows, -1)
        return found * _BNB_INT8 if self.scales.name.endswith(".SCB") else found

    def _zeros(self, read: Read, rows: Span) -> NDArray[np.uint8]:
        """Return the zero points (rows, groups)."""
        storage, top = self.storage, (1 << self.storage.bits) - 1
        middle = 1 << storage.bits - 1
        if self.zeros is None:
            return np.full((rows[1] - rows[0], self._n_groups), middle, np.uint8)
        if self.zeros.dtype == "i8":
            if self.zeros.shape[0] == 1 and self.shape[0] != 1:
                rows = (0, 1)
            found = read(self.zeros, rows, None).reshape(rows[1] - rows[0], -1).astype(np.int16)
            return (found + middle).astype(np.uint8)
        (first, last), start = storage.word_span(rows)
        if storage.layout == "packed":
            words = read(self.zeros, (first, min(last, self.zeros.shape[0])), None).T
        else:
            words = read(self.zeros, None, (first, min(last, self.zeros.shape[1])))
        of_rows = storage.words_of_rows
        zeros = self._of_rows(words) if of_rows else storage.unpack(words)
        zeros = zeros[:, rows[0] - start : rows[1] - start].T
        zeros = (zeros + np.uint8(storage.zero_offset)) & np.uint8(top)
        if storage.symmetric and (zeros != middle).any():
            raise UsageError(
                f"{self._where}: the configuration says that zero points are {middle} (sym), but "
                f"{shown(self.zeros.name)} has others; set sym to false in it"
            )
        return zeros

    @property
    def _n_groups(self) -> int:
        return -(-self.shape[1] // (self.storage.group or max(1, self.shape[1])))


@dataclass(frozen=True)
class ReorderedGroupedParts(GroupedParts):
    """Stored tensors of one matrix whose columns belong to groups in any order (act-order)."""

    order: TensorEntry
    column_groups: ColumnGroups

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        return (*super().parts, self.order)

    def quantized(self, read: Read, rows: Span, columns: Span) -> QuantTensor:
        """Return a rectangle with its columns sorted by group."""
        format = self.column_groups.format(columns)
        order, block_groups = self.column_groups.ordered(columns)
        codes = self._codes(read, rows, columns)[:, order]
        codes[:, order < 0] = 0
        zeros = self._stored_zeros(read, format, rows)
        blocks = group_blocks(format, codes, self._scales(read, rows), zeros, block_groups)
        shape = rows[1] - rows[0], columns[1] - columns[0]
        return QuantTensor(format, shape, blocks, column_order=order)

    def _groups_of(self, columns: Span) -> NDArray[np.integer]:
        return self.column_groups.of(columns)


def grid_block(group: int, n_columns: int) -> int | None:
    """Return the largest block size that divides groups and columns, or None."""
    return next((n for n in BLOCK_SIZES if group % n == 0 and n_columns % n == 0), None)


def group_blocks(
    format: GroupFormat,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    offsets: NDArray[Any] | None,
    groups: NDArray[np.integer],
) -> NDArray[np.uint8]:
    """Return storage bytes (rows, row bytes) of codes (rows, columns).

    `scales` and `offsets` (rows, groups) are those of whole rows, `groups` (blocks,) the group of
    each block; `offsets` as in `GroupFormat.blocks`.
    """
    each = [
        None if part is None else np.ascontiguousarray(part[:, groups]).reshape(-1)
        for part in (scales, offsets)
    ]
    assert each[0] is not None
    blocks = format.blocks(codes.reshape(-1, format.block_size), each[0], each[1])
    return blocks.reshape(len(codes), -1)


def unpack_words(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return the numbers of `bits` bits in rows of 32-bit words, (n, W) to (n, 32 W / bits).

    Examples
    --------
    >>> import numpy as np
    >>> unpack_words(np.array([[0x76543210]], np.int32), 4)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    data = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        numbers = np.empty((*data.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            numbers[..., i] = (data >> np.uint8(bits * i)) & np.uint8((1 << bits) - 1)
        return numbers.reshape(len(data), -1)
    single = np.unpackbits(data, axis=1, bitorder="little")
    single = single[:, : single.shape[1] // bits * bits].reshape(len(data), -1, bits)
    return np.packbits(single, axis=2, bitorder="little")[..., 0]


_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Bits -> bits of its planes, low ones first; other codes are one plane."""


def unpack_planes(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return the numbers of `bits` bits in rows of 32-bit words, whose planes lie apart.

    Each 32 numbers take `bits` words: those of the low plane first, each plane a stream.

    Examples
    --------
    >>> import numpy as np
    >>> unpack_planes(np.array([[0x3, 0, 0x1]], np.int32), 3)[0, :4]
    array([7, 0, 0, 0], dtype=uint8)
    """
    groups = np.ascontiguousarray(words).reshape(len(words), -1, bits)
    numbers = np.zeros((*groups.shape[:2], 32), np.uint8)
    row = 0
    for width in _PLANES.get(bits, (bits,)):
        plane = groups[..., row : row + width].reshape(-1, width)
        numbers |= unpack_words(plane, width).reshape(numbers.shape) << np.uint8(row)
        row += width
    return numbers.reshape(len(words), -1)


def _awq_order(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return AWQ's numbers (n, 8 m) in the order of columns."""
    words = numbers.reshape(len(numbers), -1, 8)[..., _AWQ_ORDER]
    return words.reshape(numbers.shape)


# ---- from the tensors of a checkpoint -----------------------------------------------------------


def with_groups(
    entries: Sequence[TensorEntry], storage: GroupedStorage
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join codes with scales and zero points; return the tensors with values, and the others."""
    held = {entry.name: entry for entry in entries}
    unused = (*_UNUSED, _NAMES[storage.layout][3])
    return joined_parts(entries, lambda entry: _join(entry, held, storage), unused)


def _join(
    entry: TensorEntry, held: Mapping[str, TensorEntry], storage: GroupedStorage
) -> TensorEntry:
    """Return codes with their scales as one tensor; others unchanged."""
    code_name, scale_names, zero_name, order_name = _NAMES[storage.layout]
    stem = entry.name.removesuffix(code_name)
    wanted = _TYPES.get(storage.layout, "i32")
    floats = code_name == ".weight" and entry.dtype != wanted
    if stem == entry.name or floats:  # a matrix that was left alone
        return entry
    where = f"{entry.file.path}: tensor {shown(entry.name)}"
    scales = next((held[stem + name] for name in scale_names if stem + name in held), None)
    if scales is None:
        raise UsageError(
            f"{where} needs scales, {' or '.join(stem + n for n in scale_names)}, which are "
            "missing; open the whole checkpoint, not one file of it"
        )
    if entry.dtype != wanted or len(entry.shape) != 2 or scales.dtype not in FLOATS:
        raise UsageError(
            f"{where} must be a matrix of {wanted} with scales of floats, got {entry.dtype} "
            f"{entry.shape} and {scales.dtype}"
        )
    shape = _shape(entry, storage, where)
    if storage.layout == "row_pairs":
        storage = replace(storage, group=_equal_groups(scales, shape[1], where))
    zeros = held.get(stem + zero_name)
    parts = GroupedParts(storage, entry, scales, zeros, shape)
    _check_shapes(parts, where)
    dtype = (
        storage.format(shape[1], scales.dtype, zeros is not None and not storage.symmetric) or "f32"
    )
    order = held.get(stem + order_name)  # of older files also without act-order
    groups = None if order is None else _read_groups(order, parts)
    if order is not None and groups is not None:
        parts = ReorderedGroupedParts(storage, entry, scales, zeros, shape, order, groups)
        dtype = groups.dtype
    return replace(
        entry, name=f"{stem}.weight", dtype=dtype, shape=shape, strides=None, scaled=parts
    )


def _shape(entry: TensorEntry, storage: GroupedStorage, where: str) -> tuple[int, int]:
    """Return rows and columns of the matrix."""
    n, m = entry.shape
    if not storage.in_words:
        return n * 8 // storage.bits, m
    if storage.words_of_rows:
        return 8 * m, n
    n_rows, n_words = (m, n) if storage.layout == "gptq" else (n, m)
    if storage.planar and (n_words % storage.bits or n_rows % 32):
        raise UsageError(
            f"{where} of shape {entry.shape} must hold whole planes of {storage.bits} bits: rows "
            "and columns are multiples of 32"
        )
    if 32 * n_words % storage.bits:
        raise UsageError(
            f"{where} of shape {entry.shape} must hold whole codes of {storage.bits} bits"
        )
    return n_rows, 32 * n_words // storage.bits


def _equal_groups(scales: TensorEntry, n_columns: int, where: str) -> int:
    """Return the columns per scale of a row's scales."""
    n_groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if n_groups < 1 or n_columns % n_groups:
        raise UsageError(
            f"{where}: scales must divide {n_columns} columns into equal groups, got "
            f"{scales.dtype} {scales.shape}"
        )
    return n_columns // n_groups


def _check_shapes(parts: GroupedParts, where: str) -> None:
    """Raise unless scales and zero points have the shapes of the codes."""
    storage, (n_rows, _) = parts.storage, parts.shape
    n_groups = parts._n_groups
    by_column = storage.by_column
    grid = (n_groups, n_rows) if by_column else (n_rows, n_groups)
    allowed: set[tuple[int, ...]] = {grid}
    if not by_column and n_groups == 1:
        allowed |= {(n_rows,), (1,), (), (1, 1)}
    if parts.scales.shape not in allowed:
        raise UsageError(f"{where}: scales must have shape {grid}, got {parts.scales.shape}")
    if parts.zeros is None:
        return
    n_words = -(-n_rows * storage.bits // 32)
    if parts.zeros.dtype == "i8" and not by_column:
        wanted = grid
    else:
        wanted = (n_groups, n_words) if by_column else (n_words, n_groups)
    found = parts.zeros.shape
    if parts.zeros.dtype not in ("i8", "i32") or (
        found != wanted and found not in allowed - {grid}
    ):
        raise UsageError(
            f"{where}: zero points must have shape {wanted}, got {parts.zeros.dtype} {found}"
        )


def _read_groups(order: TensorEntry, parts: GroupedParts) -> ColumnGroups | None:
    """Return the group of each column, or None if columns belong to groups one after the other."""
    where, n_columns = f"{order.file.path}: tensor {shown(order.name)}", parts.shape[1]
    if order.dtype not in ("i32", "i64") or order.shape != (n_columns,):
        raise UsageError(
            f"{where} must be int32 ({n_columns},), the group of each column, got {order.dtype} "
            f"{order.shape}"
        )
    if order.strides is not None and not is_contiguous(order.shape, order.strides):
        raise UsageError(f"{where} must be contiguous, got strides {order.strides}")
    groups = np.empty(n_columns, {"i32": "<i4", "i64": "<i8"}[order.dtype])
    order.file.read_into(groups.view(np.uint8).data, order.offset)
    if groups.size and not 0 <= groups.min() <= groups.max() < parts._n_groups:
        raise UsageError(
            f"{where}: groups of columns must lie in 0..{parts._n_groups - 1}, got "
            f"{groups.min()}..{groups.max()}"
        )
    if not groups.any() or (groups == parts._groups_of((0, n_columns))).all():
        return None  # zeros: some packers leave them where columns are in order
    data, storage = groups.astype(np.int32).tobytes(), parts.storage
    has_zeros = parts.zeros is not None and not storage.symmetric
    return ColumnGroups(data, parts._n_groups, storage.bits, parts.scales.dtype, has_zeros)
