"""The tokens that may come next, with their scores, as samplers see them one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbflow_kernels.arrays import on_host
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import top_k
from nbflow_kernels.sampling.cpu_philox import uniform

MIN_TEMPERATURE = 1e-6
"""Lower temperatures are this one, at which the best token is the only one."""


@dataclass(frozen=True)
class TopCandidates:
    """The best tokens of a row of logits, which is all that a device sends of it."""

    n_vocab: int
    """Columns of the row."""
    ids: np.ndarray
    """int32 (n,): the tokens, best first, the lowest id among equals; -1 if the row has a NaN."""
    logits: np.ndarray
    """float32 (n,): their scores."""

    def first(self, n: int) -> TopCandidates:
        """Return the `n` best."""
        return TopCandidates(self.n_vocab, self.ids[:n], self.logits[:n])


def top_candidates(logits: np.ndarray, n: int) -> list[TopCandidates]:
    """Return the `n` best tokens of each row of logits, float32 (B, V), on a CUDA device."""
    n_vocab = logits.shape[1]
    values, ids = (on_host(array) for array in top_k(logits, min(n, n_vocab), sorted=True))
    return [TopCandidates(n_vocab, *row) for row in zip(ids, values, strict=True)]


class Candidates:
    """Tokens and logits; float64, so that the order of sums does not decide what is kept.

    Parameters
    ----------
    logits : array of float32, shape (V,), or Shortlist
        Scores of the vocabulary; tokens of -inf are no candidates.  Of a shortlist: as if the
        others were -inf.

    Raises
    ------
    UsageError
        If there is a NaN or +inf, or no candidate.
    """

    def __init__(self, logits: np.ndarray | TopCandidates) -> None:
        if isinstance(logits, TopCandidates):
            best = logits.logits[0] if logits.ids[0] >= 0 else np.nan
        else:
            best = logits.max()
        if not np.isfinite(best):  # NaN wins, too
            raise UsageError(
                "the model's logits have a NaN or an infinity, or every token is forbidden, so "
                "that no token can be drawn; check the constraints, or try another weights= or kv="
            )
        self._row: np.ndarray | None = None
        """The float32 row as long as all of it is there."""
        self._ids: np.ndarray = np.empty(0, np.int64)
        self._logits: np.ndarray = np.empty(0)
        self._sorted = False
        if isinstance(logits, TopCandidates):
            self.n_vocab = logits.n_vocab
            by_id = np.argsort(logits.ids)
            by_id = by_id[logits.logits[by_id] > -np.inf]
            self._ids = logits.ids[by_id].astype(np.int64)
            self._logits = logits.logits[by_id].astype(np.float64)
        else:
            self.n_vocab, self._row = len(logits), logits

    @property
    def ids(self) -> np.ndarray:
        """The tokens."""
        self._unpack()
        return self._ids

    @property
    def logits(self) -> np.ndarray:
        """Their scores, float64."""
        self._unpack()
        return self._logits

    def _unpack(self) -> None:
        if self._row is not None:
            row, self._row = self._row, None
            if row.min() > -np.inf:
                self._ids, self._logits = np.arange(len(row)), row.astype(np.float64)
            else:
                self._ids = np.flatnonzero(row > -np.inf)
                self._logits = row[self._ids].astype(np.float64)

    def __len__(self) -> int:
        return len(self.ids)

    def sort(self) -> None:
        """Put the best first; the lowest id among equals."""
        if not self._sorted:
            self.take(np.argsort(-self.logits, kind="stable"))
            self._sorted = True

    def take(self, chosen: np.ndarray | slice) -> None:
        """Keep these places, in this order."""
        self._ids, self._logits = self.ids[chosen], self.logits[chosen]

    def first(self, n: int) -> None:
        """Keep the `n` best, best first."""
        if self._row is not None and n < self.n_vocab // 2:
            values, ids = top_k(self._row[None], n, sorted=True)
            kept = values[0] > -np.inf
            self._row = None
            self._ids, self._logits = ids[0][kept], values[0][kept].astype(np.float64)
            self._sorted = True
            return
        if not self._sorted and n < len(self) // 2:
            # a stable sort of few: all above the n-th largest, and the first of its equals
            bound = np.partition(self.logits, len(self) - n)[len(self) - n]
            above = np.flatnonzero(self.logits > bound)
            equal = np.flatnonzero(self.logits == bound)[: n - len(above)]
            self.take(np.sort(np.concatenate([above, equal])))
        self.sort()
        self.take(slice(0, n))

    def reaching(self, mass: float, least: int = 1) -> None:
        """Keep the fewest best whose probabilities sum to `mass`, at least `least`; best first."""
        weights = np.exp(self.logits - self.logits.max())
        wanted, n = mass * weights.sum(), len(self)
        for size in (256, 4096, n):  # mostly a few hundred are enough
            best = weights if size >= n else np.partition(weights, n - size)[n - size :]
            reached = np.flatnonzero(np.cumsum(-np.sort(-best)) >= wanted)
            if len(reached):
                n = int(reached[0]) + 1
                break
        self.first(max(n, least))

    def rescore(self, logits: np.ndarray) -> None:
        """Give the candidates other logits, in another order of merit."""
        self._unpack()
        self._logits, self._sorted = logits, False

    def scale(self, factor: float) -> None:
        """Multiply the logits."""
        self._unpack()
        self._logits = self._logits * factor

    def keep(self, mask: np.ndarray) -> None:
        """Keep what the mask says, in the present order."""
        self.take(np.flatnonzero(mask))

    def probs(self) -> np.ndarray:
        """Return the softmax of the logits."""
        weights = np.exp(self.logits - self.logits.max())
        result: np.ndarray = weights / weights.sum()
        return result

    def dense(self) -> np.ndarray:
        """Return the probabilities of the whole vocabulary, float32 (V,)."""
        row = np.zeros(self.n_vocab, np.float32)
        row[self.ids] = self.probs()
        return row

    def draw(self, u: float) -> int:
        """Return the candidate where the running sum of probabilities passes `u` in [0, 1)."""
        sums = np.cumsum(self.probs())
        place = int(np.searchsorted(sums, u * sums[-1], side="right"))
        return int(self.ids[min(place, len(self) - 1)])


def random_number(seed: int, offset: int, index: int = 0) -> float:
    """Return number `index` in [0, 1) of the draw `offset` of a request's seed."""
    return float(uniform(np.uint64(seed), np.uint64(offset), np.uint64(index)))
