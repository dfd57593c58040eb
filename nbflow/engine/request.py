"""Request: parameters and progress of one sequence.  Plain Python, the same on every rank."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from nbflow.engine.pooling import Pooling
from nbflow.engine.search.base import Continuation, Search, SearchState
from nbflow.engine.search.contrastive import History
from nbflow.sampling import State, Strategy
from nbflow_kernels.errors import UsageError

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
"""Why a request ended: an end token; max_tokens or the context; the user; its time; a failure."""

TopLogprobs = list[tuple[int, float]]
"""Tokens and their log-probabilities, the most probable first."""

Proposer = Callable[[Sequence[int], int], Sequence[int]]
"""``propose(ids, n)``: at most n tokens that may follow `ids`; the same on every rank."""

Proposals = dict[int, tuple[int, list[int]]]
"""Number of a request -> how many new tokens it has, and what may follow these."""


class DraftProposer(Protocol):
    """Draft model that proposes tokens to several requests at once."""

    @property
    def max_context(self) -> int:
        """Return the most tokens of a sequence."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Return at most so many tokens for each request."""

    def release(self, request: Request) -> None:
        """Free what is held for a request that has ended."""


@dataclass(eq=False)
class Request:
    """One sequence to be continued."""

    prompt: list[int]
    """Token ids given."""
    max_tokens: int
    """At most this many new tokens."""
    strategy: Strategy
    """Decoding strategy."""
    seed: int = 0
    """Seed of the draws; the n-th new token uses draw n."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sequence."""
    encoder_ids: list[int] | None = None
    """Token ids for the encoder, if the model has one."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the output (`nbflow.engine.stop_checker`)."""
    include_stop_text: bool = False
    """True to keep the stop text in the output."""
    text_before: Sequence[int] = ()
    """Tokens before the first new one that decide how it is spelt, where stop texts are wanted."""
    wants_logprobs: bool = True
    """True to compute log-probabilities of the new tokens; else they are NaN."""
    n_top_logprobs: int = 0
    """Number of most probable tokens to report with each new one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens: 0 for the log-probabilities of these alone, None for none.
    The prompt is then not taken from the prefix cache."""
    priority: int = 0
    """Requests with a smaller number go first."""
    deadline: float | None = None
    """Seconds from submission after which the request is ended, whatever it has."""
    cache_salt: str = ""
    """Requests share pages of the prefix cache only with those of the same salt."""
    proposer: Proposer | None = None
    """Proposes tokens that are then verified several at a time, if there is one."""
    drafter: DraftProposer | None = None
    """The same by a model, for several requests at once; only where the steps are led."""
    verifies_chain: bool = False
    """True for rejection sampling of proposed tokens (`engine.speculative`)."""
    n_proposed: int = 0
    """At most so many tokens are asked of the proposer or the drafter."""
    search: Search | None = None
    """Chooses the tokens instead of the strategy, following several continuations at once."""
    banned_ids: frozenset[int] = frozenset()
    """Tokens that a search may not choose; a strategy has them as a constraint."""
    pooling: Pooling | None = None
    """Pools the prompt's hidden states into one vector, without new tokens."""

    id: int = -1
    """The scheduler's number for it."""
    ids: list[int] = field(default_factory=list)
    """New tokens so far, the one that ended the sequence not among them."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of the probability of each new token under the model (temperature 1)."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """The most probable tokens in the place of each new one, if they are wanted."""
    prompt_results: list[tuple[float, TopLogprobs]] = field(default_factory=list)
    """For each prompt token but the first: its log-probability, and the most probable tokens."""
    n_done: int = 0
    """Tokens of prompt and continuation whose keys and values are in the cache."""
    cached_tokens: int = 0
    """Tokens of the prompt that were taken from the prefix cache."""
    long: bool = False
    """True if its rotary angles are those of sequences beyond the original context (LongRoPE)."""
    n_preempted: int = 0
    """Number of preemptions by recomputation."""
    proposed: tuple[int, list[int]] | None = None
    """Number of new tokens at the proposal, and the proposed tokens."""
    draft_probs: np.ndarray | None = None
    """Distributions they were drawn from, float32 (n, V), for rejection sampling."""
    n_drafted: int = 0
    """Tokens proposed so far."""
    n_accepted: int = 0
    """Proposed tokens that turned out to be right."""
    finish_reason: FinishReason | None = None
    """Why it ended; None while it runs."""
    stop_reason: str | None = None
    """The stop text that ended it."""
    state: State | None = None
    """State of the strategy, if it has one; on the rank that draws."""
    n_seen: int = 0
    """Number of `ids` that the state has seen."""
    error: Exception | None = None
    """Failure, if it ended with "error"."""
    trouble: Exception | None = None
    """Error on the rank that draws, until a draw tells the others."""
    searching: SearchState | None = None
    """The search, once the prompt is read."""
    branches: list[int] = field(default_factory=list)
    """Sequences of the page table for the continuations that the search follows."""
    history: History | None = None
    """Hidden states that the search compares with; on the rank that draws."""
    vector: np.ndarray | None = None
    """The vector that `pooling` gives, float32 (E,), once the prompt is read."""
    found: list[Continuation] = field(default_factory=list)
    """Results of the search, best first; `ids` are the first of them."""

    @property
    def width(self) -> int:
        """Most tokens that it runs in a step once it generates, proposed ones aside."""
        return 1 if self.search is None else self.search.width

    @property
    def sequences(self) -> list[int]:
        """Its sequences in the page table."""
        return self.branches or [self.id]

    @property
    def n_pending(self) -> int:
        """Number of tokens that have not been run yet."""
        if self.branches:
            return len(self.branches)
        return len(self.prompt) + len(self.ids) - self.n_done

    @property
    def pending(self) -> list[int]:
        """Return the tokens that have not been run yet."""
        n_prompt = len(self.prompt)
        if self.n_done < n_prompt:
            return self.prompt[self.n_done :] + self.ids
        return self.ids[self.n_done - n_prompt :]

    @property
    def is_generating(self) -> bool:
        """True if only the last new token, of each continuation, has not been run yet."""
        if self.search is not None:
            return bool(self.branches)
        return bool(self.ids) and self.n_pending == 1

    @property
    def takes_cached(self) -> bool:
        """True if its first tokens may come from the prefix cache: nothing is wanted of them."""
        if self.pooling is not None:
            return self.pooling.takes_cached
        compares = self.search is not None and self.search.compares
        return not compares and self.prompt_logprobs is None

    @property
    def is_whole(self) -> bool:
        """True if its prompt must not be divided among steps."""
        return self.pooling is not None and self.pooling.whole

    @property
    def wants_all_rows(self) -> bool:
        """True if outputs of all tokens that run are needed, not only of the last."""
        compares = self.search is not None and self.search.compares and not self.branches
        return compares or self.wants_prompt_logits

    @property
    def wants_prompt_logits(self) -> bool:
        """True if some of the prompt's log-probabilities are still to come."""
        missing = len(self.prompt_results) + 1 < len(self.prompt)
        return self.prompt_logprobs is not None and missing

    @property
    def max_length(self) -> int:
        """Tokens whose keys and values it may come to hold; the last token needs none."""
        return len(self.prompt) + max(0, self.max_tokens - 1)

    def copy(self) -> Request:
        """Return the request for another rank: equal, with lists and a state of its own."""
        own: dict[str, Any] = {"ids": [], "logprobs": [], "top_logprobs": [], "prompt_results": []}
        own |= {"drafter": None, "proposed": None, "draft_probs": None}
        own |= {"branches": [], "found": [], "state": None, "searching": None, "history": None}
        own |= {"pooling": copy.copy(self.pooling), "vector": None}
        try:
            proposer = copy.deepcopy(self.proposer)
        except Exception as error:
            raise UsageError(f"each rank needs the proposer, which has no copy: {error}") from error
        return dataclasses.replace(self, **own, proposer=proposer)

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes are told: a model stays where it is."""
        return {**self.__dict__, "drafter": None}

    def finished_vector(self) -> np.ndarray:
        """Return the pooled vector of a finished request; raise its error if it has none."""
        if self.error is not None:
            raise self.error
        if self.vector is None:
            raise UsageError(f"the text was not read to its end: {self.finish_reason}")
        return self.vector

    def restart(self) -> None:
        """Forget what was computed: prompt and new tokens are read again."""
        self.n_done = 0
        self.branches, self.searching, self.history, self.trouble = [], None, None, None
        self.n_preempted += 1

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.finish_reason, self.error = "error", error

    def accept(
        self, token: int, logprob: float = math.nan, top_logprobs: Sequence[tuple[int, float]] = ()
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
