"""Candidate tokens with logits, on which samplers operate in sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbflow_kernels.arrays import on_host
from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling import top_k
from nbflow_kernels.sampling.cpu_philox import uniform

MIN_TEMPERATURE = 1e-6
"""Smallest temperature, at which sampling is greedy."""


@dataclass(frozen=True)
class TopCandidates:
    """Top tokens of a row of logits, copied from a device instead of the row."""

    n_vocab: int
    """Length of the row."""
    ids: np.ndarray
    """int32 (n,): tokens, best first, ties by id; -1 if the row has a NaN."""
    logits: np.ndarray
    """float32 (n,): their logits."""

    def first(self, n: int) -> TopCandidates:
        """Return the `n` best tokens."""
        return TopCandidates(self.n_vocab, self.ids[:n], self.logits[:n])


def top_candidates(logits: np.ndarray, n: int) -> list[TopCandidates]:
    """Return the `n` top tokens of each row of logits, float32 (B, V), on a CUDA device."""
    n_vocab = logits.shape[1]
    values, ids = (on_host(array) for array in top_k(logits, min(n, n_vocab), sorted=True))
    return [TopCandidates(n_vocab, *row) for row in zip(ids, values, strict=True)]


class Candidates:
    """Candidates with float64 logits, so that results do not depend on the summation order.

    Parameters
    ----------
    logits : array of float32, shape (V,), or TopCandidates
        Logits of the vocabulary; tokens with -inf, or missing in `TopCandidates`, are excluded.

    Raises
    ------
    UsageError
        If there is a NaN or +inf, or all tokens are excluded.
    """

    def __init__(self, logits: np.ndarray | TopCandidates) -> None:
        if isinstance(logits, TopCandidates):
            best = logits.logits[0] if logits.ids[0] >= 0 else np.nan
        else:
            best = logits.max()
        if not np.isfinite(best):  # max propagates NaN
            raise UsageError(
                "the model's logits have a NaN or an infinity, or every token is banned, so "
                "that no token can be sampled; check the bans, or try another weights= or kv="
            )
        self._row: np.ndarray | None = None
        """The float32 row until it is filtered."""
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
        """Token ids."""
        self._unpack()
        return self._ids

    @property
    def logits(self) -> np.ndarray:
        """Logits, float64."""
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
        """Sort by falling logit, ties by id."""
        if not self._sorted:
            self.take(np.argsort(-self.logits, kind="stable"))
            self._sorted = True

    def take(self, chosen: np.ndarray | slice) -> None:
        """Keep the candidates at these indices, in this order."""
        self._ids, self._logits = self.ids[chosen], self.logits[chosen]

    def first(self, n: int) -> None:
        """Keep the `n` best, sorted."""
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
        """Keep the fewest best with probability `mass`, at least `least`, sorted."""
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
        """Replace the logits, which invalidates the order."""
        self._unpack()
        self._logits, self._sorted = logits, False

    def scale(self, factor: float) -> None:
        """Multiply the logits."""
        self._unpack()
        self._logits = self._logits * factor

    def keep(self, mask: np.ndarray) -> None:
        """Keep the masked candidates in order."""
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
        """Sample by inverse CDF at `u` in [0, 1)."""
        sums = np.cumsum(self.probs())
        place = int(np.searchsorted(sums, u * sums[-1], side="right"))
        return int(self.ids[min(place, len(self) - 1)])


def random_number(seed: int, offset: int, index: int = 0) -> float:
    """Return random number `index` in [0, 1) of token `offset` for a seed."""
    return float(uniform(np.uint64(seed), np.uint64(offset), np.uint64(index)))
