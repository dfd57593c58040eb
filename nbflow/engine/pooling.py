"""Embeddings: the hidden states of a text, pooled into one vector.

A text is a request without new tokens (`Request.pooling`).  The scheduler reads its prompt in
pieces, in steps that it shares with requests that generate.  The rank with the head keeps what is
pooled so far, and sends every rank the vector when the prompt has been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nbflow.decoding import Greedy
from nbflow.engine.checks import check_ids, check_types
from nbflow.engine.errors import EngineClosed, QueueFull
from nbflow.engine.request import Request
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from nbflow.engine.engine import Engine
    from nbflow.engine.handle import Handle
    from nbflow.engine.scheduler import Work

POOLINGS = ("mean", "first", "last")


@dataclass(eq=False)
class Pooling:
    """Pooling of one text, and its state on the rank with the head."""

    method: str
    """One of `POOLINGS`."""
    normalize: bool
    """Divide the vector by its length."""
    whole: bool
    """All tokens must run in one step: each sees all others."""
    token_types: list[int] | None = None
    """Types of the tokens, for models that have an embedding for them."""
    total: NDArray[np.float32] | None = None
    """Sum of the hidden states so far, or the only one that is wanted."""

    @property
    def takes_cached(self) -> bool:
        """Return whether pages of the prefix cache may be used."""
        return self.method == "last" and not self.whole and self.token_types is None

    def rows(self, n_done: int, n_tokens: int, n_prompt: int) -> range:
        """Return which of the `n_tokens` tokens behind the first `n_done` are wanted."""
        if self.method == "mean":
            return range(n_tokens)
        wanted = (0 if self.method == "first" else n_prompt - 1) - n_done
        return range(wanted, wanted + 1) if 0 <= wanted < n_tokens else range(0)

    def add(self, states: NDArray[np.float32], n_done: int) -> None:
        """Take the wanted hidden states of a step, in which the prompt went on from `n_done`."""
        if not len(states):
            return
        if self.method != "mean" or n_done == 0:  # 0 again after a preemption
            self.total, states = states[0].copy(), states[1:]
        assert self.total is not None
        for row in states:  # row by row: the sum does not depend on where the steps were cut
            self.total += row

    def vector(self, n_prompt: int) -> NDArray[np.float32]:
        """Return the vector of a text that has been read."""
        assert self.total is not None
        vector = self.total / np.float32(n_prompt) if self.method == "mean" else self.total
        if self.normalize:
            vector = vector / np.linalg.norm(vector)
        return np.asarray(vector, np.float32)


def empty_vectors(works: Sequence[Work], hidden_size: int) -> NDArray[np.float32]:
    """Return room for the vectors of the texts whose prompt ends in this step."""
    return np.zeros((sum(work.ends_pooling for work in works), hidden_size), np.float32)


def pool(vectors: NDArray[np.float32], works: Sequence[Work], states: NDArray[np.float32]) -> None:
    """Take the wanted hidden states of a step, and fill in the vectors of texts that end in it."""
    start = done = 0
    for work in works:
        request, rows = work.request, work.state_rows
        if request.pooling is None:
            continue
        request.pooling.add(states[start : start + len(rows)], request.n_done)
        start += len(rows)
        if work.ends_pooling:
            vectors[done] = request.pooling.vector(len(request.prompt))
            done += 1


def token_types(works: Sequence[Work]) -> list[int] | None:
    """Return the types of a step's tokens, None if all are 0."""
    if not any(work.request.pooling and work.request.pooling.token_types for work in works):
        return None
    types: list[int] = []
    for work in works:
        pooling, first = work.request.pooling, work.request.n_done
        given = None if pooling is None else pooling.token_types
        n = work.n_tokens + len(work.drafts)
        types += [0] * n if given is None else given[first : first + n]
    return types


def embedding_requests(
    spec: ModelSpec,
    sequences: Sequence[Sequence[int] | NDArray[Any]],
    types: Sequence[Sequence[int] | NDArray[Any]] | None,
    pooling: str,
    normalize: bool,
) -> list[Request]:
    """Return a checked request for each of several texts; parameters as of `Model.embed_batch`."""
    if spec.encoder is not None:
        raise UsageError(f"{spec.name} has an encoder and a decoder; use hidden()")
    if pooling not in POOLINGS:
        raise unknown_name("pooling", pooling, POOLINGS)
    texts = [check_ids(spec, ids, room=0) for ids in sequences]
    if types is not None and len(types) != len(texts):
        raise UsageError(
            f"token_types must be given for each of the {len(texts)} texts, got {len(types)}"
        )
    requests = []
    for i, ids in enumerate(texts):
        some = None if types is None else check_types(spec, types[i], len(ids))
        request = Request(ids, 0, Greedy(), wants_logprobs=False)
        request.pooling = Pooling(pooling, normalize, not spec.causal, some)
        requests.append(request)
    return requests


def vector_of(request: Request) -> NDArray[np.float32]:
    """Return the vector of a request that has ended; raise if it did not come to its end."""
    if request.error is not None:
        raise request.error
    if request.vector is None:
        raise UsageError(f"the text was not read to its end: {request.finish_reason}")
    return request.vector


def embed(engine: Engine, requests: Sequence[Request]) -> list[NDArray[np.float32]]:
    """Submit texts to an engine, as many at a time as may wait, and return their vectors."""
    handles: list[Handle] = []
    try:
        for request in requests:
            while True:
                try:
                    handles.append(engine.submit(request))
                    break
                except QueueFull:
                    mine = next((h for h in handles if not h.done), None)
                    if mine is None:  # others fill the queue
                        raise
                    mine.wait()
        for handle in handles:
            handle.wait()
            if handle.finish_reason == "abort":
                raise EngineClosed("the engine has been closed")
        return [vector_of(handle.request) for handle in handles]
    finally:
        for handle in handles:
            if not handle.done:
                handle.cancel()
