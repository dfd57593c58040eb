"""GGML's formats of two to four levels, byte for byte: one scale, and next to no codes.

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

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       64     codes: weight 128h + r + 32n in bits 2n, 2n + 1 of byte 32h + r, r < 32
64      2      scale, float16
======  =====  ==================================================================================

weight = scale * (code - 1), code 0..3; the encoders write 0..2.

``q2_0``: 64 weights in 18 bytes, (2 + 16) * 8 / 64 = 2.25 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16
2       16     codes: weight 4r + j in bits 2j, 2j + 1 of byte r
======  =====  ==================================================================================

weight = scale * (code - 1), code 0..3.

``q1_0``: 128 weights in 18 bytes, (2 + 16) * 8 / 128 = 1.125 bits per weight.

======  =====  ==================================================================================
offset  bytes  field
======  =====  ==================================================================================
0       2      scale, float16
2       16     codes: weight 8r + j in bit j of byte r
======  =====  ==================================================================================

weight = scale for code 1, -scale for code 0.

Source: GGML, ggml-common.h (block_tq1_0, block_tq2_0, block_q2_0, block_q1_0) and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.bit_fields import (
    BlockFields,
    Part,
    bit,
    crumb,
    pack_fields,
    unpack_fields,
)
from nbflow_kernels.formats.block_format import (
    BlockFormat,
    decode_rows,
    half_steps,
    no_scale,
)
from nbflow_kernels.formats.codec_spec import CodecSpec
from nbflow_kernels.formats.registry import Bytes, Halves

POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


@jit.device_function(inline="always")
def code_tq1_0(row, at, i, powers):
    """Return code `i` of the block at byte `at`."""
    if i < 160:
        byte, n = i & 31, i >> 5
    elif i < 240:
        byte, n = 32 + (i & 15), (i - 160) >> 4
    else:
        byte, n = 48 + (i & 3), (i - 240) >> 2
    fraction = (np.int64(row[at + byte]) * np.int64(powers[n])) & 255
    return (fraction * 3) >> 8


@jit.device_function(inline="always")
def code_tq2_0(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return (row[at + 32 * (i >> 7) + (i & 31)] >> (2 * ((i >> 5) & 3))) & 3


@jit.device_function(inline="always")
def code_q2_0(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return crumb(row, at + 2, i)


@jit.device_function(inline="always")
def code_q1_0(row, at, i, table):
    """Return code `i` of the block at byte `at`."""
    return bit(row, at + 2, i)


@jit.kernel
def _tq1_0(data, table, codes, scales, start, stop):
    decode_rows(code_tq1_0, no_scale, 256, 0, 54, data, table, codes, scales, start, stop)


@jit.kernel
def _tq2_0(data, table, codes, scales, start, stop):
    decode_rows(code_tq2_0, no_scale, 256, 0, 66, data, table, codes, scales, start, stop)


@jit.kernel
def _q2_0(data, table, codes, scales, start, stop):
    decode_rows(code_q2_0, no_scale, 64, 0, 18, data, table, codes, scales, start, stop)


@jit.kernel
def _q1_0(data, table, codes, scales, start, stop):
    decode_rows(code_q1_0, no_scale, 128, 0, 18, data, table, codes, scales, start, stop)


def _trits(data: Bytes, n: int) -> Bytes:
    """Return the first `n` base-3 digits of bytes (blocks, m) as (blocks, n * m), digit first."""
    fractions = data[:, None, :] * POWERS[:n, None]  # modulo 256
    return ((fractions.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(data), -1)


def _unpack_tq1_0(blocks: Bytes) -> Bytes:
    parts = [_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)]
    return np.hstack(parts)


def _unpack_tq2_0(blocks: Bytes) -> Bytes:
    fields = unpack_fields(blocks[:, :64], 2).reshape(-1, 2, 32, 4)
    return fields.transpose(0, 1, 3, 2).reshape(-1, 256)


def _fractions(codes: Bytes) -> Bytes:
    """Return the bytes (blocks, m) of base-3 digits (blocks, n, m); missing ones are 0."""
    n = codes.shape[1]
    number = np.tensordot(codes.astype(np.uint16), POWERS[4::-1][:n].astype(np.uint16), (1, 0))
    return ((number * 256 + 242) // 243).astype(np.uint8)


def _pack_tq1_0(codes: Bytes) -> Bytes:
    parts = codes[:, :160].reshape(-1, 5, 32), codes[:, 160:240].reshape(-1, 5, 16)
    return np.hstack([*map(_fractions, parts), _fractions(codes[:, 240:].reshape(-1, 4, 4))])


def _pack_tq2_0(codes: Bytes) -> Bytes:
    return pack_fields(codes.reshape(-1, 2, 4, 32).transpose(0, 1, 3, 2).reshape(-1, 256), 2)


def _format(
    name: str,
    block: int,
    form: CodecSpec,
    kernel: Callable[..., None],
    code: Callable[..., Any],
    unpack: Callable[[Bytes], Bytes],
    pack: Callable[[Bytes], Bytes],
    scale_at: int,
) -> BlockFormat:
    """Return a format.

    `pack` turns codes (n, block) into bytes, `unpack` blocks into codes.
    """

    def blocks(codes: Bytes, d: Halves) -> Bytes:
        stored, packed = d.reshape(-1, 1).view(np.uint8), pack(codes.reshape(-1, block))
        parts = [packed, stored] if scale_at else [stored, packed]
        return np.hstack(parts).reshape(len(codes), -1)

    def digits(packed: Bytes, d: Halves) -> Bytes:  # of tq1_0, whose bits are no bits of codes
        return np.hstack([packed, d.view(np.uint8)])

    n_packed = len(pack(np.zeros((1, block), np.uint8))[0])
    in_threes = n_packed * 8 < block * form.code_bits
    fields = BlockFields(
        (
            Part(n_packed, 8) if in_threes else Part(block, form.code_bits),
            Part(1, 16, np.uint16),
        ),
        digits if in_threes else blocks,
    )

    return BlockFormat(
        name=name,
        block_size=block,
        block_bytes=2 + n_packed,
        form=form,
        unpack=lambda data: (unpack(data), None),
        steps=half_steps(scale_at),
        kernel=kernel,
        code=code,
        scale=no_scale,
        d_at=scale_at,
        table=POWERS,
        pack_codes=blocks,
        fields=fields,
    )


_TERNARY = CodecSpec(block=256, sub_block=256, code_bits=2, zero=1)

Q1_0 = _format(
    "q1_0",
    128,
    CodecSpec(block=128, sub_block=128, code_bits=1, values=(-1, 1)),
    _q1_0,
    code_q1_0,
    lambda blocks: unpack_fields(blocks[:, 2:], 1),
    lambda codes: pack_fields(codes, 1),
    0,
)

Q2_0 = _format(
    "q2_0",
    64,
    replace(_TERNARY, block=64, sub_block=64),
    _q2_0,
    code_q2_0,
    lambda blocks: unpack_fields(blocks[:, 2:], 2),
    lambda codes: pack_fields(codes, 2),
    0,
)

TQ1_0 = _format("tq1_0", 256, _TERNARY, _tq1_0, code_tq1_0, _unpack_tq1_0, _pack_tq1_0, 52)
TQ2_0 = _format("tq2_0", 256, _TERNARY, _tq2_0, code_tq2_0, _unpack_tq2_0, _pack_tq2_0, 64)
