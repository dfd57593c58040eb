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

from nbflow.tokenization.byte_pieces import BytesStream, PieceTokenizer
from nbflow.tokenization.package_errors import package_errors
from nbflow.tokenization.special_tokens import SpecialIds
from nbflow.tokenization.tokenizer import encode_runs
from nbflow_kernels.errors import UsageError

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
"""Types of pieces, as SentencePiece and GGUF number them."""

SPACE = "\u2581"
_LONGEST_MERGED = 256  # characters; published pieces of text have up to 100
_UNKNOWN_PIECE = "<neither a piece nor bytes>"
_NO_UNKNOWN = (1 << 32) - 1  # id of a character that the vocabulary cannot write
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
        self._where = where
        self._byte_ids: dict[int, int] = {}
        self._bytes = []
        for i, (piece, kind) in enumerate(zip(pieces, types, strict=True)):
            self._bytes.append(self._as_bytes(i, piece, kind, where))
        text = {p: i for i, p in enumerate(pieces) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
        self._bpe = score_bpe(
            text, {p: scores[i] for p, i in text.items()}, self._byte_ids, special.unknown, SPACE
        )
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
        with package_errors(f"{self._where}: cannot encode the text"):
            ids: list[int] = self._bpe.encode((self._prefix + text).replace(" ", SPACE)).ids
        if ids and max(ids) >= len(self._pieces):
            raise UsageError(
                f"{self._where}: the vocabulary has neither a piece nor bytes for a character of "
                "the text, and no unknown token"
            )
        return ids

    def decode_stream(self) -> BytesStream:
        """See `Tokenizer.decode_stream`."""
        return BytesStream(self.piece_bytes, self._prefix.encode())


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

    Parameters
    ----------
    ids : mapping of str to int
        Pieces of text.
    scores : mapping of str to float
        Score of each piece that may be the result of a merge.
    byte_ids : mapping of int to int
        Ids of the bytes that write a character without a piece.
    unknown : int or None
        Id of a character that has neither; by default an id behind all others.
    space : str
        How the pieces spell a space.

    Returns
    -------
    tokenizers.Tokenizer
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = []
    merged = [piece for piece in scores if len(piece) <= _LONGEST_MERGED]
    for piece in sorted(merged, key=lambda piece: (-scores[piece], ids[piece])):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    vocab = {**ids, **{f"<0x{byte:02X}>": i for byte, i in byte_ids.items()}}
    vocab[_UNKNOWN_PIECE] = _NO_UNKNOWN if unknown is None else unknown
    result = Tokenizer(models.BPE(vocab, merges, unk_token=_UNKNOWN_PIECE, byte_fallback=True))
    if not any(space in piece.lstrip(space) for piece in ids):
        # no merge spans the beginning of a word: words are merged one by one, and cached
        words = Regex(f"{space}+[^{space}]*")
        result.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    return result
