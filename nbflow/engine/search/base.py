"""Interfaces of beam search and contrastive search.

A search gets the most probable next tokens of each hypothesis and decides which hypotheses continue
with which of them.  It is deterministic and independent of device arrays, so that every rank makes
the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Top = list[tuple[int, float]]
"""Tokens and their log-probabilities, the most probable first."""


@dataclass(frozen=True)
class Step:
    """Token of a continuation with its log-probability."""

    token: int
    logprob: float
    top: Top
    """Most probable tokens at its position."""


@dataclass(frozen=True)
class Continuation:
    """Finished continuation."""

    steps: tuple[Step, ...]
    """Tokens, including the end token."""
    score: float
    """Score of the ranking."""


class Search(Protocol):
    """Parameters of a search."""

    @property
    def name(self) -> str:
        """Name in requests."""

    @property
    def n_sequences(self) -> int:
        """Most hypotheses at once."""

    @property
    def needs_hidden(self) -> bool:
        """True if `SearchState.advance` needs the similarity of hidden states."""

    @property
    def n_found(self) -> int:
        """Number of results."""

    def n_candidates(self, n_end_ids: int) -> int:
        """Return the number of candidates per hypothesis, given the number of end tokens."""

    def begin(self, max_tokens: int, end_ids: Collection[int], n_top: int) -> SearchState:
        """Return the initial state, with one empty hypothesis of at most `max_tokens` tokens.

        Each `Step` has the `n_top` most probable tokens.
        """


class SearchState(Protocol):
    """State of a running search."""

    @property
    def parents(self) -> list[int]:
        """Index of each hypothesis's parent in the previous step."""

    @property
    def tokens(self) -> list[int]:
        """Last token of each hypothesis, to be run next."""

    @property
    def found(self) -> list[Continuation]:
        """Finished continuations, best first."""

    def best_so_far(self) -> list[Continuation]:
        """Return the results if the search ended now."""

    @property
    def done(self) -> bool:
        """True when the search has ended."""

    def advance(
        self,
        logprobs: np.ndarray,
        ids: np.ndarray | None = None,
        similarity: np.ndarray | None = None,
    ) -> list[Step]:
        """Advance by one token; return the tokens common to all further hypotheses.

        Parameters
        ----------
        logprobs : array, shape (B, K)
            Log-probabilities of the candidates of each hypothesis, most probable first.
        ids : array of int, shape (B, K), optional
            The candidates; by default column k is token k.
        similarity : array, shape (B,), optional
            Largest cosine between the hidden state of each hypothesis and those before it.
        """


def top_tokens(logprobs: np.ndarray, ids: np.ndarray | None, n: int) -> list[Top]:
    """Return the `n` most probable tokens of each row; parameters as in `SearchState.advance`."""
    if not n:
        return [[] for _ in logprobs]
    if ids is None:
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :n]
        ids, logprobs = order, np.take_along_axis(logprobs, order, axis=1)
    return [
        list(zip(i[:n].tolist(), x[:n].tolist(), strict=True))
        for i, x in zip(ids, logprobs, strict=True)
    ]
