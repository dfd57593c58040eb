"""Code words of the MMA layout: weights of a chunk of 16 rows and 128 columns, by lanes of a warp.

`chunk_bytes` packs codes by their kind; `decode_mma.cuh` has the inverse of each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS, CHUNK = 16, 128

Field = tuple[int, int, int, int, int, int]
"""Half of the rows, slot, first bit of the code, width, word, bit offset in its 16-bit halves."""

# Code kinds: the decoding from code to value
BITS, PAIRS, TABLE8, TABLE16, E2M1, FLOATS, TRELLIS = range(7)


def _rows_apart(bits: int, words: int) -> tuple[Field, ...]:
    """Return the bit fields of widths 1, 2 and 4: rows g first (low bytes or words), then g + 8."""
    per_word = 16 // bits
    fields = []
    for half in range(2):
        for slot in range(8):
            if bits == 4:  # slots 2w and 2w + 1 of both halves in word w
                word, place = slot // 2, 4 * (slot % 2) + 8 * half
            else:
                word, place = divmod(8 * half + slot, per_word)
                place *= bits
            fields.append((half, slot, 0, bits, word, place))
    assert max(f[4] for f in fields) < words
    return tuple(fields)


def _three() -> tuple[Field, ...]:
    fields: list[Field] = [(half, s, 0, 3, half, 3 * s) for half in range(2) for s in range(5)]
    fields += [(0, 5 + i, 0, 3, 2, 3 * i) for i in range(3)]
    fields += [(1, 5 + i, 0, 3, 2, 9 + 3 * i) for i in range(2)]
    return (*fields, *((1, 7, i, 1, i, 15) for i in range(3)))


def _five() -> tuple[Field, ...]:
    fields: list[Field] = [
        (half, 3 * w + i, 0, 5, 2 * half + w, 5 * i)
        for half in range(2)
        for w in range(2)
        for i in range(3)
    ]
    fields += [(0, 6, 0, 5, 4, 0), (0, 7, 0, 5, 4, 5), (1, 6, 0, 5, 4, 10)]
    return (*fields, *((1, 7, i, 1, i, 15) for i in range(5)))


def _six() -> tuple[Field, ...]:
    fields: list[Field] = []
    for half in range(2):
        first = 3 * half
        fields += [(half, 2 * w + i, 0, 6, first + w, 6 * i) for w in range(3) for i in range(2)]
        fields += [(half, 6, 2, 4, first, 12), (half, 7, 2, 4, first + 1, 12)]
        fields += [(half, 6, 0, 2, first + 2, 12), (half, 7, 0, 2, first + 2, 14)]
    return tuple(fields)


def _e2m1() -> tuple[Field, ...]:
    """Return the bit fields of E2M1 codes: after a left shift, sign at bit 15, the rest at 9."""
    places = {(0, 0): (15, 9), (0, 1): (12, 6), (1, 0): (14, 3), (1, 1): (13, 0)}
    return tuple(
        (half, 2 * word + j, first, n, word, place)
        for (half, j), (sign, rest) in places.items()
        for word in range(4)
        for first, n, place in ((3, 1, sign), (0, 3, rest))
    )


FIELDS: dict[int, tuple[Field, ...]] = {
    1: _rows_apart(1, 1),
    2: _rows_apart(2, 2),
    3: _three(),
    4: _rows_apart(4, 4),
    5: _five(),
    6: _six(),
}
"""Bit fields of a tile by code width; `decode_mma.cuh` extracts them."""
E2M1_FIELDS = _e2m1()
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
POSITIONS = {
    1: tuple(range(8)),
    2: (0, 2, 4, 6) * 2,
    3: (0, 3, 6, 0, 3, 0, 3, 6),
    4: (0, 4) * 4,
    5: (0, 5, 0, 0, 5, 0, 0, 5),
    6: (0,) * 6 + (4, 4),
    7: (0, 14) * 4,
    8: (0,) * 8,
}
"""Bit position of each slot's code after masking; 7 (pair codes): x * 2**-24 and y * 2**-10."""


def chunk_bytes(kind: int, bits: int, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack codes (rows, columns) into the bytes of chunks (row tiles, chunks, bytes of codes).

    Rows are a multiple of 16 and columns of 128; the codes of `TRELLIS` are the stored bits.
    """
    if kind == TRELLIS:
        return _planes(_stream_words(codes, bits))
    n_tiles, n_chunks = codes.shape[0] // ROWS, codes.shape[1] // CHUNK
    # (tile, half, g, chunk, tile of 64, step, j, t, e) -> half, slot, (tile, chunk, 64, g, t, e)
    split = codes.reshape(n_tiles, 2, 8, n_chunks, 2, 4, 2, 4, 2)
    slots = np.ascontiguousarray(split.transpose(1, 5, 6, 0, 3, 4, 2, 7, 8))
    slots = slots.reshape(2, 8, n_tiles, n_chunks, 2, 32, 2)
    if kind == PAIRS:
        return _planes(np.ascontiguousarray(_pair_words(slots)))
    tiles = {
        TABLE8: _table8_words, TABLE16: _table16_words, E2M1: _e2m1_words, FLOATS: _field_words,
        BITS: _byte_words if bits == 8 else _field_words,
    }[kind](slots, bits)  # fmt: skip
    # (word, tile, chunk, tile of 64, lane) -> (tile, chunk, lane, words)
    words = tiles.transpose(1, 2, 4, 3, 0).reshape(n_tiles, n_chunks, 32, -1)
    return _planes(np.ascontiguousarray(words))


def _planes(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Store words (tiles, chunks, lanes, n) as vectors of four, then two, then one per lane."""
    n_tiles, n_chunks, _, n = words.shape
    parts, at = [], 0
    while at < n:
        width = next(w for w in (4, 2, 1) if at + w <= n)
        part = np.ascontiguousarray(words[..., at : at + width])
        parts.append(part.reshape(n_tiles, n_chunks, -1).view(np.uint8))
        at += width
    return np.concatenate(parts, axis=2)


def _field_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack codes by `FIELDS` into words (word, tiles, chunks, tile of 64, lane)."""
    return _words_of(FIELDS[bits], slots, bits)


def _e2m1_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack E2M1 codes by `E2M1_FIELDS`; see `_field_words`."""
    return _words_of(E2M1_FIELDS, slots, bits)


def _words_of(
    fields: tuple[Field, ...], slots: NDArray[np.uint8], n_words: int
) -> NDArray[np.uint32]:
    halves = np.zeros((n_words, *slots.shape[2:]), np.uint16)
    for half, slot, first, n, word, place in fields:
        part = (slots[half, slot] >> np.uint8(first)) & np.uint8((1 << n) - 1)
        halves[word] |= part.astype(np.uint16) << np.uint16(place)
    return halves.view("<u4")[..., 0]


def _byte_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack words of four bytes: slots 2w and 2w + 1 of rows g, then of rows g + 8."""
    pairs = slots.reshape(8, 2, *slots.shape[2:])  # (half and w, slot, ..., e)
    return np.ascontiguousarray(np.concatenate([pairs[:, 0], pairs[:, 1]], axis=-1)).view("<u4")[
        ..., 0
    ]


def _table16_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack words of eight nibbles: slots 2w and 2w + 1 of rows g, then of rows g + 8."""
    words = np.zeros((4, *slots.shape[2:-1]), np.uint32)
    for half in range(2):
        for slot in range(8):
            for e in range(2):
                place = 16 * half + 8 * (slot % 2) + 4 * e
                words[slot // 2] |= slots[half, slot, ..., e].astype(np.uint32) << np.uint32(place)
    return words


def _table8_words(slots: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack two words of the codes' low two bits, and one word of their third bits.

    The nibbles of step s, in the order of `_table16_words`, are bits 0 and 1 of word s // 2 after a
    shift by 2 * (s % 2), and bit s of word 2.
    """
    nibbles = _table16_words(slots, bits)
    low, high = nibbles & np.uint32(0x33333333), (nibbles >> np.uint32(2)) & np.uint32(0x11111111)
    third = high[0] | high[1] << np.uint32(1) | high[2] << np.uint32(2) | high[3] << np.uint32(3)
    return np.stack([low[0] | low[1] << np.uint32(2), low[2] | low[3] << np.uint32(2), third])


def _pair_words(slots: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack seven words per chunk: 16 pair codes x + 11 * y of 7 bits in each half.

    x and y are slots 2s and 2s + 1 of pair 2s + half.  Word w holds pairs 2w and 2w + 1; the two
    top bits of the words hold pairs 14 (words 0 to 2, bit 6 in word 3) and 15 (words 4 to 6 and 3).
    """
    x, y = slots[:, 0::2], slots[:, 1::2]  # (half, step, tiles, chunks, tile of 64, lane, e)
    code = (x + np.uint8(11) * y).transpose(4, 1, 0, 2, 3, 5, 6)
    c = code.reshape(16, *code.shape[3:]).astype(np.uint16)
    halves = c[0:14:2] | c[1:14:2] << np.uint16(7)
    for i, first in ((14, 0), (15, 4)):
        for n in range(3):
            halves[first + n] |= ((c[i] >> np.uint16(2 * n)) & np.uint16(3)) << np.uint16(14)
    halves[3] |= (c[14] >> np.uint16(6)) << np.uint16(14) | (c[15] >> np.uint16(6)) << np.uint16(15)
    words = np.ascontiguousarray(halves).view("<u4")[..., 0]
    return words.transpose(1, 2, 3, 0)


def _stream_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack the streams of a chunk's rows into words (tiles, chunks, lanes, 2 * bits).

    Word ``4 * i + t`` of a row's ``4 * bits`` is word i of lane t of four; those of row g + 8
    follow.
    """
    n_tiles, n_chunks = codes.shape[0] // ROWS, codes.shape[1] // CHUNK
    ones = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    stream = np.packbits(ones.reshape(len(codes), -1), axis=1, bitorder="little").view("<u4")
    # (tile, half, g, chunk, i, t) -> (tile, chunk, g, t, half, i)
    split = stream.reshape(n_tiles, 2, 8, n_chunks, bits, 4).transpose(0, 3, 2, 5, 1, 4)
    return np.ascontiguousarray(split).reshape(n_tiles, n_chunks, 32, 2 * bits)
