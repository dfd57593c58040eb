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
from nbflow.kv_cache.prefix_cache import Chain
from nbflow_kernels.errors import UsageError

logger = logging.getLogger(__name__)

SHARE_LEFT = 4
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
            assert request.searching is not None
            return [
                (sequence, [token])
                for sequence, token in zip(request.branches, request.searching.tokens, strict=True)
            ]
        return [(request.id, request.pending[: self.n_tokens] + self.drafts)]

    @property
    def draws(self) -> bool:
        """Whether a new token comes out."""
        return self.n_tokens == self.request.n_pending and self.request.max_tokens > 0

    @property
    def n_logits(self) -> int:
        """Number of tokens, the last ones of the work, whose logits are wanted."""
        request = self.request
        if request.wants_all_rows or request.branches or self.drafts:
            return self.n_tokens + len(self.drafts)
        return int(self.draws)

    @property
    def state_rows(self) -> range:
        """Tokens of the work whose hidden states are wanted, and no logits."""
        request = self.request
        if request.pooling is None:
            return range(0)
        return request.pooling.rows(request.n_done, self.n_tokens, len(request.prompt))

    @property
    def token_types(self) -> list[int]:
        """Types of the tokens, for models that have an embedding for them."""
        pooling, first = self.request.pooling, self.request.n_done
        n = self.n_tokens + len(self.drafts)
        if pooling is None or pooling.token_types is None:
            return [0] * n
        return pooling.token_types[first : first + n]

    @property
    def ends_pooling(self) -> bool:
        """True if the vector of a text comes out."""
        return self.request.pooling is not None and self.n_tokens == self.request.n_pending


def order(request: Request) -> tuple[int, int]:
    """Return what requests are sorted by."""
    return request.priority, request.id


def room_for(request: Request, max_pages: int, page_size: int) -> int:
    """Return how many new tokens there are pages for, if the request has all of them.

    Continuations of a search share the pages of the prompt; each has a copy of the last one, and
    pages of its own.
    """
    if request.search is None:
        return max_pages * page_size - len(request.prompt) + 1
    n_prompt = -(-len(request.prompt) // page_size)
    return ((max_pages - n_prompt) // request.width - 1) * page_size


def check_width(request: Request, max_sequences: int) -> None:
    """Raise `UsageError` if a request follows more continuations than run at once."""
    if request.width > max_sequences:
        raise UsageError(
            f"the search follows {request.width} continuations, but at most {max_sequences} "
            "sequences run at once (max_sequences, max_step_tokens); follow fewer"
        )


@dataclass
class _Step:
    """A step as it is being put together."""

    room: int
    """Tokens it can still take."""
    logit_room: int
    """Tokens whose logits can still be wanted."""
    encoder_room: int
    """Tokens that encoders can still take."""
    most: int
    """Most requests in it."""
    busy: Collection[int]
    """Requests that another step works on."""
    works: dict[int, ScheduledRequest] = field(default_factory=dict)
    """By the request's number."""

    def give(self, request: Request, n_tokens: int) -> ScheduledRequest | None:
        """Let so many tokens of a request run, or as many as there is room for."""
        if not request.is_whole:
            n_tokens = min(n_tokens, self.room)
        if len(self.works) >= self.most:
            return None
        if request.wants_all_rows:
            n_tokens = min(n_tokens, self.logit_room)
            self.logit_room -= n_tokens
        if n_tokens < 1:
            return None
        self.room -= n_tokens
        work = self.works[request.id] = ScheduledRequest(request, n_tokens)
        return work

    def add_drafts(self, work: ScheduledRequest, drafts: list[int]) -> None:
        work.drafts = drafts
        self.room -= len(drafts)
        self.logit_room -= len(drafts) + 1

    def take_back(self, request: Request) -> None:
        """Let a request not run after all."""
        work = self.works.pop(request.id, None)
        if work is not None:
            self.room += work.n_tokens + len(work.drafts)


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
        self._chains: dict[int, Chain] = {}  # of waiting requests
        self.numbers = itertools.count()
        """Numbers for further sequences of the page table."""

    # ---- requests -----------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `UsageError` if a request could never run, even alone."""
        check_width(request, self.max_sequences)
        most = self.table.max_pages * self.table.page_size
        room = room_for(request, self.table.max_pages, self.table.page_size)
        if max(1, request.max_tokens) > room:
            many = "" if request.search is None else f" for {request.width} continuations"
            raise UsageError(
                f"the request may come to {request.max_length} tokens ({len(request.prompt)} of "
                f"the prompt, max_tokens {request.max_tokens}{many}), but the key/value cache "
                f"holds {most}; shorten it, or give the cache more memory (kv_bytes)"
            )

    def add(self, request: Request) -> None:
        """Take a new request; it gets the next number."""
        self.check(request)
        request.id = next(self.numbers)
        self._wait(request)

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
        ids = (request.prompt + request.ids)[: request.n_done] if keep else ()
        for sequence in request.sequences:
            if sequence in self.table:
                self.table.drop(sequence, ids)

    @property
    def requests(self) -> list[Request]:
        """All requests, running and waiting."""
        return [*self.running, *self.waiting]

    @property
    def width(self) -> int:
        """Most tokens of the running requests in a step in which all of them generate."""
        return sum(request.width for request in self.running)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages away; it waits to be computed again."""
        self._restart(request)
        self.n_preemptions += 1

    def _restart(self, request: Request) -> None:
        self._drop(request)
        self.running.remove(request)
        request.restart()
        self._wait(request)

    def _wait(self, request: Request) -> None:
        if self.short_context is not None and request.n_pending > self.short_context:
            request.long = True
        bisect.insort(self.waiting, request, key=order)

    def n_alike(self, request: Request) -> int:
        """Return how many more tokens of a request have the rotary angles of those before."""
        if self.short_context is None or request.long:
            return UNLIMITED
        return self.short_context - max(self.table.length(s) for s in request.sequences)

    # ---- steps --------------------------------------------------------------------------------

    def next_step(
        self, busy: Collection[int] = (), most: int | None = None
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
        n_most = len(self.running) + len(self.waiting) if most is None else most
        room = self.max_step_tokens
        step = _Step(room, self.max_logit_rows, room, n_most, busy)
        if not busy:
            self._make_way()
        for request in list(self.running):
            if request.finish_reason is not None:  # it ended in a step that is just over
                continue
            if request.id in busy or not request.is_generating or request not in self.running:
                continue
            if self.n_alike(request) < 1:
                request.long = True
                self._restart(request)
            else:
                self._generate(step, request)
        for i, request in enumerate(self.running):
            if request.id not in busy and not request.is_generating:
                behind = [r for r in self.running[i + 1 :] if not r.is_generating]
                self._read_prompt(step, request, behind + self._next_waiting())
        self._admit(step)
        # hidden states that are pooled come behind those that have logits (`Step.n_logits`)
        return sorted(step.works.values(), key=lambda work: work.request.pooling is not None)

    def _generate(self, step: _Step, request: Request) -> None:
        """Give a generating request its token, taking pages from the last in order if need be."""
        if len(step.works) >= step.most:
            return
        while not all(self.table.try_reserve(s, 1) for s in request.sequences):
            last = next(r for r in reversed(self.running) if r.id not in step.busy)
            step.take_back(last)
            self.preempt(last)
            if last is request:
                return
        work = step.give(request, request.n_pending)
        assert work is not None  # there are no more sequences than tokens in a step
        if request.proposer is not None or request.proposed is not None:
            self._draft(step, work)

    def _draft(self, step: _Step, work: ScheduledRequest) -> None:
        """Take proposals, as many as leave a token to everybody else."""
        request = work.request
        others = sum(r.width for r in self.running if r.id not in step.works)
        room = min(
            request.n_proposed,
            request.max_tokens - len(request.ids) - 1,
            self.n_alike(request) - 1,
            step.room - others,
            step.logit_room // 2 - 1,  # the rest is for prompts
        )
        if room < 1:
            return
        drafts = self._proposed(request, room)
        if drafts and self.table.try_reserve(request.id, 1 + len(drafts)):
            step.add_drafts(work, drafts)

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
        return self.waiting[: max(0, self.max_sequences - self.width)]

    @staticmethod
    def _read_prompt(step: _Step, request: Request, behind: Sequence[Request]) -> None:
        """Give a request as much of its prompt as fits, leaving something to those behind it."""
        n = request.n_pending
        if n > step.room > 1 and not request.is_whole:
            n = step.room - min(sum(r.n_pending for r in behind), step.room // SHARE_LEFT)
        step.give(request, n)

    def _admit(self, step: _Step) -> None:
        """Take in waiting requests."""
        for request in list(self.waiting):
            full = step.room < 1 or len(step.works) >= step.most
            if full or not self._fits(request):
                return
            if request.is_whole and step.works and request.n_pending > step.room:
                return
            n_read = len(request.encoder_ids or ())
            if n_read > step.encoder_room and step.encoder_room < self.max_step_tokens:
                return
            chain = self._chain(request)
            if chain is not None and self.table.find(chain, request.n_pending)[1]:
                continue
            step.encoder_room -= n_read
            self.waiting.remove(request)
            self._chains.pop(request.id, None)
            bisect.insort(self.running, request, key=order)
            request.n_done = self.table.add(request.id, chain, request.n_pending, request.long)
            if request.n_preempted == 0:
                request.cached_tokens = request.n_done
            self.table.reserve(request.id, request.n_pending)
            self._read_prompt(step, request, self._next_waiting())

    def _make_way(self) -> None:
        """Let the first waiting request push out running ones of lower priority."""
        while self.waiting and self.running and not self._fits(self.waiting[0]):
            if self.waiting[0].priority >= self.running[-1].priority:
                return
            self.preempt(self.running[-1])

    def _fits(self, request: Request) -> bool:
        """Return whether there is a place and, besides one for each running one, pages."""
        if self.width + request.width > self.max_sequences:
            return False
        needed = self.table.needed(self._chain(request), request.n_pending)
        return not self.running or needed + self.width <= self.table.n_available

    def _chain(self, request: Request) -> Chain | None:
        """Return the names of a waiting request's pages, if it may use the cache."""
        if not self.prefix_cache or not request.takes_cached:
            return None
        if request.id not in self._chains:
            text = request.cache_salt.encode("utf-8", "surrogatepass")  # JSON takes half a pair
            more = array("i", request.encoder_ids or ()).tobytes() + text
            salt = (blake2b(more).digest() if more else b"") + b"long" * request.long
            self._chains[request.id] = self.table.chain([*request.prompt, *request.ids], salt)
        return self._chains[request.id]
