"""Request: parameters and progress of one sequence, identical on every rank."""

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
"""End token or stop text; max_tokens or context; cancelled; deadline passed; failure."""

TopLogprobs = list[tuple[int, float]]
"""Tokens and their log-probabilities, the most probable first."""

Proposer = Callable[[Sequence[int], int], Sequence[int]]
"""``propose(ids, n)``: at most n tokens that may follow `ids`; the same on every rank."""

Proposals = dict[int, tuple[int, list[int]]]
"""Request number -> (number of new tokens at the proposal, draft tokens)."""


class DraftProposer(Protocol):
    """Draft model that proposes tokens to several requests at once."""

    @property
    def max_context(self) -> int:
        """Return the longest sequence of the draft model."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Return at most the given number of draft tokens for each request."""

    def release(self, request: Request) -> None:
        """Free the state of a finished request."""


@dataclass(eq=False)
class Request:
    """One request: prompt, sampling parameters and progress."""

    prompt: list[int]
    """Prompt token ids."""
    max_tokens: int
    """Most new tokens."""
    strategy: Strategy
    """Decoding strategy."""
    seed: int = 0
    """Seed; the n-th new token uses random number n."""
    stop_ids: frozenset[int] = frozenset()
    """End tokens."""
    encoder_ids: list[int] | None = None
    """Token ids for the encoder, if the model has one."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the output (`nbflow.engine.stop_checker`)."""
    include_stop_text: bool = False
    """True to keep the stop text in the output."""
    text_before: Sequence[int] = ()
    """Tokens before the first new one, for its detokenization with stop texts."""
    wants_logprobs: bool = True
    """True to compute log-probabilities of the new tokens; else they are NaN."""
    n_top_logprobs: int = 0
    """Number of most probable tokens to report with each new one."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report with each prompt token.

    0 reports their own log-probabilities only, None nothing.
    Disables the prefix cache for the request."""
    priority: int = 0
    """Smaller numbers are scheduled first."""
    deadline: float | None = None
    """Seconds from submission until the request is ended."""
    cache_salt: str = ""
    """Prefix cache pages are shared only between requests with the same salt."""
    proposer: Proposer | None = None
    """Proposes draft tokens on every rank."""
    drafter: DraftProposer | None = None
    """Draft model, for several requests at once; on the leading process only."""
    verifies_chain: bool = False
    """True for rejection sampling of proposed tokens (`engine.speculative`)."""
    n_proposed: int = 0
    """Most draft tokens per step."""
    search: Search | None = None
    """Beam or contrastive search, used instead of the strategy."""
    banned_ids: frozenset[int] = frozenset()
    """Tokens banned in a search; a strategy has a logits processor for them."""
    forced_bos_id: int | None = None
    """First new token, whatever the logits."""
    forced_eos_ids: tuple[int, ...] = ()
    """Tokens of which a search takes one as the last of `max_tokens`."""
    masked: tuple[int, ...] = ()
    """Prompt positions whose own tokens' log-probabilities are wanted (masked language models);
    `prompt_logprobs` is then the number of most probable tokens."""
    pooling: Pooling | None = None
    """Pooling of the prompt's hidden states, for requests without new tokens."""

    id: int = -1
    """Number given by the scheduler."""
    ids: list[int] = field(default_factory=list)
    """New tokens so far, without the end token."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of the probability of each new token under the model (temperature 1)."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Most probable tokens at each position, if requested."""
    prompt_results: list[tuple[float, TopLogprobs]] = field(default_factory=list)
    """Log-probability and most probable tokens of each prompt token but the first."""
    n_computed: int = 0
    """Tokens whose keys and values are in the KV cache."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    long: bool = False
    """True for the long-context rotary factors of LongRoPE."""
    n_preempted: int = 0
    """Number of preemptions by recomputation."""
    proposed: tuple[int, list[int]] | None = None
    """Number of new tokens at the proposal, and the proposed tokens."""
    draft_probs: np.ndarray | None = None
    """Draft distributions, float32 (n, V), for rejection sampling."""
    n_drafted: int = 0
    """Draft tokens so far."""
    n_accepted: int = 0
    """Draft tokens accepted so far."""
    finish_reason: FinishReason | None = None
    """Finish reason; None while it runs."""
    stop_reason: str | None = None
    """The matched stop text."""
    text: str | None = None
    """The new tokens as text, once the stop checker of this process has finished them."""
    state: State | None = None
    """State of the strategy, on the sampling rank."""
    n_seen: int = 0
    """Number of `ids` that `state` has accepted."""
    error: Exception | None = None
    """The failure of a request that finished with "error"."""
    pending_error: Exception | None = None
    """Error on the sampling rank, until the next sampled token reports it to the others."""
    n_advanced: int = 0
    """Tokens of the hypotheses of the search."""
    search_state: SearchState | None = None
    """State of the search once the prompt is processed."""
    branches: list[int] = field(default_factory=list)
    """Sequences of the block table for the hypotheses of the search."""
    history: History | None = None
    """Hidden states that contrastive search compares with, on the sampling rank."""
    vector: np.ndarray | None = None
    """Result of `pooling`, float32 (E,), once the prompt is processed."""
    found: list[Continuation] = field(default_factory=list)
    """Results of the search, best first; `ids` are the first of them."""

    @property
    def n_sequences(self) -> int:
        """Most sequences of the request in a decode step."""
        return 1 if self.search is None else self.search.n_sequences

    @property
    def sequences(self) -> list[int]:
        """Sequences of the request in the block table."""
        return self.branches or [self.id]

    @property
    def n_pending(self) -> int:
        """Number of tokens to be computed."""
        if self.branches:
            return len(self.branches)
        return len(self.prompt) + len(self.ids) - self.n_computed

    @property
    def pending(self) -> list[int]:
        """Tokens to be computed."""
        n_prompt = len(self.prompt)
        if self.n_computed < n_prompt:
            return self.prompt[self.n_computed :] + self.ids
        return self.ids[self.n_computed - n_prompt :]

    @property
    def is_generating(self) -> bool:
        """True in the decode phase: only the last token of each sequence is pending."""
        if self.search is not None:
            return bool(self.branches)
        return bool(self.ids) and self.n_pending == 1

    @property
    def uses_prefix_cache(self) -> bool:
        """True if its first tokens may come from the prefix cache."""
        if self.pooling is not None:
            return self.pooling.uses_prefix_cache
        needs_hidden = self.search is not None and self.search.needs_hidden
        return not needs_hidden and self.prompt_logprobs is None

    @property
    def single_step(self) -> bool:
        """True if its prompt must run in one step (no chunked prefill)."""
        return bool(self.masked) or (self.pooling is not None and self.pooling.whole)

    @property
    def needs_all_logits(self) -> bool:
        """True if logits of all tokens of a step are needed, not only of the last."""
        if self.search is not None and self.search.needs_hidden and not self.branches:
            return True
        return self.needs_prompt_logits

    @property
    def needs_prompt_logits(self) -> bool:
        """True while prompt log-probabilities are missing."""
        if self.masked:
            return len(self.prompt_results) < len(self.masked)
        if self.prompt_logprobs is None:
            return False
        return len(self.prompt_results) + 1 < len(self.prompt)

    @property
    def max_length(self) -> int:
        """Most tokens in the KV cache; the last new token needs no slot."""
        return len(self.prompt) + max(0, self.max_tokens - 1)

    def copy(self) -> Request:
        """Return a copy for another rank, with separate lists and states."""
        own: dict[str, Any] = {"ids": [], "logprobs": [], "top_logprobs": [], "prompt_results": []}
        own |= {"drafter": None, "proposed": None, "draft_probs": None}
        own |= {"branches": [], "found": [], "state": None, "search_state": None, "history": None}
        own |= {"pooling": copy.copy(self.pooling), "vector": None, "text": None}
        try:
            proposer = copy.deepcopy(self.proposer)
        except Exception as error:
            raise UsageError(f"each rank needs a copy of the proposer: {error}") from error
        return dataclasses.replace(self, **own, proposer=proposer)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes; the draft model stays here."""
        return {**self.__dict__, "drafter": None}

    def finished_vector(self) -> np.ndarray:
        """Return the pooled vector of a finished request; raise its error if it has none."""
        if self.error is not None:
            raise self.error
        if self.vector is None:
            raise UsageError(f"the text was not processed completely: {self.finish_reason}")
        return self.vector

    def restart(self) -> None:
        """Reset after a preemption."""
        self.n_computed = self.n_advanced = 0
        self.branches, self.search_state, self.history, self.pending_error = [], None, None, None
        self.n_preempted += 1

    def fail(self, error: Exception) -> None:
        """Finish with an error."""
        self.finish_reason, self.error = "error", error

    def accept(
        self, token: int, logprob: float = math.nan, top_logprobs: Sequence[tuple[int, float]] = ()
    ) -> None:
        """Append the next token."""
        if token in self.stop_ids:
            self.finish_reason = "stop"
            return
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.n_top_logprobs:
            self.top_logprobs.append(list(top_logprobs))
        if len(self.ids) >= self.max_tokens:
            self.finish_reason = "length"
