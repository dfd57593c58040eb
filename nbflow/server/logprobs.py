"""Log-probabilities in the forms of OpenAI's chat and completion endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nbflow.engine.outputs import TokenOutput
from nbflow.engine.request import TopLogprobs
from nbflow.server.served_model import ServedModel

_LEAST = -9999.0  # what OpenAI writes for "never"; JSON has no infinity


def number(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return _LEAST if math.isinf(logprob) or math.isnan(logprob) else logprob


def spell(served: ServedModel, token: int, as_id: bool) -> str:
    """Return a token's text, or ``token_id:123``."""
    return f"token_id:{token}" if as_id else served.spell(token)


def for_chat(
    served: ServedModel, tokens: Sequence[TokenOutput], n_top: int, as_ids: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spell(served, token, as_ids),
            "logprob": number(logprob),
            "bytes": served.spell.utf8(token),
        }

    content = [
        {
            **one(e.token, e.logprob),
            "top_logprobs": [one(t, x) for t, x in (e.top_logprobs or ())[:n_top]],
        }
        for e in tokens
        if e.token is not None
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a completion choice, entry by entry."""

    def __init__(self, served: ServedModel, n_top: int, as_ids: bool) -> None:
        self._served, self._n_top, self._as_ids = served, n_top, as_ids
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token: int, logprob: float | None, top: TopLogprobs, offset: int) -> None:
        """Add a token with its alternatives; the first one of a prompt has no log-probability."""
        name = spell(self._served, token, self._as_ids)
        self._tokens.append(name)
        self._offsets.append(offset)
        if logprob is None:
            self._logprobs.append(None)
            self._top.append(None)
            return
        self._logprobs.append(number(logprob))
        best: dict[str, float] = {}
        for other, value in top[: self._n_top]:  # of equal texts the most probable stays
            best.setdefault(spell(self._served, other, self._as_ids), number(value))
        if self._n_top:
            best.setdefault(name, number(logprob))
        self._top.append(best)

    def body(self) -> dict[str, Any]:
        """Return the object."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top if self._n_top else None,
            "text_offset": self._offsets,
        }


def of_prompt(
    served: ServedModel,
    prompt: Sequence[int],
    results: Sequence[tuple[float, TopLogprobs]],
    n_top: int,
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token its own and the most probable ones."""
    rows: list[dict[str, Any] | None] = [None]
    for token, (logprob, top) in zip(prompt[1:], results, strict=False):
        known = {t: (i + 1, x) for i, (t, x) in enumerate(top[:n_top])}
        known.setdefault(token, (None, logprob))  # type: ignore[arg-type]
        rows.append(
            {
                str(t): {"logprob": number(x), "rank": rank, "decoded_token": served.spell(t)}
                for t, (rank, x) in known.items()
            }
        )
    return rows
