"""What every search over several continuations offers: beam search and contrastive search.

A search sees, behind every continuation that it follows, the most probable next tokens, and says
which continuations go on with which of them.  It draws nothing and knows no arrays of the model, so
that every rank can make the same decisions from a few numbers.
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
    """A token of a continuation, and how probable it was."""

    token: int
    logprob: float
    top: Top
    """The most probable tokens in its place."""


@dataclass(frozen=True)
class Continuation:
    """A whole continuation that was found."""

    steps: tuple[Step, ...]
    """Its tokens, the end token too."""
    score: float
    """By which it was chosen."""


class Search(Protocol):
    """The parameters of a search."""

    @property
    def name(self) -> str:
        """What it is called in requests."""

    @property
    def n_sequences(self) -> int:
        """Most continuations that are followed at once."""

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are compared, which `SearchState.advance` gets as likeness."""

    @property
    def n_found(self) -> int:
        """How many continuations it returns."""

    def n_candidates(self, n_end_ids: int) -> int:
        """Return how many of the most probable tokens it looks at, where so many may end it."""

    def begin(self, max_tokens: int, end_ids: Collection[int], n_top: int) -> SearchState:
        """Return a search that follows one continuation: the empty one.

        Parameters
        ----------
        max_tokens : int
            Most new tokens.
        end_ids : collection of int
            Tokens that end a continuation.
        n_top : int
            How many of the most probable tokens each `Step` tells.
        """


class SearchState(Protocol):
    """A search that goes on."""

    @property
    def parents(self) -> list[int]:
        """For each continuation that is followed now, which of the former ones it continues."""

    @property
    def tokens(self) -> list[int]:
        """The last token of each of them, which is to be run next."""

    @property
    def found(self) -> list[Continuation]:
        """What it has found, best first; all of it when it is over."""

    def best_so_far(self) -> list[Continuation]:
        """Return what it would have found if it ended now."""

    @property
    def done(self) -> bool:
        """Whether it is over, unless one of the tokens that it has taken ends the text."""

    def advance(
        self,
        logprobs: np.ndarray,
        ids: np.ndarray | None = None,
        similarity: np.ndarray | None = None,
    ) -> list[Step]:
        """Go on by one token, and return those that no continuation will lack any more.

        Parameters
        ----------
        logprobs : array, shape (B, K)
            Log-probabilities of the most probable next tokens of each continuation that is
            followed, most probable first.
        ids : array of int, shape (B, K), optional
            These tokens; by default column k is token k.
        likeness : array, shape (B,), optional
            Greatest cosine between the hidden state of each and those before it.
        """


def top_tokens(logprobs: np.ndarray, ids: np.ndarray | None, n: int) -> list[Top]:
    """Return the `n` most probable tokens of each row; parameters as of `SearchState.advance`."""
    if not n:
        return [[] for _ in logprobs]
    if ids is None:
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :n]
        ids, logprobs = order, np.take_along_axis(logprobs, order, axis=1)
    return [
        list(zip(i[:n].tolist(), x[:n].tolist(), strict=True))
        for i, x in zip(ids, logprobs, strict=True)
    ]
