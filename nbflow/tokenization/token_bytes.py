"""The bytes that each token stands for in the middle of a text."""

from __future__ import annotations

import re
from collections.abc import Callable

from nbflow.tokenization import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHORS = ("a", "0", ".")
"""Texts that a token is decoded after, so that nothing at the beginning of a text is stripped."""


def vocabulary_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return the bytes of every token of a tokenizer; None for one that is no text.

    Special tokens are no text, nor are ids the vocabulary leaves out.  Made once and kept with the
    tokenizer.
    """
    kept: list[bytes | None] | None = tokenizer.__dict__.get("_vocabulary_bytes")
    if kept is None:
        kept = _all(tokenizer)
        tokenizer.__dict__["_vocabulary_bytes"] = kept
    return kept


def _all(tokenizer: Tokenizer) -> list[bytes | None]:
    special = set(tokenizer.special_tokens.values()) | set(tokenizer.eos_ids)
    if tokenizer.bos_id is not None:
        special.add(tokenizer.bos_id)
    read = getattr(tokenizer, "piece_bytes", None) or _reader(tokenizer)
    texts = (b"" if i in special else read(i) for i in range(tokenizer.vocab_size))
    return [text or None for text in texts]


def _reader(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return how to find the bytes of a token of a ``tokenizer.json``."""
    anchor, alphabet = _anchor(tokenizer), _byte_level_alphabet()
    before = tokenizer.decode(anchor)
    byte_level = _is_byte_level(tokenizer, alphabet)

    def read(token: int) -> bytes:
        piece = tokenizer.piece(token)
        byte = _BYTE_PIECE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        if byte_level and all(c in alphabet for c in piece):
            return bytes(alphabet[c] for c in piece)
        text = tokenizer.decode([*anchor, token]) if piece else ""
        return text[len(before) :].encode() if text.startswith(before) else b""

    return read


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Return ids of a text that stays the same whatever follows."""
    for text in _ANCHORS:
        ids = tokenizer.encode(text)
        if ids and tokenizer.decode(ids).strip() == text:
            return ids
    return []


def _is_byte_level(tokenizer: Tokenizer, alphabet: dict[str, int]) -> bool:
    """Return whether pieces are spelt in the alphabet of byte-level BPE: a space is U+0120."""
    space = next(c for c, byte in alphabet.items() if byte == 0x20)
    return tokenizer.token_id(space) is not None and tokenizer.token_id("\u010a") is not None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's character for each byte: printable ones are themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
