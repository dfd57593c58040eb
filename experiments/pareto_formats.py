"""The codes of q3, q3h and q4 in larger blocks: fewer bits go to bases and scales.

    nbflow sweep experiments/pareto.toml      # takes them from here

========== ==== ===== ====================================================
name       block bits/weight of it codes
========== ==== ===== ====================================================
q3_b64t1     64  3.5   3
q3h_b128t1  128  3.75  3.5
q3h_b256t1  256  3.625 3.5
q4_b128t1   128  4.25  4
q4_b256t1   256  4.125 4
========== ==== ===== ====================================================

Made of the parts of the formats that come with the package, so that all encoders know them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow_kernels import FORMATS
from nbflow_kernels._jit import inline, njit
from nbflow_kernels.formats.affine_format import F16_PAIR, AffineFormat
from nbflow_kernels.formats.bit_fields import bit, crumb, nibble, pack_fields, unpack_fields
from nbflow_kernels.formats.decode import decode_codes
from nbflow_kernels.formats.inferflow import q3, q4
from nbflow_kernels.formats.inferflow.q3h import second_of_pair


@inline
def _code_q3_b64(row: Any, at: Any, i: Any) -> Any:
    """Return code `i`: two blocks of q3's planes, one behind the other."""
    return q3.code_q3(row, at + 12 * (i >> 5), i & 31)


@inline
def _q3h(row: Any, at: Any, i: Any, size: Any) -> Any:
    """Return code `i` of a block of pairs whose planes are as long as the block asks for."""
    pair = i >> 1
    middle_at = at + 4 + size // 16
    low_at = middle_at + size // 8
    c = nibble(row, low_at, pair) | (crumb(row, middle_at, pair) << 4)
    c |= bit(row, at + 4, pair) << 6
    y = second_of_pair(c)
    return y if i & 1 else c - 11 * y


@inline
def _code_q3h_b128(row: Any, at: Any, i: Any) -> Any:
    return _q3h(row, at, i, 128)


@inline
def _code_q3h_b256(row: Any, at: Any, i: Any) -> Any:
    return _q3h(row, at, i, 256)


@njit
def _codes_q3_b64(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(_code_q3_b64, 64, 28, data, codes, start, stop)


@njit
def _codes_q3h_b128(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(_code_q3h_b128, 128, 60, data, codes, start, stop)


@njit
def _codes_q3h_b256(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(_code_q3h_b256, 256, 116, data, codes, start, stop)


@njit
def _codes_q4_b128(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(q4.code_q4, 128, 68, data, codes, start, stop)


@njit
def _codes_q4_b256(data: Any, codes: Any, start: Any, stop: Any) -> None:
    decode_codes(q4.code_q4, 256, 132, data, codes, start, stop)


def _pack_q3(codes: Any) -> Any:
    return np.hstack([q3._pack(codes[:, :32]), q3._pack(codes[:, 32:])])


def _unpack_q3(blocks: Any) -> Any:
    head = blocks[:, :4]
    halves = blocks[:, 4:16], blocks[:, 16:28]
    return np.hstack([q3._unpack(np.hstack([head, half])) for half in halves])


def _pack_q3h(codes: Any) -> Any:
    c = codes[:, 0::2] + np.uint8(11) * codes[:, 1::2]
    return np.hstack([pack_fields(c >> 6, 1), pack_fields((c >> 4) & 3, 2), pack_fields(c & 15, 4)])


def _unpack_q3h(blocks: Any) -> Any:
    size = (blocks.shape[1] - 4) * 16 // 7
    first, second = 4 + size // 16, 4 + size // 16 + size // 8
    c = unpack_fields(blocks[:, second:], 4) | (unpack_fields(blocks[:, first:second], 2) << 4)
    c |= unpack_fields(blocks[:, 4:first], 1) << 6
    return np.stack([c % 11, c // 11], axis=2).reshape(len(blocks), size)


def _larger(
    name: str, like: str, size: int, n_bytes: int, codes: Callable[..., None], code: Any, **how: Any
) -> AffineFormat:
    """Return a format with the codes of another one in blocks of `size`."""
    known = FORMATS[like]
    assert isinstance(known, AffineFormat)
    return AffineFormat(
        name=name, block_size=size, block_bytes=n_bytes, n_codes=known.n_codes,
        divisor=known.n_codes - 1, parameters=F16_PAIR, base_at=0, scale_at=2, codes_kernel=codes,
        code=code, **how,
    )  # fmt: skip


_Q3 = {"pack_codes": _pack_q3, "unpack_codes": _unpack_q3}
_Q3H = {"pack_codes": _pack_q3h, "unpack_codes": _unpack_q3h}
_Q4 = {"pack_codes": q4._pack, "unpack_codes": q4._unpack}
Q3_B64T1 = _larger("q3_b64t1", "q3", 64, 28, _codes_q3_b64, _code_q3_b64, **_Q3)
Q3H_B128T1 = _larger("q3h_b128t1", "q3h", 128, 60, _codes_q3h_b128, _code_q3h_b128, **_Q3H)
Q3H_B256T1 = _larger("q3h_b256t1", "q3h", 256, 116, _codes_q3h_b256, _code_q3h_b256, **_Q3H)
Q4_B128T1 = _larger("q4_b128t1", "q4", 128, 68, _codes_q4_b128, q4.code_q4, **_Q4)
Q4_B256T1 = _larger("q4_b256t1", "q4", 256, 132, _codes_q4_b256, q4.code_q4, **_Q4)

for _format in (Q3_B64T1, Q3H_B128T1, Q3H_B256T1, Q4_B128T1, Q4_B256T1):
    FORMATS.add(_format)
