"""Contrastive search: of the most probable tokens the one least like what was said.

Y. Su et al., "A Contrastive Framework for Neural Text Generation", NeurIPS 2022, arXiv:2202.06417.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbflow.decoding.strategy import check_range


@dataclass(frozen=True)
class ContrastiveSearch:
    """Parameters of a contrastive search."""

    top_k: int = 4
    """How many tokens are compared."""
    penalty_alpha: float = 0.6
    """Weight of the likeness; 0 is greedy."""

    def __post_init__(self) -> None:
        check_range("contrastive", "top_k", self.top_k, 1, 4096)
        check_range("contrastive", "penalty_alpha", self.penalty_alpha, 0.0, 1.0)

    def choose(self, probs: np.ndarray, hidden: np.ndarray, before: np.ndarray) -> int:
        r"""Return which candidate comes next, equation 5 of the paper.

        .. math:: \arg\max_v \; (1 - \alpha) \, p_v - \alpha \max_j \cos(h_v, h_j)

        Parameters
        ----------
        probs : array, shape (k,)
            Probabilities of the candidates.
        hidden : array, shape (k, E)
            Last hidden state of each candidate, as the next token.
        before : array, shape (T, E)
            Last hidden states of all tokens so far.
        """
        likeness = (_unit(hidden) @ _unit(before).T).max(axis=1)
        alpha = self.penalty_alpha
        return int(np.argmax((1.0 - alpha) * probs - alpha * likeness))


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return rows of length 1, float64."""
    rows = rows.astype(np.float64)
    result: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return result
