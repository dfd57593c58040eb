"""SentencePiece's model file: a protocol buffer, of which a few fields are read and written here.

The ``sentencepiece`` package does the work; it takes a file and does not tell its switches.

Fields: https://github.com/google/sentencepiece/blob/d8f741853847553169444afc12c00f4bbff3e9ce/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbflow_kernels.errors import UsageError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the model
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of a piece
_MODEL_TYPE, _UNIGRAM = 3, 1  # of the trainer's settings
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES = 2, 3, 4  # of the normalizer's settings


@dataclass(frozen=True)
class Spaces:
    """What a model does with spaces."""

    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def unigram_model(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    charsmap: bytes,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """Return the model file of a unigram vocabulary.

    Parameters
    ----------
    pieces, scores, types : sequence
        One per id.
    charsmap : bytes
        Compiled rules that normalize the text; may be empty.
    add_dummy_prefix, remove_extra_whitespaces : bool
        What is done with spaces.

    Returns
    -------
    bytes
        The file.
    """
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


def read_spaces(data: bytes, where: str) -> Spaces:
    """Return what a model file says of spaces.

    Parameters
    ----------
    data : bytes
        The file.
    where : str
        Its name, for messages.

    Returns
    -------
    Spaces

    Raises
    ------
    UsageError
        If the file is damaged.
    """
    found: dict[int, int] = {}
    try:
        for field, value in _fields(data):
            if field == _NORMALIZER and isinstance(value, bytes):
                found |= {f: v for f, v in _fields(value) if isinstance(v, int)}
    except (IndexError, ValueError) as error:
        raise UsageError(f"{where}: not a SentencePiece model: {error}") from error
    return Spaces(
        bool(found.get(_ADD_DUMMY_PREFIX, 1)), bool(found.get(_REMOVE_EXTRA_WHITESPACES, 1))
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Return the fields of a message: numbers as int, the rest as bytes."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            n, position = _varint(data, position)
        elif wire in (1, 5):
            n = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {position}")
        if n > len(data) - position:
            raise ValueError(f"a field at byte {position} is longer than the file")
        yield tag >> 3, data[position : position + n]
        position += n


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position`, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError(f"a number at byte {position} is too long")


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
