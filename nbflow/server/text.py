"""From tokens to text as it is sent: whole characters, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from nbflow.tokenizer import Tokenizer

_CONTEXT = 8  # tokens of the prompt that decide how the first new one is spelt


class TextBuilder:
    """The text of a continuation, token by token.

    Text is held back while it may be the beginning of a stop text, and while the bytes of a
    character are incomplete; the pieces together are the text.

    Parameters
    ----------
    tokenizer : Tokenizer or None
        Without one the text is empty.
    stops : sequence of str
        Texts that end it.
    include_stop : bool
        Whether the stop text is part of it.
    before : sequence of int
        Tokens that it continues; they are not part of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        before: Sequence[int] = (),
    ) -> None:
        self._stream = None if tokenizer is None else tokenizer.decode_stream()
        self._stops = list(stops)
        self._include_stop = include_stop
        self._held = ""
        self.length = 0
        """Characters so far, those held back among them."""
        self.stopped: str | None = None
        """The stop text that was found; no token is wanted after it."""
        if self._stream is not None:
            for token in before[-_CONTEXT:]:
                self._stream.push(token)

    def push(self, token: int) -> str:
        """Return the text that `token` makes certain."""
        return "" if self._stream is None else self._take(self._stream.push(token))

    def finish(self) -> str:
        """Return what is left."""
        if self._stream is None or self.stopped is not None:
            return ""
        text = self._take(self._stream.finish())
        if self.stopped is not None:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _take(self, new: str) -> str:
        self._held += new
        self.length += len(new)
        if not self._stops:
            text, self._held = self._held, ""
            return text
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        found = [item for item in found if item[0] >= 0]
        if found:
            start, _, self.stopped = min(found)
            end = start + (len(self.stopped) if self._include_stop else 0)
            self.length -= len(self._held) - end
            text, self._held = self._held[:end], ""
            return text
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


class TokenTexts:
    """How single tokens are shown in log-probabilities; remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return the text of a token as it is in the middle of a text; "" without a tokenizer."""
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

    @cached_property
    def _anchor(self) -> list[int]:
        """Tokens of a letter, so that what follows is not the beginning of a text."""
        assert self._tokenizer is not None
        return self._tokenizer.encode("a")

    def utf8(self, token: int) -> list[int] | None:
        """Return the bytes of a token; None for a part of a character, which is no text."""
        pieces: Any = getattr(self._tokenizer, "piece_bytes", None)
        if pieces is not None:
            return list(pieces(token))
        text = self(token)
        return None if "\ufffd" in text else list(text.encode())
