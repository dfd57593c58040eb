"""Stop texts: detokenize requests that have some, and finish them at a match."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbflow.engine.detokenizer import IncrementalDetokenizer
from nbflow.engine.outputs import RequestDelta
from nbflow.engine.request import Request
from nbflow.tokenization import Tokenizer


class StopChecker:
    """Incremental detokenizers of the requests with stop texts.

    `tokenizer` is called for each such request: a model may have none.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[Request, IncrementalDetokenizer] = {}
        self._texts: dict[Request, list[str]] = {}

    def check(self, deltas: Sequence[RequestDelta]) -> list[Request]:
        """Fill in the text of new tokens; truncate requests after a stop text.

        Return the requests to end on the workers: those with a match, and those whose tokens could
        not be detokenized, which have failed.
        """
        found = []
        for delta in deltas:
            request = delta.request
            if not request.stop_texts:
                continue
            runs = request.finish_reason is None
            try:
                self._detokenize(delta)
            except Exception as error:  # fails this request only
                request.fail(error)
            if runs and request.finish_reason is not None:
                found.append(request)
            if request.finish_reason is not None:
                self._drop(request)
        return found

    def finish(self, request: Request) -> str | None:
        """Drop a request and return the text held back."""
        stream = self._streams.get(request)
        if stream is None:
            return None
        held = stream.finish()
        self._texts[request].append(held)
        self._drop(request)
        return held

    def _drop(self, request: Request) -> None:
        """Drop the detokenizer of a finished request, which keeps its text."""
        if self._streams.pop(request, None) is not None:
            request.text = "".join(self._texts.pop(request))

    def _detokenize(self, delta: RequestDelta) -> None:
        request = delta.request
        if request not in self._streams:
            self._streams[request] = IncrementalDetokenizer(
                self._tokenizer(), request.stop_texts, request.include_stop_text,
                request.text_before,
            )  # fmt: skip
            self._texts[request] = []
        stream, texts = self._streams[request], self._texts[request]
        for n, output in enumerate(delta.tokens, 1):
            assert output.token is not None
            output.offset = stream.n_characters
            output.text = stream.push(output.token)
            texts.append(output.text)
            if stream.stopped is not None:
                delta.truncate(len(delta.tokens) - n)
                break
        if request.finish_reason in ("stop", "length"):
            delta.held_text = stream.finish()
            texts.append(delta.held_text)
        if stream.stopped is not None:
            request.finish_reason, request.stop_reason = "stop", stream.stopped
