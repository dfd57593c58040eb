"""Base of tokenizers whose vocabulary is a list of pieces, each of which stands for bytes."""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby

from nbflow.tokenization.special_tokens import SpecialIds
from nbflow.tokenization.tokenizer import Tokenizer, TokenSplitter, check_text


class ByteVocabularyTokenizer(Tokenizer):
    """Vocabulary, decoding and special tokens; a subclass encodes plain text.

    `piece_bytes` are the bytes of each id in a text, empty for control pieces.  `special_tokens`
    are recognized on request, `user_defined` tokens always, before the text is split.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        piece_bytes: Sequence[bytes],
        special: SpecialIds,
        special_tokens: Mapping[str, int] | None = None,
        user_defined: Mapping[str, int] | None = None,
    ) -> None:
        self._pieces = list(pieces)
        self._bytes = list(piece_bytes)
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        self._special = special
        self._user_defined = TokenSplitter(user_defined or {})
        self.vocab_size = len(self._pieces)
        self.bos_id = special.bos
        self.eos_ids = special.eos
        self.special_tokens = dict(special_tokens or {})

    @property
    def special_ids(self) -> SpecialIds:
        """Special ids, and those around a text."""
        return self._special

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""

    def encode(
        self, text: str, add_special_tokens: bool = False, parse_special: bool = False
    ) -> list[int]:
        """See `Tokenizer.encode`; user-defined tokens are always recognized."""
        check_text(text)
        ids = self.encode_parts(self.split_special(text) if parse_special else [text])
        return self._special.around(ids) if add_special_tokens else ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Tokenizer.encode_parts`."""
        ids: list[int] = []
        for is_text, run in groupby(self._split(parts), lambda part: isinstance(part, str)):
            if is_text:
                ids += self._encode(check_text("".join(map(str, run))))
            else:
                ids += [self.check_id(int(part)) for part in run]
        return ids

    def _split(self, parts: Sequence[str | int]) -> list[str | int]:
        """Return `parts` with user-defined tokens as ids."""
        found: list[str | int] = []
        for part in parts:
            found += self._user_defined.split(part) if isinstance(part, str) else [part]
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        stream = self.decode_stream()
        return "".join([*(stream.push(i) for i in ids), stream.finish()])

    def decode_stream(self) -> ByteStream:
        """See `Tokenizer.decode_stream`."""
        return ByteStream(self.piece_bytes)

    def piece(self, token_id: int) -> str:
        """See `Tokenizer.piece`."""
        return self._pieces[self.check_id(token_id)]

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id; empty for a control piece."""
        return self._bytes[self.check_id(token_id)]

    def token_id(self, token: str) -> int | None:
        """See `Tokenizer.token_id`."""
        return self._ids.get(token)


class ByteStream:
    """Incremental UTF-8 decoder of ids; see `nbflow.tokenization.DecodeStream`.

    `prefix` is removed once from the beginning of the text; with `repeatedly`, from each piece
    until there is text.  Nothing is removed from the ids `kept`.
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
        """Return the incomplete rest."""
        return self._utf8.decode(b"", final=True)
