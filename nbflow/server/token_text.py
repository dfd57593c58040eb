"""Text, bytes and offsets of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.tokenization import Tokenizer
from nbflow.tokenization.token_bytes import vocabulary_bytes


class NoText:
    """Detokenizer of a model without a tokenizer: empty text."""

    stopped: str | None = None

    def push(self, token: int) -> str:
        """Return nothing."""
        return ""

    def finish(self) -> str:
        """Return nothing."""
        return ""


class Offsets:
    """Character offsets of tokens in their text.

    The tokens `before` precede the text; without a tokenizer the text is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, before: Sequence[int] = ()) -> None:
        self._stream = None if tokenizer is None else tokenizer.decode_stream()
        self._length = 0
        self._n_tokens = 0 if tokenizer is None else tokenizer.vocab_size
        if tokenizer is not None and self._stream is not None:
            for token in tokenizer.known(before):
                self._stream.push(token)

    def __call__(self, token: int) -> int:
        """Return the offset of the next token."""
        offset = self._length
        if self._stream is not None and token < self._n_tokens:
            self._length += len(self._stream.push(token))
        return offset


class TokenTexts:
    """Cached text of single tokens in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # encoded here, not later: a worker may hold the tokenizer while it encodes a long text
        self._anchor = [] if tokenizer is None else tokenizer.encode("a")
        """Tokens of a letter, decoded first so that no token begins a text."""

    def __call__(self, token: int) -> str:
        """Return the text of a token inside a text; "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        if token not in self._known:
            self._known[token] = self._spell(self._tokenizer, token)
        return self._known[token]

    def _spell(self, tokenizer: Tokenizer, token: int) -> str:
        if token >= tokenizer.vocab_size:  # the head may have more rows than the vocabulary
            return f"token_id:{token}"
        stream = tokenizer.decode_stream()
        for before in self._anchor:
            stream.push(before)
        text = stream.push(token) + stream.finish()
        return text or tokenizer.piece(token)

    def utf8(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None for a special or unknown token."""
        if self._tokenizer is None or token >= self._tokenizer.vocab_size:
            return None
        known = vocabulary_bytes(self._tokenizer)[token]
        return None if known is None else list(known)
