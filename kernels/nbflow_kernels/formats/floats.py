"""Float formats: unquantized weights as blocks of one number.

=========  =====  ====================================================================
name       bits   bytes
=========  =====  ====================================================================
``f32``    32     IEEE float32, little endian
``f16``    16     IEEE float16: largest 65504, smallest step 6e-8
``bf16``   16     the upper half of a float32: its range with 8 bits of precision
=========  =====  ====================================================================

Both 16-bit types round to nearest even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import huge_pages, jit, register_tiles, simd
from nbflow_kernels.cpu.parallel_for import parallel_chunks, parallel_for
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.codec_spec import ReadRows
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat

ROWS = 16  # rows per group: the lanes of a SIMD vector
_CHUNK_BYTES = 1 << 20  # read and packed by a thread at once: stays in the caches
COLUMNS = 8  # columns are padded to a multiple of it: four FMA chains of two columns


@dataclass(frozen=True, eq=False)
class PackedFloats:
    """Float weights in the CPU layout: 16 rows interleaved."""

    n_rows: int
    n_columns: int
    data: NDArray[Any]
    """(row groups, columns, 16): float32, int16 (float16 bits) or uint16 (bfloat16 bits), padded
    with zeros to multiples of 16 rows and 8 columns."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, padding included."""
        return int(self.data.nbytes)

    def rows(self, ids: NDArray[np.integer]) -> Floats:
        """Return rows `ids` as float32 (T, columns)."""
        picked = self.data[ids // ROWS, : self.n_columns, ids % ROWS]
        return _as_float32(picked.view(np.float16) if picked.dtype == np.int16 else picked)


@dataclass(frozen=True, eq=False, repr=False)
class FloatFormat(QuantFormat):
    """A float type as a weight format."""

    name: str
    block_bytes: int
    dtype: Any
    """Type of `QuantTensor.array`; bfloat16 is stored as uint16 bits."""
    largest: float
    """Largest magnitude that does not round to infinity."""
    block_size: int = 1

    @property
    def takes_int8(self) -> bool:
        """See `QuantFormat.takes_int8`."""
        return False

    @property
    def has_mma_layout(self) -> bool:
        """See `QuantFormat.has_mma_layout`."""
        return False

    def quantize_rows(
        self, x: Floats, n_columns: int, quantizer: str, importance: Floats | None = None
    ) -> Bytes:
        """Return `x` rounded to the type.

        Both quantizers round to nearest: without shared scales this is optimal for any importance.
        """
        too_large = np.argwhere(np.abs(x) > self.largest)
        if len(too_large):
            where = tuple(int(i) for i in too_large[0])
            raise UsageError(
                f"x must fit the format {self.name}, whose largest value is {self.largest:g}; "
                f"found {x[where]:g} in row {where[0]}, column {where[1]}; use f32"
                + (" or bf16" if self.name == "f16" else "")
            )
        if self.name == "bf16":
            bits = x.view(np.uint32)
            rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            stored = (rounded >> np.uint32(16)).astype(np.uint16)
        else:
            stored = np.ascontiguousarray(x.astype(self.dtype))
        return stored.view(np.uint8).reshape(len(x), x.shape[1] * self.block_bytes)

    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Return the numbers (n, 1) stored in bytes (n, block_bytes)."""
        return self._values(np.ascontiguousarray(blocks))

    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Write the numbers stored in rows of bytes to `out`."""
        out[...] = self._values(np.ascontiguousarray(data))

    def _values(self, data: Bytes) -> Floats:
        return _as_float32(data.view(self.dtype))

    def pack(self, rows: ReadRows, n_rows: int, n_blocks: int) -> PackedFloats:
        """Repack rows into the CPU layout; see `QuantFormat.pack`."""
        held = np.dtype(np.int16) if self.name == "f16" else self.dtype  # see PackedFloats.data
        return PackedFloats(
            n_rows,
            n_blocks,
            interleave(lambda start, stop: rows(start, stop).view(held), n_rows, n_blocks, held),
        )


def _as_float32(stored: NDArray[Any]) -> Floats:
    """Convert float32, float16 or bfloat16 bits (uint16) to float32."""
    if stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    values: Floats = stored.astype(np.float32)
    return values


def interleave(rows: ReadRows, n_rows: int, n_columns: int, dtype: np.dtype[Any]) -> Any:
    """Interleave rows of float32, int16 or uint16 to (groups, columns, 16), zero-padded.

    ``rows(start, stop)`` returns rows (stop - start, n_columns).
    """
    padded = -(-n_columns // COLUMNS) * COLUMNS
    shape = (-(-n_rows // ROWS), padded, ROWS)
    out = huge_pages.zeros_array(shape, dtype)

    def read_and_interleave(start: int, stop: int) -> None:
        groups = out[start // ROWS : -(-stop // ROWS)]
        parallel_for(_interleave, len(groups), 4.0 * groups.size, rows(start, stop), groups)

    step = ROWS * max(1, _CHUNK_BYTES // (ROWS * padded * dtype.itemsize))
    parallel_chunks(read_and_interleave, n_rows, step, ROWS)
    return out


@jit.kernel
def _interleave(rows, out, start, stop):
    """Interleave row groups [start, stop)."""
    n_rows, n_columns = rows.shape
    for group in range(start, stop):
        first = group * ROWS
        count = min(ROWS, n_rows - first)
        done = n_columns // 16 * 16 if count == ROWS else 0
        for k in range(0, done, 16):
            at = simd.address(rows) + first * rows.strides[0] + k * rows.itemsize
            to = simd.address(out) + group * out.strides[0] + k * out.strides[1]
            register_tiles.transpose(rows, at, rows.strides[0], to)
        for k in range(done, out.shape[1]):
            for lane in range(ROWS):
                inside = lane < count and k < n_columns
                out[group, k, lane] = rows[first + lane, k] if inside else 0


F32 = FloatFormat("f32", 4, np.dtype("<f4"), float(np.finfo(np.float32).max))
# 65520 is the midpoint between the largest float16 and its overflow: it rounds to infinity
F16 = FloatFormat("f16", 2, np.dtype("<f2"), float(np.nextafter(65520, 0)))
BF16 = FloatFormat("bf16", 2, np.dtype("<u2"), float(np.uint32(0x7F7F7FFF).view(np.float32)))
