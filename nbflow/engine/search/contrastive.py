"""Contrastive search: a probable token whose hidden state differs from the context.

Y. Su et al., "A Contrastive Framework for Neural Text Generation", NeurIPS 2022, arXiv:2202.06417.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nbflow.engine.search.base import Continuation, Step, top_tokens
from nbflow.sampling.strategy import check_range


@dataclass(frozen=True)
class ContrastiveSearch:
    """Parameters of a contrastive search."""

    top_k: int = 4
    """Number of candidates."""
    penalty_alpha: float = 0.6
    """Weight of the similarity; 0 is greedy."""

    name: ClassVar[str] = "contrastive"
    needs_hidden: ClassVar[bool] = True
    n_found: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_range("contrastive", "top_k", self.top_k, 1, 4096)
        check_range("contrastive", "penalty_alpha", self.penalty_alpha, 0.0, 1.0)

    @property
    def n_sequences(self) -> int:
        return self.top_k

    def n_candidates(self, n_end_ids: int) -> int:
        return self.top_k

    def begin(self, max_tokens: int, end_ids: Collection[int], n_top: int = 0) -> Contrast:
        return Contrast(self, n_top)

    def choose(self, probs: np.ndarray, similarity: np.ndarray) -> int:
        r"""Return the index of the next token, equation 5 of the paper.

        .. math:: \arg\max_v \; (1 - \alpha) \, p_v - \alpha \max_j \cos(h_v, h_j)

        The similarity is the largest cosine of each candidate's hidden state with those before it.
        """
        alpha = self.penalty_alpha
        return int(np.argmax((1.0 - alpha) * probs - alpha * similarity))


class Contrast:
    """State of a contrastive search; its hypotheses are the candidates."""

    def __init__(self, search: ContrastiveSearch, n_top: int = 0) -> None:
        self._search = search
        self._n_top = n_top
        self._candidates: list[Step] = []
        self.parents: list[int] = []
        self.found: list[Continuation] = []
        """Empty: every chosen token is final."""
        self.done = False

    @property
    def tokens(self) -> list[int]:
        """The candidates."""
        return [step.token for step in self._candidates]

    def best_so_far(self) -> list[Continuation]:
        return self.found

    def advance(
        self,
        logprobs: np.ndarray,
        ids: np.ndarray | None = None,
        similarity: np.ndarray | None = None,
    ) -> list[Step]:
        """Choose a candidate and find its successors; see `SearchState`.

        The first call has one row and only finds candidates.
        """
        best, taken = 0, list[Step]()
        if self._candidates:
            assert similarity is not None
            probs = np.exp([step.logprob for step in self._candidates])
            best = self._search.choose(probs, similarity)
            taken = [self._candidates[best]]
        row, its_ids = logprobs[best : best + 1], None if ids is None else ids[best : best + 1]
        (following,) = top_tokens(row, its_ids, max(self._search.top_k, self._n_top))
        top = following[: self._n_top]
        self._candidates = [
            Step(token, logprob, top) for token, logprob in following[: self._search.top_k]
        ]
        self.parents = [best] * len(self._candidates)
        return taken


class History:
    """Unit-length hidden states of the context."""

    def __init__(self) -> None:
        self._rows = np.zeros((0, 0), np.float32)  # of length 1; the first `_n` of them
        self._n = 0
        self._last = self._rows

    def __len__(self) -> int:
        return self._n

    def add(self, hidden: np.ndarray) -> None:
        """Append hidden states of tokens, float32 (T, E)."""
        self._append(_unit(hidden))

    def similarity(self, hidden: np.ndarray) -> np.ndarray:
        """Return the largest cosine of each state (k, E) with those of the context."""
        self._last = _unit(hidden)
        result: np.ndarray = (self._last @ self._rows[: self._n].T).max(axis=1)
        return result

    def take(self, index: int) -> None:
        """Append one of the states of the last `similarity` call."""
        self._append(self._last[index : index + 1])

    def _append(self, rows: np.ndarray) -> None:
        needed = self._n + len(rows)
        if needed > len(self._rows):  # doubled, for amortized O(1)
            pages_after_growth = np.empty(
                (max(needed, 2 * len(self._rows), 64), rows.shape[1]), np.float32
            )
            pages_after_growth[: self._n] = self._rows[: self._n].reshape(self._n, rows.shape[1])
            self._rows = pages_after_growth
        self._rows[self._n : needed] = rows
        self._n = needed


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return rows of length 1, float32, normalized in float64."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-30), np.float32)
