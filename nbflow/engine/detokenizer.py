"""Incremental detokenization with stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.tokenization import Tokenizer


class IncrementalDetokenizer:
    """Streaming detokenizer that holds back a possible prefix of a stop text.

    The concatenated output is the text up to the first stop text, independent of token boundaries.

    Parameters
    ----------
    tokenizer : Tokenizer
        The model's.
    stop : sequence of str
        Texts that end the output.  The first complete match wins; of matches that end at the same
        character, the longest.
    include_stop : bool
        True to keep the stop text in the output.
    prompt_ids : sequence of int
        Tokens before the first new one, which decide about a leading space.

    Examples
    --------
    >>> import nbflow
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> stream = IncrementalDetokenizer(tokenizer, stop=["(x"])
    >>> "".join(stream.push(i) for i in tokenizer.encode("def f(x): pass")), stream.stopped
    ('def f', '(x')
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._decoder = tokenizer.decode_stream()
        self._n_tokens = tokenizer.vocab_size
        for token in tokenizer.known(prompt_ids):
            self._decoder.push(token)
        self._stop = [text for text in stop if text]
        self._include = include_stop
        self._held = ""
        self._finished = False
        self.n_characters = 0
        """Characters of the tokens so far: the offset of the next one in the text."""
        self.stopped: str | None = None
        """The matched stop text, or None."""

    def push(self, token: int) -> str:
        """Add a token and return the text that can be released; empty after a stop text.

        An id without a token has no text.
        """
        if self._finished or token >= self._n_tokens:
            return ""
        text = self._decoder.push(token)
        self.n_characters += len(text)
        return self._add(text)

    def finish(self) -> str:
        """Flush the text held back."""
        if self._finished:
            return ""
        text = self._add(self._decoder.finish())
        if self._finished:  # the flushed text completed a stop text
            return text
        self._finished = True
        rest, self._held = self._held, ""
        return text + rest

    def _add(self, text: str) -> str:
        """Append text and return the part that can be released."""
        seen = len(self._held)
        self._held += text
        found = self._find(seen)
        if found is not None:
            start, self.stopped = found
            end = start + len(self.stopped) if self._include else start
            self._finished = True
            return self._held[:end]
        keep = self._partial()
        certain, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * (keep > 0)
        return certain

    def _find(self, seen: int) -> tuple[int, str] | None:
        """Return position and text of the first match that ends after `seen` characters."""
        best: tuple[int, int, str] | None = None
        for text in self._stop:
            start = self._held.find(text, max(0, seen - len(text) + 1))
            if start >= 0:
                ends = start + len(text), start, text
                best = ends if best is None else min(best, ends)
        return None if best is None else (best[1], best[2])

    def _partial(self) -> int:
        """Return the length of the longest suffix that is a prefix of a stop text."""
        most = 0
        for text in self._stop:
            for n in range(min(len(text) - 1, len(self._held)), most, -1):
                if self._held.endswith(text[:n]):
                    most = n
                    break
        return most
