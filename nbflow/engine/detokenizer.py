"""New tokens as text while they come: whole characters only, and up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.tokenization import Tokenizer


class IncrementalDetokenizer:
    """ModelLock tokens into text, holds back what may be the beginning of a stop text.

    The pieces that are returned, put together, are the text of the tokens up to the first stop
    text, wherever the borders of the tokens are.

    Parameters
    ----------
    tokenizer : Tokenizer
        The model's.
    stop : sequence of str
        Texts that end the output; the one that is complete first ends it, and of those complete at
        the same character the longest.
    include_stop : bool
        Whether the stop text belongs to the output.
    prompt_ids : sequence of int
        Tokens before the first new one, so that a space after them is not lost.

    Examples
    --------
    >>> import nbflow
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> stream = TextStream(tokenizer, stop=["(x"])
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
        for token in prompt_ids:
            self._decoder.push(token)
        self._stop = [text for text in stop if text]
        self._include = include_stop
        self._held = ""
        self._finished = False
        self.stopped: str | None = None
        """The stop text that came, if one did."""

    def push(self, token: int) -> str:
        """Return the text that is certain after one more token; empty after a stop text."""
        if self._finished:
            return ""
        return self._add(self._decoder.push(token))

    def finish(self) -> str:
        """Return what was held back; there is no more."""
        if self._finished:
            return ""
        text = self._add(self._decoder.finish())
        if self._finished:  # what was left completed a stop text
            return text
        self._finished = True
        rest, self._held = self._held, ""
        return text + rest

    def _add(self, text: str) -> str:
        """Return what is certain of the text held back and this."""
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
        """Return place and text of the stop text that is complete first, not within `seen`."""
        best: tuple[int, int, str] | None = None
        for text in self._stop:
            start = self._held.find(text, max(0, seen - len(text) + 1))
            if start >= 0:
                ends = start + len(text), start, text
                best = ends if best is None else min(best, ends)
        return None if best is None else (best[1], best[2])

    def _partial(self) -> int:
        """Return how many of the last characters may begin a stop text."""
        most = 0
        for text in self._stop:
            for n in range(min(len(text) - 1, len(self._held)), most, -1):
                if self._held.endswith(text[:n]):
                    most = n
                    break
        return most
