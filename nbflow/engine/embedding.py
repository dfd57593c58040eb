"""Embeddings: the hidden states of a text, pooled into one vector.

A text is a request without new tokens (`Request.pooling`).  The scheduler reads its prompt in
pieces, in steps that it shares with requests that generate.  The rank with the head keeps what is
pooled so far, and sends every rank the vector when the prompt has been read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nbflow.engine.request import Request
from nbflow.engine.scheduler import ScheduledRequest
from nbflow_kernels.errors import UsageError


def empty_vectors(works: Sequence[ScheduledRequest], hidden_size: int) -> NDArray[np.float32]:
    """Return room for the vectors of the texts whose prompt ends in this step."""
    return np.zeros((sum(work.ends_pooling for work in works), hidden_size), np.float32)


def pool(
    vectors: NDArray[np.float32], works: Sequence[ScheduledRequest], states: NDArray[np.float32]
) -> None:
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


def token_types(works: Sequence[ScheduledRequest]) -> list[int] | None:
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


def vector_of(request: Request) -> NDArray[np.float32]:
    """Return the vector of a request that has ended; raise if it did not come to its end."""
    if request.error is not None:
        raise request.error
    if request.vector is None:
        raise UsageError(f"the text was not read to its end: {request.finish_reason}")
    return request.vector
