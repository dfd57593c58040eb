"""Beam search with the scores, length penalty and end condition of Hugging Face's ``generate``."""

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
    """Number of beams."""
    length_penalty: float = 1.0
    """The sum of log-probabilities is divided by the length to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: stop at the `num_beams`-th finished hypothesis; False: when the best running one scores
    below the worst finished one; "never": when it cannot exceed it any more."""
    n: int = 1
    """Number of results, best first."""

    name: ClassVar[str] = "beam"
    needs_hidden: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_range("beam", "num_beams", self.num_beams, 1, 4096)
        if not 1 <= self.n <= self.num_beams:
            raise UsageError(
                f"n must be in 1..num_beams, 1..{self.num_beams}, got {self.n}; use more beams",
                "n",
            )
        check_range("beam", "length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise UsageError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}',
                "early_stopping",
            )

    @property
    def n_sequences(self) -> int:
        return self.num_beams

    @property
    def n_found(self) -> int:
        return self.n

    def n_candidates(self, n_end_ids: int) -> int:
        return max(2, 1 + n_end_ids) * self.num_beams  # also if the best ones are end tokens

    def begin(self, max_tokens: int, end_ids: Collection[int], n_top: int = 0) -> Beams:
        return Beams(self, max_tokens, end_ids, n_top)


@dataclass(frozen=True)
class Hypothesis:
    """Hypothesis of a beam search."""

    ids: tuple[int, ...] = ()
    """New tokens, including the end token."""
    score: float = 0.0
    """Sum of log-probabilities; with length penalty once finished."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each token."""
    top_tokens: tuple[Top, ...] = ()
    """Most probable tokens at each position."""

    @property
    def continuation(self) -> Continuation:
        """Finished continuation."""
        steps = zip(self.ids, self.logprobs, self.top_tokens, strict=True)
        return Continuation(tuple(Step(*step) for step in steps), self.score)


class Beams:
    """State of a beam search; parameters as in `Search.begin`."""

    def __init__(
        self, search: BeamSearch, max_tokens: int, end_ids: Collection[int], n_top: int = 0
    ) -> None:
        self.search = search
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._n_top = n_top
        self.running = [Hypothesis()]
        """Running hypotheses, best first."""
        self.parents: list[int] = []
        """Index of the previous hypothesis that each of `running` extends."""
        self.finished: list[Hypothesis] = []
        """The best that have ended, best first; at most `num_beams`."""
        self.done = False
        """True when the search has ended."""

    @property
    def tokens(self) -> list[int]:
        """The last token of each running continuation."""
        return [h.ids[-1] for h in self.running]

    @property
    def found(self) -> list[Continuation]:
        """The best that have ended, at most `BeamSearch.n`."""
        return [h.continuation for h in self.finished[: self.search.n]]

    def best_so_far(self) -> list[Continuation]:
        """Return the best finished and running hypotheses."""
        going = [dataclasses.replace(h, score=self._score(h)) for h in self.running if h.ids]
        best = sorted([*self.finished, *going], key=lambda h: -h.score)
        return [h.continuation for h in best[: self.search.n]]

    def _score(self, h: Hypothesis) -> float:
        """Return the score with length penalty."""
        return _penalized(h.score, len(h.ids), self.search.length_penalty)

    def advance(
        self,
        logprobs: np.ndarray,
        ids: np.ndarray | None = None,
        similarity: np.ndarray | None = None,
    ) -> list[Step]:
        """Advance by one token; no token is final before the end, so the result is empty."""
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
            before = self.running[parent]
            token = column if ids is None else int(ids[parent, column])
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
        """Add finished hypotheses that are among the best."""
        n, search = self.search.num_beams, self.search
        if search.early_stopping is True and len(self.finished) == n:
            return
        for h in ended:
            self.finished.append(dataclasses.replace(h, score=self._score(h)))
        self.finished = sorted(self.finished, key=lambda h: -h.score)[:n]

    def _is_done(self) -> bool:
        """Return whether the search has ended."""
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
    """Return ``score / length**penalty``, also where the power overflows."""
    if not score:
        return score
    try:
        return float(score / length**penalty)
    except OverflowError:  # of the power; scores are negative
        return -0.0
    except ZeroDivisionError:
        return -math.inf
