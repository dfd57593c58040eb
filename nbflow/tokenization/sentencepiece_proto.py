"""SentencePiece model file (a protocol buffer) of a unigram vocabulary that a GGUF file holds.

Fields: https://github.com/google/sentencepiece/blob/d8f741853847553169444afc12c00f4bbff3e9ce/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the model
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of a piece
_MODEL_TYPE, _UNIGRAM = 3, 1  # of the trainer's settings
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 2, 3, 4  # of the normalizer's settings


def unigram_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    charsmap: bytes,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """Return a model file; `charsmap` are the compiled normalization rules, possibly empty."""
    data = bytearray()
    for piece, score, kind in zip(pieces, scores, types, strict=True):
        text = piece.encode("utf-8", "replace")
        entry = _bytes(_TEXT, text) + _float(_SCORE, score) + _int(_TYPE, kind)
        data += _bytes(_PIECES, entry)
    data += _bytes(_TRAINER, _int(_MODEL_TYPE, _UNIGRAM))
    rules = _bytes(_CHARSMAP, charsmap) if charsmap else b""
    rules += _int(_ADD_DUMMY_PREFIX, add_dummy_prefix)
    rules += _int(_REMOVE_EXTRA_WHITESPACES, remove_extra_whitespaces)
    return bytes(data + _bytes(_NORMALIZER, rules))


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _int(field: int, value: int) -> bytes:
    return _write_varint(field << 3) + _write_varint(int(value))


def _float(field: int, value: float) -> bytes:
    return _write_varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _write_varint(field << 3 | 2) + _write_varint(len(value)) + value
