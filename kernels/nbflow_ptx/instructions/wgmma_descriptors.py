"""Shared memory addresses of the matrix elements that a ``wgmma`` descriptor selects.

A descriptor, as in the PTX ISA's chapter on asynchronous warpgroup instructions:

=======  ==========================================================================
bits     field
=======  ==========================================================================
0-13     start address, in units of 16 bytes
16-29    leading dimension byte offset, in units of 16 bytes
32-45    stride dimension byte offset, in units of 16 bytes
49-51    base offset: which row of a swizzle pattern lies at address 0 modulo 1024
62-63    swizzle: 0 none, 1 of 128 bytes, 2 of 64 bytes, 3 of 32 bytes
=======  ==========================================================================

The unit is a *core row*: 16 bytes that lie together, 8 elements of 16 bits.  With rows of ``w``
bytes (16 without a swizzle, else 32, 64 or 128), the core row ``u`` of line ``r`` lies at

* lines along K ("K-major"): ``r % 8 * w + r // 8 * stride + u * 16``, and without a swizzle
  ``u * leading`` for the last term (an instruction takes two core rows of each line);
* lines along M or N ("MN-major", 16-bit elements only): line ``k``, core row ``j`` at
  ``k % 8 * w + k // 8 * stride + j % (w / 16) * 16 + j // (w / 16) * leading``; without a
  swizzle leading and stride change places.

A swizzle then exchanges core rows: the number of the 128-byte line in its pattern (8, 4 or 2
lines) is added without carry to the number of the core row within the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Bytes of a row by the descriptor's swizzle field.
_ROW_BYTES = (16, 128, 64, 32)
CORE_BYTES = 16


@dataclass(frozen=True)
class Descriptor:
    """A decoded matrix descriptor; sizes in bytes, `row_bytes` is 16 without a swizzle."""

    start: int
    leading: int
    stride: int
    base_offset: int
    row_bytes: int

    @property
    def pattern_lines(self) -> int:
        """Lines of 128 bytes after which the swizzle repeats."""
        return max(self.row_bytes // 16, 1)


def decode(bits: int) -> Descriptor:
    """Return the fields of a descriptor.

    Examples
    --------
    >>> from nbflow_ptx.instructions.wgmma_descriptors import decode
    >>> decode(0x4000004000010040)
    Descriptor(start=1024, leading=16, stride=1024, base_offset=0, row_bytes=128)
    """

    def field(low: int, width: int) -> int:
        return bits >> low & ((1 << width) - 1)

    return Descriptor(
        16 * field(0, 14), 16 * field(16, 14), 16 * field(32, 14), field(49, 3),
        _ROW_BYTES[field(62, 2)],
    )  # fmt: skip


def problem(d: Descriptor, lines: int, mn_major: bool) -> str:
    """Return the error of a descriptor of a matrix with `lines` lines, or an empty string.

    A swizzled matrix must begin at the beginning of a pattern, except that it may lie some core
    rows to the right: so kernels step along K within rows of 64 or 128 bytes.
    """
    if d.row_bytes == CORE_BYTES:
        return "a base offset without a swizzle" if d.base_offset else ""
    row = (d.start - 128 * d.base_offset) % (128 * d.pattern_lines) // d.row_bytes
    if row:
        return (
            f"a matrix with a swizzle of {d.row_bytes} bytes starts at {d.start:#x}, in row {row} "
            f"of a pattern of {8 * d.row_bytes} bytes (base offset {d.base_offset})"
        )
    inside = d.start % d.row_bytes
    width = min(16 * (lines // 8), d.row_bytes) if mn_major else 32
    if inside + width > d.row_bytes:
        return (
            f"{width} bytes of a line from byte {inside} on go beyond the swizzle's rows of "
            f"{d.row_bytes} bytes"
        )
    return ""


def core_rows(d: Descriptor, lines: int, mn_major: bool) -> Any:
    """Return the shared-memory address of each core row.

    Parameters
    ----------
    d : Descriptor
        Of the matrix.
    lines : int
        Its extent along M or N; along K it has 32 bytes (16 elements of 16 bits).
    mn_major : bool
        True if elements that are neighbours along M or N are contiguous.

    Returns
    -------
    array of int64
        Shape (lines, 2), or (16, lines // 8) of a matrix that is MN-major.
    """
    w = d.row_bytes
    plain = w == CORE_BYTES
    if mn_major:
        k, j = np.arange(16)[:, None], np.arange(lines // 8)[None, :]
        far, down = (d.stride, d.leading) if plain else (d.leading, d.stride)
        per = w // CORE_BYTES
        at = k % 8 * w + k // 8 * down + j % per * CORE_BYTES + j // per * far
    else:
        r, u = np.arange(lines)[:, None], np.arange(2)[None, :]
        at = r % 8 * w + r // 8 * d.stride + u * (d.leading if plain else CORE_BYTES)
    at = at + d.start
    if plain:
        return at
    line = (at >> 7) - d.base_offset & d.pattern_lines - 1
    return at ^ line << 4
