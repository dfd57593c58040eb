"""Matrices of HQQ: integer codes whose zero points are floats, ``weight = (code - zero) * scale``.

A matrix (N, K) is viewed as (R, C): groups are rows of C = group_size weights (axis 1) or columns
of R = group_size weights (axis 0); without group_size, R = N and C = K.

==========  ==================================================================================
tensor      of a module X
==========  ==================================================================================
X.W_q       codes of the view, packed along R: uint8 (R b / 8, C), the first rows in the highest
            bits of bytes; with 3 bits int32 (R / 10 rounded up, C)
X.scale,    float16, bfloat16 or float32, (R, 1) for axis 1, (1, C) for axis 0
X.zero
X.nbits,    facts of the matrix: numbers, and a text as bytes (packing)
...
==========  ==================================================================================

With axis 1, float16 or bfloat16 scales and groups that divide rows, a matrix is read as a grouped
format with a base (`nbflow_kernels.formats.grouped`); others as float32.

Source: HQQ 0.2.8, core/quantize.py (Quantizer, HQQLinear.state_dict), core/bitpack.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.checkpoint.dequantize_scaled import joined_parts
from nbflow.checkpoint.grouped_tensors import FLOATS, grid_block, group_blocks
from nbflow.checkpoint.weight_file import Read, Span, TensorEntry
from nbflow.utils.safe_repr import shown
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.grouped import group_format

PACKINGS = {
    "8bit_u8": (8, 1, "u8"),
    "4bit_u8": (4, 2, "u8"),
    "3bit_32": (3, 10, "i32"),
    "2bit_u8": (2, 4, "u8"),
    "1bit_u8": (1, 8, "u8"),
}
"""Name -> bits of a code, codes of a word, type of words."""
_UNUSED = (
    ".nbits", ".group_size", ".shape", ".axis", ".packing", ".unpack_view_dtype", ".view_as_float",
    ".quant_scale", ".quant_zero", ".compute_dtype", ".offload_meta", ".encoded_state_dict",
    ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero",
)  # fmt: skip
_MAX_BYTES = 256  # of a fact


@dataclass(frozen=True)
class HqqParts:
    """Stored tensors of one matrix."""

    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry
    shape: tuple[int, int]
    """Rows and columns of the matrix."""
    view: tuple[int, int]
    """R and C."""
    axis: int
    packing: str
    n_codes: int
    """Codes are below it."""

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors."""
        return self.codes, self.scales, self.zeros

    @property
    def group(self) -> int | None:
        """Columns of a group if it lies in one row, else None."""
        size = self.view[1]
        return size if self.axis == 1 and self.shape[1] % size == 0 else None

    def values(self, read: Read, rows: Span, columns: Span) -> NDArray[np.float32]:
        """Return a rectangle as float32, rounded once."""
        n_columns, size = self.shape[1], self.view[1]
        first, last = rows[0] * n_columns, rows[1] * n_columns
        of_view = first // size, -(-last // size)
        cut = slice(first - of_view[0] * size, last - of_view[0] * size)
        codes = self._codes(read, of_view).reshape(-1)[cut]
        found = codes.astype(np.float64)
        for part, combine in ((self.zeros, np.subtract), (self.scales, np.multiply)):
            if self.axis == 1:
                numbers = np.repeat(read(part, of_view, None).reshape(-1), size)
            else:
                numbers = np.tile(read(part, None, None).reshape(-1), of_view[1] - of_view[0])
            combine(found, numbers[cut], out=found)
        with np.errstate(over="ignore"):
            return found.astype(np.float32).reshape(-1, n_columns)[:, columns[0] : columns[1]]

    def blocks(self, read: Read, format: Any, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return storage bytes (rows, row bytes) of a format with a base."""
        n_rows, n_groups = rows[1] - rows[0], self.shape[1] // self.view[1]
        of_view = rows[0] * n_groups, rows[1] * n_groups
        codes = self._codes(read, of_view).reshape(n_rows, -1)[:, columns[0] : columns[1]]
        scales = read(self.scales, of_view, None).astype(np.float32).reshape(n_rows, -1)
        zeros = read(self.zeros, of_view, None).astype(np.float32).reshape(n_rows, -1)
        with np.errstate(all="ignore"):  # a file may hold inf
            bases = -(scales * zeros)
        groups = np.arange(*columns, format.block_size) // self.view[1]
        return group_blocks(format, codes, scales, bases, groups)

    def _codes(self, read: Read, rows: Span) -> NDArray[np.uint8]:
        """Return rows of the view, uint8 (rows, C)."""
        bits, n_parts, _ = PACKINGS[self.packing]
        out = np.empty((rows[1] - rows[0], self.view[1]), np.uint8)
        step = self.codes.shape[0]
        for part in range(n_parts):
            first, last = max(rows[0], part * step), min(rows[1], (part + 1) * step)
            if first >= last:
                continue
            words = read(self.codes, (first - part * step, last - part * step), None)
            shift = bits * (n_parts - 1 - part)
            out[first - rows[0] : last - rows[0]] = (words >> shift) & ((1 << bits) - 1)
        if out.size and out.max() >= self.n_codes:
            raise UsageError(
                f"{self.codes.file.path}: tensor {shown(self.codes.name)}: codes must be below "
                f"{self.n_codes}, as its nbits says, got {out.max()}"
            )
        return out


def with_hqq(entries: Sequence[TensorEntry]) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Join codes with scales and zero points; return the tensors with values, and the others."""
    held = {entry.name: entry for entry in entries}
    return joined_parts(entries, lambda entry: _joined(entry, held), _UNUSED)


def _joined(entry: TensorEntry, held: Mapping[str, TensorEntry]) -> TensorEntry:
    """Return codes with scales and zero points as one tensor; others unchanged."""
    stem = entry.name.removesuffix(".W_q")
    if stem == entry.name:
        return entry
    where = f"{entry.file.path}: tensor {shown(entry.name)}"
    parts = _facts(entry, held, stem, where)
    bits, n_parts, dtype = PACKINGS[parts.packing]
    n_words = -(-parts.view[0] // n_parts)
    if entry.dtype != dtype or entry.shape != (n_words, parts.view[1]):
        raise UsageError(
            f"{where} must be {dtype} ({n_words}, {parts.view[1]}), codes of {bits} bits of "
            f"{parts.shape} in groups along axis {parts.axis}, got {entry.dtype} {entry.shape}"
        )
    of_groups = (parts.view[0], 1) if parts.axis == 1 else (1, parts.view[1])
    for part in (parts.scales, parts.zeros):
        if part.dtype not in FLOATS or part.shape != of_groups:
            raise UsageError(
                f"{where}: {shown(part.name)} must be floats {of_groups}, got {part.dtype} "
                f"{part.shape}"
            )
    name, format = f"{stem}.weight", _format(parts)
    return replace(entry, name=name, dtype=format, shape=parts.shape, strides=None, scaled=parts)


def _format(parts: HqqParts) -> str:
    """Return the format that a matrix is read as."""
    block = parts.group and grid_block(parts.group, parts.shape[1])
    types = {parts.scales.dtype, parts.zeros.dtype}
    if not block or "f32" in types:
        return "f32"  # the base is exact only with shorter scales
    bits = (parts.n_codes - 1).bit_length()
    return group_format(bits, block, "f16" if types == {"f16"} else "f32", False, True).name


def _facts(entry: TensorEntry, held: Mapping[str, TensorEntry], stem: str, where: str) -> HqqParts:
    """Read the facts of a matrix."""

    def part(name: str) -> TensorEntry:
        found = held.get(f"{stem}.{name}")
        if found is None:
            raise UsageError(
                f"{where} needs {stem}.{name}, which is missing; open the whole checkpoint, not "
                "one file of it (HQQ's own qmodel.pt files are not supported: save the model "
                "with transformers as safetensors)"
            )
        return found

    def number(name: str) -> float:
        return float(_read(part(name), 1)[0])

    for name in ("view_as_float", "quant_scale", "quant_zero"):
        if f"{stem}.{name}" in held and number(name) != 0:
            raise UsageError(f"{where}: {name} is not supported; save the model without it")
    shape = tuple(int(n) for n in _read(part("shape"), 2))
    packing = bytes(_read(part("packing"), None).astype(np.uint8)).decode("ascii", "replace")
    axis, bits = number("axis"), number("nbits")
    if min(shape) < 1 or axis not in (0, 1) or packing not in PACKINGS:
        raise UsageError(
            f"{where}: shape, axis and packing must be two numbers above 0, 0 or 1, and one of "
            f"{', '.join(PACKINGS)}; got {shape}, {axis:g} and {shown(packing)}"
        )
    most = PACKINGS[packing][0]
    if not 1 <= bits <= most:
        raise UsageError(f"{where}: nbits must lie in 1..{most} with {packing}, got {bits:g}")
    view = (shape[0], shape[1])
    if f"{stem}.group_size" in held:
        size, n = number("group_size"), math.prod(shape)
        if size < 1 or size != int(size) or n % size:
            raise UsageError(f"{where}: group_size must divide {n} weights, got {size:g}")
        view = (n // int(size), int(size)) if axis == 1 else (int(size), n // int(size))
    n_codes = round(2**bits)  # 1.58 bits: 3 codes
    return HqqParts(
        entry, part("scale"), part("zero"), (shape[0], shape[1]), view, int(axis), packing, n_codes
    )


def _read(entry: TensorEntry, count: int | None) -> NDArray[Any]:
    """Read a small tensor of `count` numbers."""
    types = {"u8": "u1", "i32": "<i4", "i64": "<i8", "f32": "<f4"}
    n = math.prod(entry.shape)
    if entry.dtype not in types or n > _MAX_BYTES or (count is not None and n != count):
        raise UsageError(
            f"{entry.file.path}: tensor {shown(entry.name)} must be {count or 'a few'} numbers, "
            f"got {entry.dtype} {entry.shape}"
        )
    found = np.empty(n, types[entry.dtype])
    entry.file.read_into(found.view(np.uint8).data, entry.offset)
    if not np.isfinite(found).all():
        raise UsageError(f"{entry.file.path}: tensor {shown(entry.name)} must be finite numbers")
    return found
