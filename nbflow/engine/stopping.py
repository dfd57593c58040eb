"""Looks for stop texts while several requests run."""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.engine.outcome import Output
from nbflow.engine.request import Request
from nbflow.engine.text_stream import TextStream
from nbflow.tokenizer import Tokenizer


class Stopping:
    """The texts of the requests that have stop texts.

    Parameters
    ----------
    requests : sequence of Request
        The requests.
    tokenizer : Tokenizer or None
        The model's; needed if one of them has a stop text.
    """

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer | None) -> None:
        self._streams = {
            r.id: TextStream(tokenizer, r.stop_texts, r.include_stop_text)
            for r in requests
            if r.stop_texts and tokenizer is not None
        }

    def look(self, outputs: Sequence[Output]) -> list[Request]:
        """Cut outputs and requests after the token that completes a stop text.

        Returns
        -------
        list of Request
            Those that had one and have not ended by themselves.
        """
        found = []
        for output in outputs:
            request, stream = output.request, self._streams.get(output.request.id)
            if stream is None:
                continue
            for n, token in enumerate(output.tokens, 1):
                stream.push(token)
                if stream.stopped is not None:
                    if request.finish_reason is None:
                        found.append(request)
                    self._cut(output, len(output.tokens) - n)
                    request.finish_reason = "stop"
                    break
        return found

    def _cut(self, output: Output, n: int) -> None:
        """Take away the last `n` tokens, which came in the same go."""
        if n:
            request = output.request
            for values in (
                output.tokens, output.logprobs, output.top_logprobs,
                request.ids, request.logprobs, request.top_logprobs,
            ):  # fmt: skip
                del values[-n:]
