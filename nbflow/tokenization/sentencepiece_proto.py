"""SentencePiece model files (protocol buffers): settings of one, and one from a GGUF vocabulary.

Fields: https://github.com/google/sentencepiece/blob/d8f741853847553169444afc12c00f4bbff3e9ce/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the model
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of a piece
_MODEL_TYPE, _UNIGRAM, _BPE = 3, 1, 2  # of the trainer's settings
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


@dataclass(frozen=True)
class Settings:
    """Settings of a model that the sentencepiece package does not expose."""

    is_bpe: bool = False
    """Byte-pair encoding; else unigram, words or characters."""
    has_rules: bool = False
    """Has rules that normalize text."""
    add_dummy_prefix: bool = True
    """Put a space before a text."""
    remove_extra_whitespaces: bool = True
    """Remove spaces at the ends, and of several in a row all but one."""


def read_settings(data: bytes) -> Settings:
    """Return the settings of a model file.

    Raises
    ------
    ValueError
        If it is damaged.
    """
    found: dict[tuple[int, int], int | bytes] = {}
    for field, value in _fields(data):
        if field in (_TRAINER, _NORMALIZER) and isinstance(value, bytes):
            found |= {(field, inner): x for inner, x in _fields(value)}
    return Settings(
        is_bpe=found.get((_TRAINER, _MODEL_TYPE), _UNIGRAM) == _BPE,
        has_rules=bool(found.get((_NORMALIZER, _CHARSMAP), b"")),
        add_dummy_prefix=bool(found.get((_NORMALIZER, _ADD_DUMMY_PREFIX), 1)),
        remove_extra_whitespaces=bool(found.get((_NORMALIZER, _REMOVE_EXTRA_WHITESPACES), 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of the fields of a message; fixed-size numbers as bytes."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind, size = key & 7, {1: 8, 5: 4}.get(key & 7, 0)
        if kind == 0:
            number, at = _read_varint(data, at)
            yield key >> 3, number
            continue
        if kind == 2:
            size, at = _read_varint(data, at)
        elif not size:
            raise ValueError(f"field of unknown kind {kind}")
        if at + size > len(data):
            raise ValueError("a field is longer than its message")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number has more than 64 bits")


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
