"""Which tokens of which requests run in the next step.  Plain Python, no arrays.

Requests are ordered by priority, then by arrival.  A step has room for `max_step_tokens` tokens:

1. Requests that are generating come first, one token each (and the tokens proposed for them, as
   far as there is room and there are pages).
2. What is left goes to the prompts of running requests, in order.  Where prompts are longer than
   what is left, the first one leaves a quarter to those behind it: a long prompt neither holds up
   short ones nor waits for them.
3. Then waiting requests are taken in, in order, as long as there is room in the step, a place among
   the `max_sequences`, and pages for the whole prompt.  A request whose beginning another one is
   computing right now waits until it can be taken from the cache; those behind it may pass.  A
   text for an encoder is not divided: it waits for a step with room, or has one alone.

When a generating request needs a page and none is left, the last request in the order gives all of
its pages back and waits again; what it had computed is computed anew (preemption by recomputation).
The first in the order never gives way, and alone it fits (`check`), so it comes to its end, and
then the next one: no two can push each other out for ever.

With LongRoPE a sequence beyond the original context has other rotary angles than up to there.  A
request that outgrows it gives its pages back, too, and all of it is computed with the new angles.
Which angles a request has depends on its length alone, not on what it may come to.

The scheduler knows nothing of time: every rank runs its own, and all of them decide alike.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from nbflow.engine.request import Request
from nbflow.kv_cache.block_table import UNLIMITED, BlockTable
from nbflow.kv_cache.prefix_cache import HashChain
from nbflow_kernels.errors import UsageError

logger = logging.getLogger(__name__)

CHUNK_RESERVE = 4
"""A prompt that does not fit into a step leaves one part in so many to those behind it."""


@dataclass
class ScheduledRequest:
    """The part of a step that belongs to one request."""

    request: Request
    n_tokens: int
    """How many of its pending tokens run."""
    drafts: list[int] = field(default_factory=list)
    """Proposed tokens that run behind them."""

    @property
    def parts(self) -> list[tuple[int, list[int]]]:
        """The sequences of the page table that run, and their tokens."""
        request = self.request
        if request.branches:
            assert request.search_state is not None
            return [
                (sequence, [token])
                for sequence, token in zip(
                    request.branches, request.search_state.tokens, strict=True
                )
            ]
        return [(request.id, request.pending[: self.n_tokens] + self.drafts)]

    @property
    def emits_token(self) -> bool:
        """Whether a new token comes out."""
        return self.n_tokens == self.request.n_pending and self.request.max_tokens > 0

    @property
    def n_logits(self) -> int:
        """Number of tokens, the last ones of the work, whose logits are wanted."""
        request = self.request
        if request.needs_all_logits or request.branches or self.drafts:
            return self.n_tokens + len(self.drafts)
        return int(self.emits_token)

    @property
    def state_rows(self) -> range:
        """Tokens of the work whose hidden states are wanted, and no logits."""
        request = self.request
        if request.pooling is None:
            return range(0)
        return request.pooling.rows(request.n_computed, self.n_tokens, len(request.prompt))

    @property
    def token_types(self) -> list[int]:
        """Types of the tokens, for models that have an embedding for them."""
        pooling, first = self.request.pooling, self.request.n_computed
        n = self.n_tokens + len(self.drafts)
        if pooling is None or pooling.token_types is None:
            return [0] * n
        return pooling.token_types[first : first + n]

    @property
    def emits_vector(self) -> bool:
        """True if the vector of a text comes out."""
        return self.request.pooling is not None and self.n_tokens == self.request.n_pending


def order(request: Request) -> tuple[int, int]:
    """Return what requests are sorted by."""
    return request.priority, request.id


def max_new_tokens_for(request: Request, max_pages: int, page_size: int) -> int:
    """Return how many new tokens there are pages for, if the request has all of them.

    Continuations of a search share the pages of the prompt; each has a copy of the last one, and
    pages of its own.
    """
    if request.search is None:
        return max_pages * page_size - len(request.prompt) + 1
    n_prompt = -(-len(request.prompt) // page_size)
    return ((max_pages - n_prompt) // request.n_sequences - 1) * page_size


def check_n_sequences(request: Request, max_sequences: int) -> None:
    """Raise `UsageError` if a request follows more continuations than run at once."""
    if request.n_sequences > max_sequences:
        raise UsageError(
            f"the search follows {request.n_sequences} continuations, but at most {max_sequences} "
            "sequences run at once (max_sequences, max_step_tokens); follow fewer"
        )


@dataclass
class _Step:
    """A step as it is being put together."""

    token_budget: int
    """Tokens it can still take."""
    logit_budget: int
    """Tokens whose logits can still be wanted."""
    encoder_budget: int
    """Tokens that encoders can still take."""
    max_requests: int
    """Most requests in it."""
    in_flight: Collection[int]
    """Requests that another step works on."""
    scheduled: dict[int, ScheduledRequest] = field(default_factory=dict)
    """By the request's number."""

    def add_request(self, request: Request, n_tokens: int) -> ScheduledRequest | None:
        """Let so many tokens of a request run, or as many as there is room for."""
        if not request.single_step:
            n_tokens = min(n_tokens, self.token_budget)
        if len(self.scheduled) >= self.max_requests:
            return None
        if request.needs_all_logits:
            n_tokens = min(n_tokens, self.logit_budget)
            self.logit_budget -= n_tokens
        if n_tokens < 1:
            return None
        self.token_budget -= n_tokens
        entry = self.scheduled[request.id] = ScheduledRequest(request, n_tokens)
        return entry

    def add_drafts(self, entry: ScheduledRequest, drafts: list[int]) -> None:
        entry.drafts = drafts
        self.token_budget -= len(drafts)
        self.logit_budget -= len(drafts) + 1

    def take_back(self, request: Request) -> None:
        """Let a request not run after all."""
        entry = self.scheduled.pop(request.id, None)
        if entry is not None:
            self.token_budget += entry.n_tokens + len(entry.drafts)


class Scheduler:
    """The requests of a model, and whose turn it is.

    Parameters
    ----------
    table : PageTable
        Whose pages are whose.
    max_step_tokens : int
        Most tokens in one step.
    max_sequences : int, optional
        Most sequences that run at once; by default, and at most, as many as a step has tokens.
        A search counts as many as it follows.
    max_logit_rows : int, optional
        Most tokens of a step whose logits are wanted besides those that draw a token.
    prefix_cache : bool
        Whether pages are kept for requests that begin with the same tokens.
    short_context : int, optional
        Length beyond which a sequence has other rotary angles: `ModelSpec.short_context`.
    n_vocab : int, optional
        Tokens of the vocabulary; a proposal ends before an id that is outside.
    """

    def __init__(
        self,
        table: BlockTable,
        max_step_tokens: int,
        max_sequences: int | None = None,
        max_logit_rows: int = 1 << 30,
        prefix_cache: bool = False,
        *,
        short_context: int | None = None,
        n_vocab: int = 1 << 31,
    ) -> None:
        self.table = table
        self.n_vocab = n_vocab
        self.max_step_tokens = max_step_tokens
        self.max_sequences = min(max_sequences or max_step_tokens, max_step_tokens)
        self.max_logit_rows = max_logit_rows
        self.prefix_cache = prefix_cache
        self.short_context = short_context
        self.running: list[Request] = []
        """In order."""
        self.waiting: list[Request] = []
        """In order."""
        self.n_preemptions = 0
        self._chains: dict[int, HashChain] = {}  # of waiting requests
        self.numbers = itertools.count()
        """Numbers for further sequences of the page table."""

    # ---- requests -----------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `UsageError` if a request could never run, even alone."""
        check_n_sequences(request, self.max_sequences)
        most = self.table.max_pages * self.table.page_size
        fitting = max_new_tokens_for(request, self.table.max_pages, self.table.page_size)
        if max(1, request.max_tokens) > fitting:
            many = "" if request.search is None else f" for {request.n_sequences} continuations"
            raise UsageError(
                f"the request may come to {request.max_length} tokens ({len(request.prompt)} of "
                f"the prompt, max_tokens {request.max_tokens}{many}), but the key/value cache "
                f"holds {most}; shorten it, or give the cache more memory (kv_bytes)"
            )

    def add(self, request: Request) -> None:
        """Take a new request; it gets the next number."""
        self.check(request)
        request.id = next(self.numbers)
        self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Let go of a request that has ended, or is not wanted any more."""
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
        self._chains.pop(request.id, None)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Give a request's pages back; what they hold of it may be of use to others."""
        keep = self.prefix_cache and request.error is None and not request.branches
        ids = (request.prompt + request.ids)[: request.n_computed] if keep else ()
        for sequence in request.sequences:
            if sequence in self.table:
                self.table.drop(sequence, ids)

    @property
    def requests(self) -> list[Request]:
        """All requests, running and waiting."""
        return [*self.running, *self.waiting]

    @property
    def n_sequences(self) -> int:
        """Most tokens of the running requests in a step in which all of them generate."""
        return sum(request.n_sequences for request in self.running)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away; it waits to be computed again."""
        self._restart(request)
        self.n_preemptions += 1

    def _restart(self, request: Request) -> None:
        self._drop(request)
        self.running.remove(request)
        request.restart()
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        if self.short_context is not None and request.n_pending > self.short_context:
            request.long = True
        bisect.insort(self.waiting, request, key=order)

    def n_until_long_rope(self, request: Request) -> int:
        """Return how many more tokens of a request have the rotary angles of those before."""
        if self.short_context is None or request.long:
            return UNLIMITED
        return self.short_context - max(self.table.length(s) for s in request.sequences)

    # ---- steps --------------------------------------------------------------------------------

    def next_step(
        self, in_flight: Collection[int] = (), max_requests: int | None = None
    ) -> list[ScheduledRequest]:
        """Return the work of the next step; the pages it needs are reserved.

        An empty list means that no request is left besides those that are busy.

        Parameters
        ----------
        busy : collection of int
            Requests that another step works on; they keep their places and pages.  The caller sees
            to it that there is a free page for every running request.
        most : int, optional
            Most requests in the step.
        """
        n_max = len(self.running) + len(self.waiting) if max_requests is None else max_requests
        token_budget = self.max_step_tokens
        step = _Step(token_budget, self.max_logit_rows, token_budget, n_max, in_flight)
        if not in_flight:
            self._preempt_for_priority()
        for request in list(self.running):
            if request.finish_reason is not None:  # it ended in a step that is just over
                continue
            if request.id in in_flight or not request.is_generating or request not in self.running:
                continue
            if self.n_until_long_rope(request) < 1:
                request.long = True
                self._restart(request)
            else:
                self._schedule_decode(step, request)
        for i, request in enumerate(self.running):
            if request.id not in in_flight and not request.is_generating:
                behind = [r for r in self.running[i + 1 :] if not r.is_generating]
                self._schedule_prompt(step, request, behind + self._next_waiting())
        self._admit(step)
        # hidden states that are pooled come behind those that have logits (`Step.n_logits`)
        return sorted(step.scheduled.values(), key=lambda entry: entry.request.pooling is not None)

    def _schedule_decode(self, step: _Step, request: Request) -> None:
        """Give a generating request its token, taking pages from the last in order if need be."""
        if len(step.scheduled) >= step.max_requests:
            return
        while not all(self.table.try_reserve(s, 1) for s in request.sequences):
            last = next(r for r in reversed(self.running) if r.id not in step.in_flight)
            step.take_back(last)
            self.preempt(last)
            if last is request:
                return
        entry = step.add_request(request, request.n_pending)
        assert entry is not None  # there are no more sequences than tokens in a step
        if request.proposer is not None or request.proposed is not None:
            self._schedule_drafts(step, entry)

    def _schedule_drafts(self, step: _Step, entry: ScheduledRequest) -> None:
        """Take proposals, as many as leave a token to everybody else."""
        request = entry.request
        others = sum(r.n_sequences for r in self.running if r.id not in step.scheduled)
        token_budget = min(
            request.n_proposed,
            request.max_tokens - len(request.ids) - 1,
            self.n_until_long_rope(request) - 1,
            step.token_budget - others,
            step.logit_budget // 2 - 1,  # the rest is for prompts
        )
        if token_budget < 1:
            return
        drafts = self._proposed(request, token_budget)
        if drafts and self.table.try_reserve(request.id, 1 + len(drafts)):
            step.add_drafts(entry, drafts)

    def _proposed(self, request: Request, n: int) -> list[int]:
        """Return at most `n` tokens that may follow."""
        if request.proposed is not None:
            (n_ids, tokens), request.proposed = request.proposed, None
            return tokens[:n] if n_ids == len(request.ids) else []
        assert request.proposer is not None
        try:
            found = request.proposer([*request.prompt, *request.ids], n)
            known = itertools.takewhile(lambda i: 0 <= i < self.n_vocab, map(int, found))
            return list(itertools.islice(known, n))
        except Exception:  # a guess is not worth the request
            logger.exception("the proposer of request %d raised; it is not asked again", request.id)
            request.proposer = None
            return []

    def _next_waiting(self) -> list[Request]:
        """Return the waiting requests that there are places for."""
        return self.waiting[: max(0, self.max_sequences - self.n_sequences)]

    @staticmethod
    def _schedule_prompt(step: _Step, request: Request, behind: Sequence[Request]) -> None:
        """Give a request as much of its prompt as fits, leaving something to those behind it."""
        n = request.n_pending
        if n > step.token_budget > 1 and not request.single_step:
            n = step.token_budget - min(
                sum(r.n_pending for r in behind), step.token_budget // CHUNK_RESERVE
            )
        step.add_request(request, n)

    def _admit(self, step: _Step) -> None:
        """Take in waiting requests."""
        for request in list(self.waiting):
            full = step.token_budget < 1 or len(step.scheduled) >= step.max_requests
            if full or not self._can_admit(request):
                return
            if request.single_step and step.scheduled and request.n_pending > step.token_budget:
                return
            n_read = len(request.encoder_ids or ())
            if n_read > step.encoder_budget and step.encoder_budget < self.max_step_tokens:
                return
            chain = self._chain(request)
            if chain is not None and self.table.find(chain, request.n_pending)[1]:
                continue
            step.encoder_budget -= n_read
            self.waiting.remove(request)
            self._chains.pop(request.id, None)
            bisect.insort(self.running, request, key=order)
            request.n_computed = self.table.add(request.id, chain, request.n_pending, request.long)
            if request.n_preempted == 0:
                request.cached_tokens = request.n_computed
            self.table.reserve(request.id, request.n_pending)
            self._schedule_prompt(step, request, self._next_waiting())

    def _preempt_for_priority(self) -> None:
        """Let the first waiting request push out running ones of lower priority."""
        while self.waiting and self.running and not self._can_admit(self.waiting[0]):
            if self.waiting[0].priority >= self.running[-1].priority:
                return
            self.preempt(self.running[-1])

    def _can_admit(self, request: Request) -> bool:
        """Return whether there is a place and, besides one for each running one, pages."""
        if self.n_sequences + request.n_sequences > self.max_sequences:
            return False
        needed = self.table.n_new_pages(self._chain(request), request.n_pending)
        return not self.running or needed + self.n_sequences <= self.table.n_available

    def _chain(self, request: Request) -> HashChain | None:
        """Return the names of a waiting request's pages, if it may use the cache."""
        if not self.prefix_cache or not request.uses_prefix_cache:
            return None
        if request.id not in self._chains:
            text = request.cache_salt.encode("utf-8", "surrogatepass")  # JSON takes half a pair
            more = array("i", request.encoder_ids or ()).tobytes() + text
            salt = (blake2b(more).digest() if more else b"") + b"long" * request.long
            self._chains[request.id] = self.table.chain([*request.prompt, *request.ids], salt)
        return self._chains[request.id]
