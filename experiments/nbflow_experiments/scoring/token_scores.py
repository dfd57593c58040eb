"""Per-token scores: negative log-likelihood, KL divergence, top-1 agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

import nbflow_kernels as nk


@dataclass(frozen=True)
class Scores:
    """One number per scored token, in the order of the text."""

    nll: np.ndarray
    """-ln p(token), float64 (n,)."""
    reference_nll: np.ndarray
    """-ln p(token) of the reference, float64 (n,); empty without a reference."""
    divergence: np.ndarray
    """KL(reference || model) in nats, float64 (n,); empty without a reference."""
    same_top: np.ndarray
    """True where both give the highest logit to the same token, bool (n,); empty without one."""

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Concatenate the scores of consecutive windows."""
        if not parts:
            return cls(np.empty(0), np.empty(0), np.empty(0), np.empty(0, bool))
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def score(logits: np.ndarray, targets: np.ndarray, reference: np.ndarray | None = None) -> Scores:
    """Score logits against target tokens.

    Returns
    -------
    Scores
        Sums over the vocabulary are float64 over float32 exponentials: accurate to 1e-6 nat.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    ids = np.ascontiguousarray(targets, np.int32)
    nll = -nk.token_log_probs(logits, ids)
    if reference is None:
        return Scores(nll, np.empty(0), np.empty(0), np.empty(0, bool))
    reference = np.ascontiguousarray(reference, np.float32)
    return Scores(
        nll,
        -nk.token_log_probs(reference, ids),
        nk.kl_divergence(reference, logits),
        nk.top1_agreement(reference, logits),
    )
