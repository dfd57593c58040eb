"""Draft model: proposes draft tokens for all requests of a step at once.

The draft runs on the leading process; other ranks receive its tokens with the step.  It processes a
prompt when the request starts decoding, one chunk between two steps, so that others do not wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from nbflow.engine.evaluator import SequenceEvaluator
from nbflow.engine.interfaces import ModelRunner
from nbflow.engine.request import DraftProposer, Proposals, Request
from nbflow.kv_cache.prefix_cache import common_prefix_len
from nbflow.sampling import Greedy, Strategy

_OWN_STREAM = 0x9E3779B97F4A7C15
"""XORed with a seed for an independent one: 2**64 / golden ratio."""

logger = logging.getLogger(__name__)


class DraftModelProposer:
    """Proposer that runs a smaller model.

    It samples with the strategy of each request if that is compiled, else greedily; with the random
    numbers of the request, or independent ones for rejection sampling (`Request.verifies_chain`).
    `session` opens a session of the draft model (`LLM.session`).
    """

    def __init__(self, draft: ModelRunner, session: Callable[[], SequenceEvaluator]) -> None:
        self.model = draft
        self._open = session
        self._lock = threading.Lock()  # replicas of this process share it
        self._session: SequenceEvaluator | None = None
        self._sequences: dict[Request, int] = {}  # of the session
        self._ids: dict[Request, list[int]] = {}  # tokens of each sequence

    @property
    def max_context(self) -> int:
        """Return the longest sequence of the draft model."""
        return self.model.spec.max_context

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Return at most n draft tokens per request; none while its prompt is processed."""
        with self._lock:
            return self._propose(wanted)

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        pending = self._catch_up([request for request, _ in wanted])
        active = [(r, n) for r, n in wanted if r in pending]
        drafted: dict[Request, list[int]] = {r: [] for r, _ in active}
        probs: dict[Request, list[np.ndarray]] = {r: [] for r, _ in active}
        while active:
            rows = self._run(pending)
            if not any(drafted.values()):  # all tokens so far are the request's own
                assert self._session is not None
                self._session.save_state(*(self._sequences[r] for r in pending))
            for strategy, some in _by_strategy([r for r, _ in active]):
                logits = np.concatenate([rows[r] for r in some])
                for i, token in enumerate(_choose(strategy, logits, some, drafted)):
                    if some[i].verifies_chain:
                        probs[some[i]].append(strategy.distribution(logits[i : i + 1]))
                    drafted[some[i]].append(token)
            active = [(r, n) for r, n in active if len(drafted[r]) < n]
            pending = {r: drafted[r][-1:] for r, _ in active}
        for request, rows_of in probs.items():
            if rows_of:
                request.draft_probs = np.concatenate(rows_of)
        return {r.id: (len(r.ids), tokens) for r, tokens in drafted.items()}

    def release(self, request: Request) -> None:
        """Free the sequence of a finished request."""
        with self._lock:
            sequence = self._sequences.pop(request, None)
            self._ids.pop(request, None)
            if sequence is None or self._session is None or not self.model.workers:
                return
            try:
                self._session.drop(sequence)
            except Exception:  # affects the draft model only
                logger.exception("the draft model raised while releasing a request")

    def _catch_up(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        """Synchronize the draft sequences with the requests; return the tokens left to run.

        At least the last token is left, because its logits are needed.  Requests with more pending
        tokens than a step holds run a chunk and are not in the result.
        """
        if self._session is None:
            self._session = self._open()
        room = self.model.workers[0].max_step_tokens
        pending, pieces = dict[Request, list[int]](), dict[Request, list[int]]()
        for request in requests:
            if request not in self._sequences:
                self._sequences[request] = self._session.begin()
                self._ids[request] = []
            ids, had = [*request.prompt, *request.ids], self._ids[request]
            same = common_prefix_len(had, ids[:-1])
            if same < len(had):
                self._session.truncate(self._sequences[request], same)
                del had[same:]
            new = ids[same:]
            if len(new) <= room:
                pending[request] = new
            elif room > 0:
                pieces[request] = new[:room]
            room -= min(room, len(new))
        if pieces:
            self._run(pieces)
        return pending

    def _run(self, pending: dict[Request, list[int]]) -> dict[Request, np.ndarray]:
        """Run tokens of sequences and return the logits after the last of each."""
        assert self._session is not None
        rows = self._session.run({self._sequences[r]: ids for r, ids in pending.items()}, last=True)
        for request, ids in pending.items():
            self._ids[request] += ids
        return {request: rows[self._sequences[request]].logits for request in pending}


def proposals(requests: Sequence[Request], max_step_tokens: int) -> Proposals:
    """Return draft tokens of the decoding requests, as many as the step can verify."""
    wanted: dict[DraftProposer, list[tuple[Request, int]]] = {}
    decoding = [r for r in requests if r.drafter is not None and r.is_generating]
    room = (max_step_tokens - sum(r.n_sequences for r in requests)) // max(1, len(decoding))
    for request in decoding:
        assert request.drafter is not None
        left = request.max_tokens - len(request.ids) - 1
        context = request.drafter.max_context
        n = min(request.n_proposed, left, room, context - len(request.prompt) - len(request.ids))
        if n > 0:
            wanted.setdefault(request.drafter, []).append((request, n))
    found: Proposals = {}
    for drafter, some in wanted.items():
        try:
            found |= drafter.propose(some)
        except Exception:  # requests continue without their draft
            logger.exception("the draft model raised; its requests continue without it")
            for request, _ in some:
                drafter.release(request)
                request.drafter = None
    return found


def _by_strategy(requests: Sequence[Request]) -> list[tuple[Strategy, list[Request]]]:
    """Group requests by the strategy of the draft."""
    groups: dict[Strategy, list[Request]] = {}
    for request in requests:
        strategy = request.strategy if request.strategy.compiled else Greedy()
        groups.setdefault(strategy, []).append(request)
    return list(groups.items())


def _choose(
    strategy: Strategy,
    logits: np.ndarray,
    requests: Sequence[Request],
    drafted: dict[Request, list[int]],
) -> list[int]:
    """Return the next draft token for each request."""
    seeds = [r.seed ^ (_OWN_STREAM if r.verifies_chain else 0) for r in requests]
    offsets = [len(r.ids) + len(drafted[r]) for r in requests]
    tokens = strategy.choose(logits, np.array(seeds, np.uint64), np.array(offsets, np.uint64))
    chosen: list[int] = tokens.tolist()
    return chosen
