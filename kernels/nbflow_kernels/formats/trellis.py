"""Trellis-coded formats of 2, 3 and 4 bits: ``q2t``, ``q3t`` and ``q4t``.

``q2t_b256``: 256 weights in 66 bytes, (2 + 64) * 8 / 256 = 2.0625 bits per weight.
``q3t_b256``: 256 weights in 98 bytes, (2 + 96) * 8 / 256 = 3.0625 bits per weight.
``q4t_b256``: 256 weights in 130 bytes, (2 + 128) * 8 / 256 = 4.0625 bits per weight.

======  =========  ==============================================================================
offset  bytes      field
======  =========  ==============================================================================
0       2          d, float16
2       32 * bits  bit stream, `bits` bits per weight, the lowest bit of a byte first
======  =========  ==============================================================================

weight = d * (code - 128); `nbflow_kernels.formats.trellis_code` says how codes follow from the
stream.  The first weights of a block take the missing bits of their states as 0, so that no start
state is stored and a block is decoded without its neighbours.

The formats rotate nothing: the distortion they are designed for is that of normally distributed
weights, which the Hadamard transform of `nbflow.quantization.transforms` brings about where a model
has others.

The source is this project.
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
from nbflow_kernels.formats import layout_cpu, trellis_code
from nbflow_kernels.formats.block_format import DECODE_COST, BlockFormat
from nbflow_kernels.formats.codec_spec import (
    CodecSpec,
    DecodedBlocks,
    Field,
    FieldTable,
    Plane,
    ReadRows,
    float16,
)
from nbflow_kernels.formats.registry import Bytes

BLOCK = 256


@jit.kernel
def _decode_streams(rows, block_bytes, bits, table, codes, start, stop):
    """Write the codes of rows [start, stop) of blocks; `table` is `codes_of_states`."""
    mask = len(table) - 1
    drop = trellis_code.STATE_BITS - bits
    for r in range(start, stop):
        at, to = simd.address(rows) + r * rows.strides[0], simd.address(codes[r])
        for _ in range(rows.shape[1] // block_bytes):
            byte, waiting, n_waiting, state = at + 2, 0, 0, 0
            for _ in range(BLOCK):
                if n_waiting < bits:
                    waiting |= np.int64(read_u8(byte)) << n_waiting
                    n_waiting += 8
                    byte += 1
                state = state >> bits | (waiting << drop & mask)
                waiting >>= bits
                n_waiting -= bits
                write_u8(to, np.int64(table[state]))
                to += 1
            at += block_bytes


@dataclass(frozen=True, eq=False, repr=False)
class TrellisFormat(BlockFormat):
    """Trellis-coded block format; the field "code" holds the bytes of the stream."""

    @property
    def stream_bits(self) -> int:
        """Bits of the stream per weight."""
        return self.form.trellis

    def streams(self, rows: Bytes) -> Bytes:
        """Return the streams of rows of blocks, (rows, bytes)."""
        blocks = rows.reshape(len(rows), -1, self.block_bytes)
        return np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(rows), -1)

    def _unpack(self, rows: Bytes, scales: NDArray[np.int16], mins: Bytes) -> Bytes:
        """See `FieldFormat._unpack`."""
        codes = np.empty((len(rows), rows.shape[1] // self.block_bytes * BLOCK), np.uint8)
        table = trellis_code.codes_of_states(self.stream_bits)
        parallel_for(
            _decode_streams, len(rows), DECODE_COST * codes.size,
            rows, self.block_bytes, self.stream_bits, table, codes,
        )  # fmt: skip
        return codes

    def unpack_codes(self, blocks: Bytes) -> Bytes:
        """See `FieldFormat.unpack_codes`."""
        states = trellis_code.states_of_stream(self.streams(blocks), self.stream_bits)
        codes: Bytes = trellis_code.codes_of_states(self.stream_bits)[states]
        return codes

    def stored_integers(self, data: Bytes) -> DecodedBlocks:
        """See `QuantFormat.stored_integers`; codes are the stream's bits of each weight."""
        codes = self.stored_bits(data)
        return DecodedBlocks(codes, self._row_floats(np.ascontiguousarray(data))[0])

    def stored_bits(self, rows: Bytes) -> Bytes:
        """Return the stream's bits of each weight, (rows, columns)."""
        ones = np.unpackbits(self.streams(rows), axis=1, bitorder="little")
        digits = ones.reshape(len(rows), -1, self.stream_bits)
        weights = np.uint8(1) << np.arange(self.stream_bits, dtype=np.uint8)
        bits: Bytes = np.bitwise_or.reduce(digits * weights, axis=2)
        return bits

    def pack(self, rows: ReadRows, n_rows: int, n_blocks: int) -> Any:
        """Repack the streams as they are, 32 bits of 16 rows side by side; see `QuantFormat.pack`.

        Bytes of the stream take the place of codes of 8 bits, four of which are a word of a row.
        """
        n_bytes = self.block_bytes - 2
        bytewise = CodecSpec(block=n_bytes, sub_block=n_bytes, code_bits=8, zero=trellis_code.ZERO)

        def streams(data: Bytes) -> DecodedBlocks:
            return DecodedBlocks(
                self.streams(data), self._row_floats(np.ascontiguousarray(data))[0]
            )

        packed = layout_cpu.pack(bytewise, streams, rows, n_rows, n_blocks * n_bytes)
        layout = replace(layout_cpu.packed_form(self.form), d_type=packed.form.d_type)
        return replace(packed, form=layout)


def _trellis(bits: int) -> TrellisFormat:
    """Return the format of that many bits per weight."""
    stream = Field("code", 32 * bits, (Plane(2, 8),))
    form = CodecSpec(BLOCK, BLOCK, code_bits=8, zero=trellis_code.ZERO, trellis=bits)
    return TrellisFormat(f"q{bits}t_b256", FieldTable(BLOCK, (float16("d", 0), stream)), form)


Q2T_B256, Q3T_B256, Q4T_B256 = _trellis(2), _trellis(3), _trellis(4)
