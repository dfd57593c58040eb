"""Looks for stop texts while several requests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbflow.engine.outcome import Output
from nbflow.engine.request import Request
from nbflow.engine.text_stream import TextStream
from nbflow.tokenizer import Tokenizer


class Stopping:
    """The texts of the requests that have stop texts.

    Parameters
    ----------
    tokenizer : callable
        Returns the model's tokenizer; called if a request has a stop text.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[Request, TextStream] = {}

    def look(self, outputs: Sequence[Output]) -> list[Request]:
        """Cut outputs and requests after the token that completes a stop text.

        Returns
        -------
        list of Request
            Those that had one and have not ended by themselves, and those whose tokens have no
            text, which have failed.
        """
        found = []
        for output in outputs:
            request = output.request
            if not request.stop_texts:
                continue
            runs = request.finish_reason is None
            try:
                if self._has_stopped(output):
                    request.finish_reason = "stop"
            except Exception as error:  # the tokenizer's; the others have no part in it
                request.fail(error)
            if runs and request.finish_reason is not None:
                found.append(request)
            if request.finish_reason is not None:
                self.forget(request)
        return found

    def forget(self, request: Request) -> None:
        """Forget the text of a request."""
        self._streams.pop(request, None)

    def _has_stopped(self, output: Output) -> bool:
        request = output.request
        if request not in self._streams:
            self._streams[request] = TextStream(
                self._tokenizer(), request.stop_texts, request.include_stop_text
            )
        stream = self._streams[request]
        for n, token in enumerate(output.tokens, 1):
            stream.push(token)
            if stream.stopped is not None:
                self._cut(output, len(output.tokens) - n)
                return True
        return False

    def _cut(self, output: Output, n: int) -> None:
        """Take away the last `n` tokens, which came in the same go."""
        if n:
            request = output.request
            for values in (
                output.tokens, output.logprobs, output.top_logprobs,
                request.ids, request.logprobs, request.top_logprobs,
            ):  # fmt: skip
                del values[-n:]
