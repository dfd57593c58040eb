"""Tokenizers whose vocabulary is a list of pieces, each of which stands for bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Mapping

from nbflow.tokenization.special_tokens import SpecialIds
from nbflow.tokenization.tokenizer import Tokenizer, check_text


class PieceTokenizer(Tokenizer):
    """What they share; a subclass sets the fields and encodes parts."""

    _pieces: list[str]
    """Spelling of each id."""
    _bytes: list[bytes]
    """What each id stands for in a text."""
    _ids: dict[str, int]
    """Spelling to id."""
    _special: SpecialIds
    _special_tokens: dict[str, int]

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self._pieces)

    @property
    def bos_id(self) -> int | None:
        """Id at the beginning of a sequence, or None."""
        return self._special.bos

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        return self._special.eos

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Control pieces, and added tokens that are special."""
        return self._special_tokens

    def encode(
        self, text: str, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        """See `Tokenizer.encode`; tokens that a user has added are always recognised."""
        check_text(text)
        ids = self.encode_parts(self.split_special(text) if parse_special else [text])
        return self._special.around(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        stream = self.decode_stream()
        return "".join([*(stream.push(i) for i in ids), stream.finish()])

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`."""
        return self._pieces[self.check_id(token_id)]

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes an id stands for; none for a control piece."""
        return self._bytes[self.check_id(token_id)]

    def token_id(self, token: str) -> int | None:
        """See `Tokenizer.token_id`."""
        return self._ids.get(token)


class BytesStream:
    """Decodes ids that stand for bytes; see `nbflow.tokenization.DecodeStream`.

    Parameters
    ----------
    piece_bytes : callable
        The bytes of an id.
    prefix : bytes
        Removed once from the beginning of the text.
    repeatedly : bool
        Removed from each piece until there is text.
    kept : container of int
        Ids from which nothing is removed.
    """

    def __init__(
        self,
        piece_bytes: Callable[[int], bytes],
        prefix: bytes = b"",
        *,
        repeatedly: bool = False,
        kept: Container[int] = (),
    ) -> None:
        self._piece_bytes = piece_bytes
        self._prefix = prefix
        self._repeatedly = repeatedly
        self._kept = kept
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        data = self._piece_bytes(token_id)
        if data and self._prefix:
            data = data if token_id in self._kept else data.removeprefix(self._prefix)
            if data or not self._repeatedly:
                self._prefix = b""
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what is left."""
        return self._utf8.decode(b"", final=True)
