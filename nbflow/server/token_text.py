"""Text and bytes of single tokens."""

from __future__ import annotations

from nbflow.tokenization import Tokenizer
from nbflow.tokenization.token_bytes import vocabulary_bytes


class NoText:
    """Detokenizer of a model without a tokenizer: empty text."""

    stopped: str | None = None
    n_characters = 0

    def push(self, token: int) -> str:
        """Return nothing."""
        return ""

    def finish(self) -> str:
        """Return nothing."""
        return ""


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
