"""Beam search: the continuations of greatest probability that a search over several finds.

Scores, length penalty and the end of the search are those of Hugging Face's ``generate``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from nbflow.engine.search.base import Continuation, Step, Top, top_tokens
from nbflow.sampling.strategy import check_range
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class BeamSearch:
    """Parameters of a beam search."""

    num_beams: int = 4
    """How many continuations are followed."""
    length_penalty: float = 1.0
    """The sum of log-probabilities is divided by the length to this power."""
    early_stopping: bool | Literal["never"] = False
    """True stops with the `num_beams`-th end; False when the best that goes on is worse, at its
    present length, than the worst that has ended; "never" when it cannot become better."""
    n: int = 1
    """How many continuations are returned, best first."""

    name: ClassVar[str] = "beam"
    """See `nbflow.engine.search.base.Search`."""
    needs_hidden: ClassVar[bool] = False
    """See `nbflow.engine.search.base.Search`."""

    def __post_init__(self) -> None:
        check_range("beam", "num_beams", self.num_beams, 1, 4096)
        if not 1 <= self.n <= self.num_beams:
            raise UsageError(
                f"n must be in 1..num_beams, 1..{self.num_beams}, got {self.n}; follow more beams"
            )
        check_range("beam", "length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise UsageError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}'
            )

    @property
    def n_sequences(self) -> int:
        """See `nbflow.engine.search.base.Search`."""
        return self.num_beams

    @property
    def n_found(self) -> int:
        """See `nbflow.engine.search.base.Search`."""
        return self.n

    def n_candidates(self, n_end_ids: int) -> int:
        """See `nbflow.engine.search.base.Search`: enough if every beam's best tokens all end it."""
        return max(2, 1 + n_end_ids) * self.num_beams

    def begin(self, max_tokens: int, end_ids: Collection[int], n_top: int = 0) -> Beams:
        """See `nbflow.engine.search.base.Search`."""
        return Beams(self, max_tokens, end_ids, n_top)


@dataclass(frozen=True)
class Hypothesis:
    """A continuation."""

    ids: tuple[int, ...] = ()
    """New tokens, the end token too."""
    score: float = 0.0
    """Sum of the log-probabilities; of an ended one, divided by the length penalty."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token."""
    top_tokens: tuple[Top, ...] = ()
    """The most probable tokens in the place of each."""

    @property
    def continuation(self) -> Continuation:
        """What has been found."""
        steps = zip(self.ids, self.logprobs, self.top_tokens, strict=True)
        return Continuation(tuple(Step(*step) for step in steps), self.score)


class Beams:
    """The state of a search.

    Parameters
    ----------
    search : BeamSearch
        Its parameters.
    max_tokens : int
        Continuations end with this many new tokens.
    end_ids : collection of int
        Tokens that end a continuation.
    n_top : int
        How many of the most probable tokens are told with each token.
    """

    def __init__(
        self, search: BeamSearch, max_tokens: int, end_ids: Collection[int], n_top: int = 0
    ) -> None:
        self.search = search
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._n_top = n_top
        self.running = [Hypothesis()]
        """Continuations that go on, best first."""
        self.parents: list[int] = []
        """For each of `running`, which of the former ones it continues."""
        self.finished: list[Hypothesis] = []
        """The best that have ended, best first; at most `num_beams`."""
        self.done = False
        """Whether the search is over."""

    @property
    def tokens(self) -> list[int]:
        """The last token of each running continuation."""
        return [h.ids[-1] for h in self.running]

    @property
    def found(self) -> list[Continuation]:
        """The best that have ended, at most `BeamSearch.n`."""
        return [h.continuation for h in self.finished[: self.search.n]]

    def best_so_far(self) -> list[Continuation]:
        """Return the best of those that have ended and those that go on."""
        going = [dataclasses.replace(h, score=self._score(h)) for h in self.running if h.ids]
        best = sorted([*self.finished, *going], key=lambda h: -h.score)
        return [h.continuation for h in best[: self.search.n]]

    def _score(self, h: Hypothesis) -> float:
        """Return a sum of log-probabilities with the length penalty."""
        return _penalized(h.score, len(h.ids), self.search.length_penalty)

    def advance(
        self,
        logprobs: np.ndarray,
        ids: np.ndarray | None = None,
        similarity: np.ndarray | None = None,
    ) -> list[Step]:
        """Go on by one token; see `nbflow.engine.search.base.SearchState`.

        Nothing is certain before the end, so nothing is returned.
        """
        n = self.search.num_beams
        sums = logprobs.astype(np.float64) + np.array([[h.score] for h in self.running])
        wanted = min(self.search.n_candidates(len(self._end_ids)), sums.size)
        flat = sums.ravel()
        best = np.argpartition(-flat, wanted - 1)[:wanted]
        best = best[np.lexsort((best, -flat[best]))]
        top = top_tokens(logprobs, ids, self._n_top)
        going: list[tuple[int, Hypothesis]] = []
        ended: list[Hypothesis] = []
        for place, index in enumerate(best.tolist()):
            parent, column = divmod(index, logprobs.shape[1])
            if flat[index] == -np.inf:
                break
            before, token = (
                self.running[parent],
                column if ids is None else int(ids[parent, column]),
            )
            after = Hypothesis(
                (*before.ids, token),
                float(flat[index]),
                (*before.logprobs, float(logprobs[parent, column])),
                (*before.top_tokens, top[parent]),
            )
            if token in self._end_ids or len(after.ids) >= self._max_tokens:
                if place < n:
                    ended.append(after)
            elif len(going) < n:
                going.append((parent, after))
        self._finish(ended)
        self.running = [hypothesis for _, hypothesis in going]
        self.parents = [parent for parent, _ in going]
        self.done = self._is_done()
        return []

    def _finish(self, ended: list[Hypothesis]) -> None:
        """Take in what has ended, if it is among the best."""
        n, search = self.search.num_beams, self.search
        if search.early_stopping is True and len(self.finished) == n:
            return
        for h in ended:
            self.finished.append(dataclasses.replace(h, score=self._score(h)))
        self.finished = sorted(self.finished, key=lambda h: -h.score)[:n]

    def _is_done(self) -> bool:
        """Return whether no running continuation is to be followed further."""
        search = self.search
        if not self.running:
            return True
        if len(self.finished) < search.num_beams:
            return False
        if search.early_stopping is True:
            return True
        best = self.running[0]
        length = len(best.ids)
        if search.early_stopping == "never" and search.length_penalty > 0.0:
            length = self._max_tokens
        possible = _penalized(best.score, length, search.length_penalty)
        return possible <= self.finished[-1].score


def _penalized(score: float, length: int, penalty: float) -> float:
    """Return ``score / length**penalty``, also where the power is beyond the numbers there are."""
    if not score:
        return score
    try:
        return float(score / length**penalty)
    except OverflowError:  # of the power; scores are negative
        return -0.0
    except ZeroDivisionError:
        return -math.inf
