"""GGML's ternary and binary formats: two to four levels, one scale per block.

``tq1_0``: 256 weights in 54 bytes, (48 + 4 + 2) * 8 / 256 = 1.6875 bits per weight.  A byte holds 5
codes 0..2 as the fraction 0.c0c1c2c3c4 in base 3, rounded up to 1/256: multiplied by 3**n, modulo
1, it begins with code n.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       32     weights 0..159: weight r + 32n is code n of byte r
32      16     weights 160..239: weight 160 + r + 16n is code n of byte 32 + r
48      4      weights 240..255: weight 240 + r + 4n is code n of byte 48 + r, n = 0..3
52      2      scale, float16
======  =====  ==================================================================================

weight = scale * (code - 1).

``tq2_0``: 256 weights in 66 bytes, (64 + 2) * 8 / 256 = 2.0625 bits per weight.

weight = d * (code - 1), code 0..3; the quantizers write 0..2.

``q2_0``: 64 weights in 18 bytes, (2 + 16) * 8 / 64 = 2.25 bits per weight.

weight = d * (code - 1), code 0..3.

``q1_0``: 128 weights in 18 bytes, (2 + 16) * 8 / 128 = 1.125 bits per weight.

weight = d for code 1, -d for code 0.

Source: GGML, ggml-common.h (block_tq1_0, block_tq2_0, block_q2_0, block_q1_0) and ggml-quants.c.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import read_u8
from nbflow_kernels.cpu.simd_narrow import write_u8
from nbflow_kernels.formats.block_format import DECODE_COST, BlockFormat
from nbflow_kernels.formats.codec_spec import CodecSpec, Field, FieldTable, Plane, float16
from nbflow_kernels.formats.registry import Bytes

POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_TERNARY = CodecSpec(block=256, sub_block=256, code_bits=2, zero=1)

Q1_0 = BlockFormat(
    "q1_0",
    FieldTable(128, (Field("code", 128, (Plane(2, 1),)), float16("d", 0))),
    CodecSpec(block=128, sub_block=128, code_bits=1, values=(-1, 1)),
)

Q2_0 = BlockFormat(
    "q2_0",
    FieldTable(64, (Field("code", 64, (Plane(2, 2),)), float16("d", 0))),
    replace(_TERNARY, block=64, sub_block=64),
)

TQ2_0 = BlockFormat(
    "tq2_0",
    FieldTable(256, (Field("code", 256, (Plane(0, 2, stride=32),)), float16("d", 64))),
    _TERNARY,
)


# ---- tq1_0, hand-written: a FieldTable cannot describe base-3 digits -----------------------------


@jit.kernel
def _unpack_tq1_0(rows, powers, codes, start, stop):
    """Write the codes of rows [start, stop) of blocks of 54 bytes."""
    for r in range(start, stop):
        block, to = simd.address(rows) + r * rows.strides[0], simd.address(codes[r])
        for _ in range(rows.shape[1] // 54):
            for first, count, n in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
                for digit in range(n):
                    for i in range(count):
                        fraction = (read_u8(block + first + i) * np.int64(powers[digit])) & 255
                        write_u8(to, (fraction * 3) >> 8)
                        to += 1
            block += 54


def _digits(data: Bytes, n: int) -> Bytes:
    """Return the first `n` base-3 digits of bytes (blocks, m) as (blocks, n * m), digit first."""
    fractions = data[:, None, :] * POWERS[:n, None]  # modulo 256
    return ((fractions.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(data), -1)


@jit.kernel
def _pack_tq1_0(codes, blocks, start, stop):
    """Write the digits of blocks [start, stop), 256 codes each, to 52 bytes; the missing are 0."""
    numbers = np.empty(32, np.uint16)
    for b in range(start, stop):
        source, to = codes[b], blocks[b]
        code = at = 0
        for count, n in ((32, 5), (16, 5), (4, 4)):
            numbers[:] = 0
            for _ in range(n):
                for i in range(count):
                    numbers[i] = numbers[i] * np.uint16(3) + source[code + i]
                code += count
            for i in range(count):
                number = np.uint32(numbers[i]) * np.uint32(3 if n == 4 else 1)
                to[at + i] = np.uint8((number * np.uint32(256) + np.uint32(242)) // np.uint32(243))
            at += count


@dataclass(frozen=True, eq=False, repr=False)
class Base3Format(BlockFormat):
    """Format `tq1_0`; the field "code" holds bytes of 5 base-3 digits."""

    def _unpack(self, rows: Bytes, scales: NDArray[np.int16], mins: Bytes) -> Bytes:
        """See `FieldFormat._unpack`."""
        codes = np.empty((len(rows), rows.shape[1] // self.block_bytes * self.block_size), np.uint8)
        work = DECODE_COST * codes.size
        parallel_for(_unpack_tq1_0, len(rows), work, rows, POWERS, codes)
        return codes

    def unpack_codes(self, blocks: Bytes) -> Bytes:
        """See `FieldFormat.unpack_codes`."""
        parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
        return np.hstack([_digits(*part) for part in parts])

    def pack_blocks(self, **numbers: NDArray[Any]) -> Bytes:
        """See `FieldFormat.pack_blocks`."""
        codes = np.ascontiguousarray(numbers["code"], np.uint8).reshape(-1, 256)
        packed = np.empty((len(codes), 52), np.uint8)
        parallel_for(_pack_tq1_0, len(codes), DECODE_COST * codes.size, codes, packed)
        rows = packed.reshape(len(numbers["code"]), -1)
        return super().pack_blocks(code=rows, d=numbers["d"])


TQ1_0 = Base3Format(
    "tq1_0",
    FieldTable(256, (Field("code", 52, (Plane(0, 8),)), float16("d", 52))),
    _TERNARY,
)
