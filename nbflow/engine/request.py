"""A request: what is asked for and how far it has come.  Plain Python, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nbflow.decoding import Strategy


@dataclass
class Request:
    """One sequence to be continued."""

    prompt: list[int]
    """Token ids given."""
    max_tokens: int
    """At most this many new tokens."""
    strategy: Strategy
    """How the next token is chosen."""
    seed: int = 0
    """Seed of the draws; the n-th new token uses draw n."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sequence."""
    encoder_ids: list[int] | None = None
    """Token ids for the encoder, if the model has one."""
    wants_logprobs: bool = True
    """Whether the log-probabilities of the new tokens are wanted; without them they are NaN."""
    ids: list[int] = field(default_factory=list)
    """New tokens so far, the one that ended the sequence not among them."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of the probability of each new token under the model (temperature 1)."""
    n_done: int = 0
    """Tokens of prompt and continuation whose keys and values are in the cache."""
    finish_reason: Literal["stop", "length"] | None = None
    """Why it ended; None while it runs."""

    @property
    def pending(self) -> list[int]:
        """Return the tokens that have not been run yet."""
        n_prompt = len(self.prompt)
        if self.n_done < n_prompt:
            return self.prompt[self.n_done :] + self.ids
        return self.ids[self.n_done - n_prompt :]

    def accept(self, token: int, logprob: float) -> None:
        """Take the next token."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if len(self.ids) >= self.max_tokens:
            self.finish_reason = "length"
