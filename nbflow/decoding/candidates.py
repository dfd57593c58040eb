"""The tokens that may come next, with their scores, as samplers see them one after the other."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.errors import UsageError
from nbflow_kernels.sampling.philox import uniform


class Candidates:
    """Tokens and logits; float64, so that the order of sums does not decide what is kept.

    Parameters
    ----------
    logits : array of float32, shape (V,)
        Scores of the vocabulary; tokens of -inf are no candidates.

    Raises
    ------
    UsageError
        If there is a NaN or +inf, or no candidate.
    """

    def __init__(self, logits: np.ndarray) -> None:
        self.ids = np.flatnonzero(logits > -np.inf)
        self.logits = logits[self.ids].astype(np.float64)
        self.n_vocab = len(logits)
        if np.isnan(logits).any() or not len(self.ids) or np.isposinf(self.logits.max()):
            raise UsageError(
                "the model's logits have a NaN or an infinity, or every token is forbidden, so "
                "that no token can be drawn; check the constraints, or try another weights= or kv="
            )
        self._sorted = False

    def __len__(self) -> int:
        return len(self.ids)

    def sort(self) -> None:
        """Put the best first; the lowest id among equals."""
        if not self._sorted:
            self.take(np.argsort(-self.logits, kind="stable"))
            self._sorted = True

    def take(self, chosen: np.ndarray | slice) -> None:
        """Keep these places, in this order."""
        self.ids, self.logits = self.ids[chosen], self.logits[chosen]

    def first(self, n: int) -> None:
        """Keep the `n` best, best first."""
        if not self._sorted and n < len(self) // 2:
            # a stable sort of few: all above the n-th largest, and the first of its equals
            bound = np.partition(self.logits, len(self) - n)[len(self) - n]
            above = np.flatnonzero(self.logits > bound)
            equal = np.flatnonzero(self.logits == bound)[: n - len(above)]
            self.take(np.sort(np.concatenate([above, equal])))
        self.sort()
        self.take(slice(0, n))

    def rescore(self, logits: np.ndarray) -> None:
        """Give the candidates other logits."""
        self.logits = logits
        self._sorted = False

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
