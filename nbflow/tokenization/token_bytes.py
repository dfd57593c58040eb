"""Bytes of every token within a text."""

from __future__ import annotations

from collections.abc import Callable

from nbflow.tokenization.sentencepiece_bpe import BYTE_PIECE
from nbflow.tokenization.tokenizer import Tokenizer

_ANCHORS = ("a", "0", ".")
"""Texts that precede a token when it is decoded, so that its leading space is not stripped."""


def vocabulary_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """Return the bytes of every token; None for special tokens and for ids without a token.

    Computed once and cached in the tokenizer.
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
    """Return a function from tokens of a ``tokenizer.json`` to their bytes."""
    anchor, alphabet = _anchor(tokenizer), _byte_level_alphabet()
    before = tokenizer.decode(anchor)
    byte_level = _is_byte_level(tokenizer, alphabet)

    def read(token: int) -> bytes:
        piece = tokenizer.piece(token)
        byte = BYTE_PIECE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        if byte_level and all(c in alphabet for c in piece):
            return bytes(alphabet[c] for c in piece)
        text = tokenizer.decode([*anchor, token]) if piece else ""
        return text[len(before) :].encode() if text.startswith(before) else b""

    return read


def _anchor(tokenizer: Tokenizer) -> list[int]:
    """Return ids of a text whose decoding does not depend on the tokens after it."""
    for text in _ANCHORS:
        ids = tokenizer.encode(text)
        if ids and tokenizer.decode(ids).strip() == text:
            return ids
    return []


def _is_byte_level(tokenizer: Tokenizer, alphabet: dict[str, int]) -> bool:
    """Return whether pieces use the alphabet of byte-level BPE, where a space is U+0120."""
    space = next(c for c, byte in alphabet.items() if byte == 0x20)
    return tokenizer.token_id(space) is not None and tokenizer.token_id("\u010a") is not None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's character -> byte; printable bytes are themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
