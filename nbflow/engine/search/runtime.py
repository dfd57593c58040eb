"""Searches within engine steps: hypotheses are sequences of a step like any other.

The rank with the head computes the candidates of each hypothesis and the similarity of hidden
states, and sends only these.  Every rank then advances the search (`nbflow.engine.search.base`)
alike, and forks its sequences in the block table, which share pages of common prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from nbflow.engine.request import Request
from nbflow.engine.sampler import top_log_probabilities
from nbflow.engine.scheduler import ScheduledRequest
from nbflow.engine.search.base import Step
from nbflow.engine.search.contrastive import History
from nbflow.kv_cache import BlockTable
from nbflow.sampling.strategy import no_distribution


def empty_rows(scheduled: Sequence[ScheduledRequest], n_vocab: int) -> list[np.ndarray]:
    """Allocate the candidates of the searches of a step, float64 (B, 1 + 2 K) each.

    A row for each hypothesis: similarity, K most probable tokens, their log-probabilities.
    """
    found = []
    for entry in scheduled:
        request = entry.request
        if request.search is not None and entry.emits_token:
            wanted = max(request.search.n_candidates(len(request.stop_ids)), request.n_top_logprobs)
            wanted += len(request.banned_ids)
            n_rows = len(request.branches) or 1
            found.append(np.full((n_rows, 1 + 2 * min(wanted, n_vocab)), math.nan))
    return found


def compute_rows(
    array: np.ndarray | None,
    entry: ScheduledRequest,
    logits: np.ndarray,
    hidden: Callable[[], np.ndarray],
    rows: slice,
) -> None:
    """Fill in the candidates of a search.

    `array` is its array from `empty_rows`, None while the prompt is processed; `logits` are those
    of its `rows`, `hidden` returns the hidden states of all rows of the step.
    """
    request, similarity = entry.request, None
    assert request.search is not None
    if request.search.needs_hidden:
        similarity = _compare(request, hidden()[rows])
    if array is not None:
        some = logits[len(logits) - len(array) :]  # the last rows
        ids, logprobs = top_log_probabilities(some, (array.shape[1] - 1) // 2)
        n = ids.shape[1]
        array[:, 1 : 1 + n], array[:, 1 + n :] = ids, logprobs
        if similarity is not None:
            array[:, 0] = similarity


def _compare(request: Request, hidden: np.ndarray) -> np.ndarray | None:
    """Record the hidden states of the prompt, or return the similarity of the candidates."""
    if request.history is None or (request.n_computed == 0 and not request.branches):
        request.history = History()
    if not request.branches:
        request.history.add(hidden)
        return None
    return request.history.similarity(hidden)


def advance(request: Request, row: np.ndarray) -> list[Step]:
    """Advance a search with its candidates; return the tokens that are final."""
    assert request.search is not None
    n = (row.shape[1] - 1) // 2
    if not np.isfinite(row[:, 1 + n]).all():
        request.fail(no_distribution())
        return []
    if request.search_state is None:
        left = request.max_tokens - len(request.ids)
        request.search_state = request.search.begin(left, request.stop_ids, request.n_top_logprobs)
    state = request.search_state
    ids, logprobs = row[:, 1 : 1 + n].astype(np.int64), row[:, 1 + n :]
    forced = _forced(request)
    if forced:
        ids, logprobs = _only(forced, ids, logprobs)
    elif request.banned_ids:
        ids, logprobs = _without(request.banned_ids, ids, logprobs)
    steps = state.advance(logprobs, ids, row[:, 0])
    request.n_advanced += 1
    for step in steps:
        request.accept(step.token, step.logprob, step.top)
    if state.done:
        request.found = state.found
        for step in state.found[0].steps:
            request.accept(step.token, step.logprob, step.top)
    return steps


def _forced(request: Request) -> tuple[int, ...]:
    """Return the only tokens that may come next; empty for all."""
    if request.forced_eos_ids and request.n_advanced == request.max_tokens - 1:
        return request.forced_eos_ids
    if request.forced_bos_id is not None and request.n_advanced == 0:
        return (request.forced_bos_id,)
    return ()


def _only(
    forced: tuple[int, ...], ids: np.ndarray, logprobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return candidates of which only the forced ones are possible, with log-probability 0.

    The others stay, since a search takes a number of them.
    """
    ids, logprobs = ids.copy(), np.full_like(logprobs, -math.inf)
    n = min(len(forced), ids.shape[1])
    ids[:, :n], logprobs[:, :n] = forced[:n], 0.0
    return ids, logprobs


def _without(
    banned: Collection[int], ids: np.ndarray, logprobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidates of each row with banned ones last and -inf."""
    is_banned = np.isin(ids, list(banned))
    order = np.argsort(is_banned, axis=1, kind="stable")
    logprobs = np.where(is_banned, -math.inf, logprobs)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)


def fork_sequences(
    request: Request, table: BlockTable, numbers: Iterator[int]
) -> list[tuple[int, int]]:
    """Fork and drop the sequences of a search; return the forked ones and their copies."""
    assert request.search_state is not None
    held, free, forks = request.sequences, set(request.sequences), list[tuple[int, int]]()
    following = []
    for parent in request.search_state.parents:
        sequence = held[parent]
        if sequence in free:  # the first child continues in place
            free.discard(sequence)
        else:
            new = next(numbers)
            table.fork(sequence, new)
            forks.append((sequence, new))
            sequence = new
        following.append(sequence)
    for sequence in free:
        table.drop(sequence)
    if request.history is not None and request.branches:
        request.history.take(request.search_state.parents[0])
    request.branches = following
    return forks
