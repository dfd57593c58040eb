"""A request: what is asked for and how far it has come.  Plain Python, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nbflow.decoding import State, Strategy


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
    n_top_logprobs: int = 0
    """How many of the most probable tokens are reported with each new token."""
    ids: list[int] = field(default_factory=list)
    """New tokens so far, the one that ended the sequence not among them."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of the probability of each new token under the model (temperature 1)."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token the most probable ones, (id, log-probability)."""
    n_done: int = 0
    """Tokens of prompt and continuation whose keys and values are in the cache."""
    finish_reason: Literal["stop", "length"] | None = None
    """Why it ended; None while it runs."""
    state: State | None = None
    """What the strategy remembers, if it remembers something; on the rank that draws."""
    n_seen: int = 0
    """How many of `ids` the state knows."""

    @property
    def pending(self) -> list[int]:
        """Return the tokens that have not been run yet."""
        n_prompt = len(self.prompt)
        if self.n_done < n_prompt:
            return self.prompt[self.n_done :] + self.ids
        return self.ids[self.n_done - n_prompt :]

    def accept(
        self, token: int, logprob: float, top_logprobs: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Take the next token."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.n_top_logprobs:
            self.top_logprobs.append(list(top_logprobs))
        if len(self.ids) >= self.max_tokens:
            self.finish_reason = "length"
