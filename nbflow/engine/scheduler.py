"""Scheduler: continuous batching with chunked prefill.

Requests are ordered by priority, then by arrival.  A step has a budget of `max_step_tokens` tokens:

1. Decoding requests come first, one token each, plus draft tokens as far as budget and pages allow.
2. The rest of the budget goes to prompts of running requests, in order.  A prompt that exceeds it
   leaves a quarter to those behind it, so that long prompts neither block short ones nor starve.
3. Then waiting requests are admitted, in order, while the step has budget, fewer than
   `max_sequences` sequences run, and there are pages for the whole prompt.  A request whose prefix
   is being computed by another one waits for the prefix cache; later requests may pass it.
   Encoder inputs are not chunked: they wait for a step with enough budget, or get one alone.

If a decoding request needs a page and none is free, the last request in the order is preempted: it
frees its pages, waits again and is recomputed.  The first request is never preempted, and it fits
alone (`check`), so every request finishes.

With LongRoPE, sequences beyond the original context use other rotary factors.  A request that grows
beyond it frees its pages, too, and is recomputed.  The factors depend on its current length only.

Decisions are independent of time, so that the schedulers of all ranks agree without communication.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from nbflow.engine.request import Request
from nbflow.kv_cache.block_table import UNLIMITED, BlockTable
from nbflow.kv_cache.prefix_cache import HashChain
from nbflow.kv_cache.state_table import STATE_CHUNK
from nbflow_kernels.errors import UsageError

logger = logging.getLogger(__name__)

FIRST_SNAPSHOT = 512
"""Tokens of a long prompt after which its recurrent state is kept first."""
CHUNK_RESERVE = 4
"""A prompt longer than the budget leaves 1/`CHUNK_RESERVE` of it to those behind it."""


@dataclass
class ScheduledRequest:
    """Share of one request in a step."""

    request: Request
    n_tokens: int
    """Number of its pending tokens that run."""
    drafts: list[int] = field(default_factory=list)
    """Draft tokens that run after them."""
    emits_token: bool = field(init=False)
    """True if a new token is sampled."""
    is_sampled: bool = field(init=False)
    """True if a strategy samples it (a search does not)."""
    n_logits: int = field(init=False)
    """Number of tokens whose logits are needed."""

    def __post_init__(self) -> None:
        request = self.request
        self.emits_token = self.n_tokens == request.n_pending and request.max_tokens > 0
        self.is_sampled = self.emits_token and request.search is None
        if request.masked:
            self.n_logits = len(request.masked)
        elif request.needs_all_logits or request.branches or self.drafts:
            self.n_logits = self.n_tokens + len(self.drafts)
        else:
            self.n_logits = int(self.emits_token)

    def add_drafts(self, drafts: list[int]) -> None:
        """Set the draft tokens, whose logits are needed as well as those of the pending ones."""
        self.drafts, self.n_logits = drafts, self.n_tokens + len(drafts)

    @property
    def parts(self) -> list[tuple[int, list[int]]]:
        """Sequences of the block table, and their tokens."""
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
    def logit_rows(self) -> Sequence[int]:
        """Tokens whose logits are needed: masked ones, else the last `n_logits`."""
        if self.request.masked:
            return self.request.masked
        end = self.n_tokens + len(self.drafts)
        return range(end - self.n_logits, end)

    @property
    def state_rows(self) -> range:
        """Tokens whose hidden states are pooled."""
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
        """True if the pooled vector is complete after this step."""
        return self.request.pooling is not None and self.n_tokens == self.request.n_pending


def order(request: Request) -> tuple[int, int]:
    """Return the sort key of a request."""
    return request.priority, request.id


def max_new_tokens_for(request: Request, max_pages: int, page_size: int) -> int:
    """Return the most new tokens of a request that has all pages.

    Hypotheses of a search share the prompt pages; each has a copy of the last one, and own pages.
    """
    if request.search is None:
        return max_pages * page_size - len(request.prompt) + 1
    n_prompt = -(-len(request.prompt) // page_size)
    return ((max_pages - n_prompt) // request.n_sequences - 1) * page_size


def check_n_sequences(request: Request, max_sequences: int) -> None:
    """Raise `UsageError` if a search needs more than `max_sequences` sequences."""
    if request.n_sequences > max_sequences:
        raise UsageError(
            f"the search needs {request.n_sequences} sequences, but at most {max_sequences} run at "
            "once (max_sequences, max_step_tokens); use fewer beams or candidates"
        )


@dataclass
class _Step:
    """Step under construction, with the budgets left."""

    token_budget: int
    """Tokens left."""
    logit_budget: int
    """Rows of logits left."""
    encoder_budget: int
    """Encoder tokens left."""
    max_requests: int
    """Most requests."""
    in_flight: Collection[int]
    """Requests of other steps in flight."""
    scheduled: dict[int, ScheduledRequest] = field(default_factory=dict)
    """Entries by request number."""

    def add_request(self, request: Request, n_tokens: int) -> ScheduledRequest | None:
        """Add up to `n_tokens` tokens of a request; return None if the budget is used up."""
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
        entry.add_drafts(drafts)
        self.token_budget -= len(drafts)
        self.logit_budget -= len(drafts) + 1

    def take_back(self, request: Request) -> None:
        """Remove a request from the step."""
        entry = self.scheduled.pop(request.id, None)
        if entry is not None:
            self.token_budget += entry.n_tokens + len(entry.drafts)


class Scheduler:
    """Running and waiting requests, and the composition of steps.

    Parameters
    ----------
    table : BlockTable
        Pages of the KV cache.
    max_step_tokens : int
        Most tokens per step.
    max_sequences : int, optional
        Most sequences that run at once; by default, and at most, `max_step_tokens`.  A search
        counts its hypotheses.
    max_logit_rows : int, optional
        Most rows of logits per step besides those of sampled tokens.
    prefix_cache : bool
        True to share pages of equal prompt prefixes.  With recurrent layers only if the table keeps
        snapshots of their states; prompts are then cut where one is kept.
    short_context : int, optional
        Original context of LongRoPE (`ModelSpec.short_context`).
    n_vocab : int, optional
        Size of the vocabulary; draft tokens are cut before an id outside of it.
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
        states = table.states
        self.prefix_cache = prefix_cache and (states is None or states.n_snapshots > 0)
        if prefix_cache and not self.prefix_cache:
            logger.info("the prefix cache is off: no state of recurrent layers is kept")
        self._border = math.lcm(table.page_size, STATE_CHUNK) if states and prefix_cache else 0
        self.short_context = short_context
        self.running: list[Request] = []
        """Sorted by priority and arrival."""
        self.waiting: list[Request] = []
        """Sorted by priority and arrival."""
        self.n_preemptions = 0
        self._chains: dict[int, HashChain] = {}  # of waiting requests
        self.numbers = itertools.count()
        """Numbers of further sequences of the block table."""

    # ---- prefix cache -------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Enter the computed pages of a request into the prefix cache, if there is one."""
        if not self.prefix_cache or request.error is not None:
            return
        if self.table.has_full_page(request.id):
            n = request.n_computed
            keep = not request.is_generating and self._next_border(request, n - 1) == n
            self.table.commit(request.id, request.prompt + request.ids, keep)

    def _next_border(self, request: Request, after: int) -> int | None:
        """Return the next length of a prompt after which its state is kept.

        These are the last border of the prompt, and 512, 1024, 2048, ... tokens before it: few for
        long prompts, yet prompts that begin alike share nearly half of that or more.
        """
        if not self._border or not self.prefix_cache or not request.uses_prefix_cache:
            return None
        total = request.n_computed + request.n_pending
        last = (total - 1) // self._border * self._border
        n = -(-FIRST_SNAPSHOT // self._border) * self._border
        while n <= after:
            n *= 2
        return min(n, last) if last > after else None

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
        """Add a request, which gets the next number."""
        self.check(request)
        request.id = next(self.numbers)
        self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Remove a request and free its pages."""
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
        self._chains.pop(request.id, None)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Free the pages of a request, which may stay in the prefix cache."""
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
        """Most sequences of the running requests in a decode step."""
        return sum(request.n_sequences for request in self.running)

    def preempt(self, request: Request) -> None:
        """Preempt a running request: free its pages and queue it for recomputation."""
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
        """Return the number of tokens left before a request needs the long rotary factors."""
        if self.short_context is None or request.long:
            return UNLIMITED
        return self.short_context - max(self.table.length(s) for s in request.sequences)

    # ---- steps --------------------------------------------------------------------------------

    def next_step(
        self, in_flight: Collection[int] = (), max_requests: int | None = None
    ) -> list[ScheduledRequest]:
        """Return the next step, with its pages reserved; empty if no request can run.

        Parameters
        ----------
        in_flight : collection of int
            Requests of other steps in flight, which keep their pages.  The caller ensures a free
            page for every running request.
        max_requests : int, optional
            Most requests in the step.
        """
        n_max = len(self.running) + len(self.waiting) if max_requests is None else max_requests
        token_budget = self.max_step_tokens
        step = _Step(token_budget, self.max_logit_rows, token_budget, n_max, in_flight)
        if not in_flight:
            self._preempt_for_priority()
        for request in list(self.running):
            if request.finish_reason is not None:  # in a step just collected
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
        # rows of pooled hidden states follow those with logits (`Step.n_logits`)
        entries = list(step.scheduled.values())
        pooled = [entry for entry in entries if entry.request.pooling is not None]
        if not pooled:
            return entries
        return [entry for entry in entries if entry.request.pooling is None] + pooled

    def _schedule_decode(self, step: _Step, request: Request) -> None:
        """Schedule a decoding request, preempting the last request while pages are short."""
        if len(step.scheduled) >= step.max_requests:
            return
        while not all(self.table.try_reserve(s, 1) for s in request.sequences):
            last = next(r for r in reversed(self.running) if r.id not in step.in_flight)
            step.take_back(last)
            self.preempt(last)
            if last is request:
                return
        entry = step.add_request(request, request.n_pending)
        assert entry is not None  # a step has at least as many tokens as sequences run
        if request.proposer is not None or request.proposed is not None:
            self._schedule_drafts(step, entry)

    def _schedule_drafts(self, step: _Step, entry: ScheduledRequest) -> None:
        """Add draft tokens, leaving a token to every other request."""
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
            self.table.save_state(request.id)
            step.add_drafts(entry, drafts)

    def _proposed(self, request: Request, n: int) -> list[int]:
        """Return at most `n` draft tokens."""
        if request.proposed is not None:
            (n_ids, tokens), request.proposed = request.proposed, None
            return tokens[:n] if n_ids == len(request.ids) else []
        assert request.proposer is not None
        try:
            found = request.proposer([*request.prompt, *request.ids], n)
            known = itertools.takewhile(lambda i: 0 <= i < self.n_vocab, map(int, found))
            return list(itertools.islice(known, n))
        except Exception:  # draft tokens are optional: continue without
            logger.exception("the proposer of request %d raised and is disabled", request.id)
            request.proposer = None
            return []

    def _next_waiting(self) -> list[Request]:
        """Return the waiting requests within `max_sequences`."""
        return self.waiting[: max(0, self.max_sequences - self.n_sequences)]

    def _schedule_prompt(self, step: _Step, request: Request, behind: Sequence[Request]) -> None:
        """Schedule a chunk of a prompt, leaving a share of the budget to those behind it."""
        n = request.n_pending
        border = self._next_border(request, request.n_computed)
        if border is not None and not request.single_step:
            n = min(n, border - request.n_computed)
        if n > step.token_budget > 1 and not request.single_step:
            n = step.token_budget - min(
                sum(r.n_pending for r in behind), step.token_budget // CHUNK_RESERVE
            )
        if request.needs_all_logits and not request.single_step:
            n = min(n, step.logit_budget)
        if self.table.states is not None and n < request.n_pending:
            n = self._whole_chunks(step, request, n)
        step.add_request(request, n)

    def _whole_chunks(self, step: _Step, request: Request, n: int) -> int:
        """Return the tokens of a part of a prompt, which ends with a chunk of recurrent layers.

        It waits if other prompts leave less room than a chunk, and ends anywhere if these are
        generated tokens, of which a later step may have as many.
        """
        whole = n - (request.n_computed + n) % STATE_CHUNK
        others = any(not entry.request.is_generating for entry in step.scheduled.values())
        return max(whole, 0) if whole > 0 or others else n

    def _admit(self, step: _Step) -> None:
        """Admit waiting requests."""
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
        """Preempt running requests of lower priority than the first waiting one."""
        while self.waiting and self.running and not self._can_admit(self.waiting[0]):
            if self.waiting[0].priority >= self.running[-1].priority:
                return
            self.preempt(self.running[-1])

    def _can_admit(self, request: Request) -> bool:
        """Return whether a request fits, leaving a page for each running sequence."""
        if self.n_sequences + request.n_sequences > self.max_sequences:
            return False
        needed = self.table.n_new_pages(self._chain(request), request.n_pending)
        return not self.running or needed + self.n_sequences <= self.table.n_available

    def _chain(self, request: Request) -> HashChain | None:
        """Return the page hashes of a waiting request, or None without prefix cache."""
        if not self.prefix_cache or not request.uses_prefix_cache:
            return None
        if request.id not in self._chains:
            text = request.cache_salt.encode("utf-8", "surrogatepass")  # of JSON
            more = array("i", request.encoder_ids or ()).tobytes() + text
            salt = (blake2b(more).digest() if more else b"") + b"long" * request.long
            self._chains[request.id] = self.table.chain([*request.prompt, *request.ids], salt)
        return self._chains[request.id]
