"""SentencePiece byte-pair encoding from a table of pieces and scores, as GGUF files hold it.

Spaces are U+2581 in the pieces.  A space is put in front of the text, and after each special token
(`add_space_prefix`).  A character without a piece is written as its bytes, ``<0x0A>``.

SentencePiece joins the neighbours that form the piece of highest score.  `score_bpe` writes this
rule as a list of merges for the ``tokenizers`` package: the higher the score of a piece, the
earlier its merges; pieces with the same score follow in the order of their ids.  Control pieces
such as ``<s>`` are never the result of merging.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nbflow.tokenization.byte_vocabulary import ByteStream, ByteVocabularyTokenizer
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.special_tokens import SpecialIds
from nbflow_kernels.errors import UsageError

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
"""Piece types, numbered as in SentencePiece and GGUF."""

SPACE = "\u2581"
_LONGEST_MERGED = 256  # characters; published pieces of text have up to 100
_UNKNOWN_PIECE = "<neither a piece nor bytes>"
_NO_UNKNOWN = (1 << 32) - 1  # id of a character that the vocabulary cannot write
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Spelling of a piece that stands for one byte."""


class SpmTokenizer(ByteVocabularyTokenizer):
    """Byte-pair encoding by score.

    Types are `NORMAL`, `CONTROL`, ...; the ids `swallow` remove the white space after them.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        special: SpecialIds,
        *,
        add_space_prefix: bool = True,
        swallow: frozenset[int] = frozenset(),
        where: str = "vocabulary",
    ) -> None:
        self._prefix = " " if add_space_prefix else ""
        self._swallow = swallow
        self._where = where
        data = [_as_bytes(i, pieces[i], kind, where) for i, kind in enumerate(types)]
        control = {pieces[i]: i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
        user = {pieces[i]: i for i, kind in enumerate(types) if kind == USER_DEFINED}
        super().__init__(pieces, data, special, control, user)
        text = {p: i for i, p in enumerate(pieces) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
        byte_ids: dict[int, int] = {}
        for i, kind in enumerate(types):
            if kind == BYTE:
                byte_ids.setdefault(data[i][0], i)
        self._bpe = score_bpe(
            text, {p: scores[i] for p, i in text.items()}, byte_ids, special.unknown, SPACE
        )

    def _split(self, parts: Sequence[str | int]) -> list[str | int]:
        """Return `parts` with user-defined tokens as ids, without swallowed white space."""
        found = super()._split(parts)
        return [
            part.lstrip(" \t\n\r\f\v")
            if i and isinstance(part, str) and found[i - 1] in self._swallow
            else part
            for i, part in enumerate(found)
        ]

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        if not text:
            return []
        with package_errors(f"{self._where}: cannot encode the text"):
            ids: list[int] = self._bpe.encode((self._prefix + text).replace(" ", SPACE)).ids
        if ids and max(ids) >= self.vocab_size:
            raise UsageError(
                f"{self._where}: the vocabulary has neither a piece nor bytes for a character of "
                "the text, and no unknown token"
            )
        return ids

    def decode_stream(self) -> ByteStream:
        """See `Tokenizer.decode_stream`."""
        return ByteStream(self.piece_bytes, self._prefix.encode())


def _as_bytes(i: int, piece: str, kind: int, where: str) -> bytes:
    """Return the bytes of a piece, empty for control pieces."""
    if kind in (CONTROL, UNKNOWN):
        return b""
    if kind != BYTE:
        text = piece if kind == USER_DEFINED else piece.replace(SPACE, " ")
        return text.encode("utf-8", "surrogateescape")
    match = BYTE_PIECE.fullmatch(piece)
    if not match:
        raise UsageError(f"{where}: byte piece {i} must be <0x00>..<0xFF>, got {piece!r:.40}")
    return bytes([int(match[1], 16)])


def score_bpe(
    ids: Mapping[str, int],
    scores: Mapping[str, float],
    byte_ids: Mapping[int, int],
    unknown: int | None,
    space: str,
) -> Any:
    """Return a BPE tokenizer of the ``tokenizers`` package that merges by score.

    Among equal scores, SentencePiece joins the leftmost neighbours first, the package the piece
    of the lower id.  Published vocabularies have equal scores for runs of spaces only (Llama 2),
    where both orders give the same ids.

    `scores` has the pieces that a merge may produce, `byte_ids` the bytes of a character without a
    piece, `unknown` the id of one without bytes (None: an id after all others); `space` stands for
    a space in pieces.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = []
    merged = [piece for piece in scores if len(piece) <= _LONGEST_MERGED]
    for piece in sorted(merged, key=lambda piece: (-scores[piece], ids[piece])):
        known = [
            (left, right)
            for i in range(1, len(piece))
            if (left := piece[:i]) in ids and (right := piece[i:]) in ids
        ]
        if len(known) > 1:
            known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += known
    vocab = {**ids, **{f"<0x{byte:02X}>": i for byte, i in byte_ids.items()}}
    vocab[_UNKNOWN_PIECE] = _NO_UNKNOWN if unknown is None else unknown
    result = Tokenizer(models.BPE(vocab, merges, unk_token=_UNKNOWN_PIECE, byte_fallback=True))
    if not any(space in piece.lstrip(space) for piece in ids):
        # no merge spans the beginning of a word: words are merged one by one, and cached
        words = Regex(f"{space}+[^{space}]*")
        result.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    return result
