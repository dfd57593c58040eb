"""SentencePiece byte-pair encoding from a table of pieces and scores, as GGUF files hold it.

Spaces are U+2581 in the pieces.  A space is put in front of the text, and after each special token
(`add_space_prefix`).  A character that is no piece is written as its bytes, ``<0x0A>``.

Control pieces such as ``<s>`` are never the result of merging, as in SentencePiece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbflow.tokenizer.merging import Merger
from nbflow.tokenizer.pieces import BytesStream, PieceTokenizer
from nbflow.tokenizer.special_ids import SpecialIds
from nbflow.tokenizer.tokenizer import encode_runs
from nbflow_kernels.errors import UsageError

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
"""Types of pieces, as SentencePiece and GGUF number them."""

SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SpmTokenizer(PieceTokenizer):
    """Byte-pair encoding by score.

    Parameters
    ----------
    pieces : list of str
        One per id.
    scores : list of float
        One per id.
    types : list of int
        One per id: `NORMAL`, `CONTROL`, ...
    special : SpecialIds
        Special ids, and which of them go around a text.
    add_space_prefix : bool
        Whether a space goes in front.
    swallow : frozenset of int
        Ids that swallow the white space behind them.
    where : str
        The file, for messages.

    Raises
    ------
    UsageError
        If a byte piece is not spelt like one.
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
        self._pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        self._special = special
        self._prefix = " " if add_space_prefix else ""
        self._swallow = swallow
        wanted = (NORMAL, USER_DEFINED, UNUSED)
        text = [i for i, kind in enumerate(types) if kind in wanted]
        self._text_ids = {pieces[i]: i for i in text}
        self._merger = Merger({pieces[i]: scores[i] for i in text})
        self._byte_ids: dict[int, int] = {}
        self._bytes = []
        for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
            self._bytes.append(self._as_bytes(i, piece, kind, where))
        self._special_tokens = {
            pieces[i]: i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)
        }
        self._user_defined = {
            pieces[i]: i for i, kind in enumerate(types) if kind == USER_DEFINED and pieces[i]
        }
        spelt = sorted(self._user_defined, key=len, reverse=True)
        self._user_pattern = re.compile(f"({'|'.join(map(re.escape, spelt))})") if spelt else None
        self.chat_templates = {}
        self.named_tokens = {}

    def _as_bytes(self, i: int, piece: str, kind: int, where: str) -> bytes:
        """Return what a piece stands for, nothing for control pieces; note byte pieces."""
        if kind in (CONTROL, UNKNOWN):
            return b""
        if kind != BYTE:
            spelt = piece if kind == USER_DEFINED else piece.replace(SPACE, " ")
            return spelt.encode("utf-8", "surrogateescape")
        match = _BYTE_PIECE.fullmatch(piece)
        if not match:
            raise UsageError(f"{where}: byte piece {i} must be <0x00>..<0xFF>, got {piece!r:.40}")
        byte = int(match[1], 16)
        self._byte_ids.setdefault(byte, i)
        return bytes([byte])

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Tokenizer.encode_parts`."""
        cut: list[str | int] = []
        for part in parts:
            for piece in self._split_user_defined(part) if isinstance(part, str) else [part]:
                if isinstance(piece, str) and cut and cut[-1] in self._swallow:
                    piece = piece.lstrip(" \t\n\r\f\v")
                cut.append(piece)
        return encode_runs(cut, self._encode, self.check_id)

    def _split_user_defined(self, text: str) -> list[str | int]:
        """Return `text` cut at the pieces that a user has defined, the longest first."""
        if self._user_pattern is None:
            return [text]
        found = self._user_pattern.split(text)
        return [self._user_defined[part] if i % 2 else part for i, part in enumerate(found) if part]

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        if not text:
            return []
        ids: list[int] = []
        for piece in self._merger.split((self._prefix + text).replace(" ", SPACE)):
            known = self._text_ids.get(piece)
            ids += self._fallback(piece) if known is None else [known]
        return ids

    def _fallback(self, character: str) -> list[int]:
        """Return the bytes of a character that is no piece, or the unknown id."""
        data = character.encode("utf-8")
        if all(byte in self._byte_ids for byte in data):
            return [self._byte_ids[byte] for byte in data]
        if self._special.unknown is None:
            raise UsageError(
                f"the vocabulary has no piece for {character!r}, no bytes and no unknown id"
            )
        return [self._special.unknown]

    def decode_stream(self) -> BytesStream:
        """See `Tokenizer.decode_stream`."""
        return BytesStream(self.piece_bytes, self._prefix.encode())
