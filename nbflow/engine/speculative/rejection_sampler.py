"""Verification of proposed tokens that keeps the distribution, but not the very draws.

A token that a draft drew with probability p is taken with probability min(1, q / p), q the model's
own; otherwise one is drawn from what q has more than p, by the kernel
`nbflow_kernels.chain_speculative_sampling`.  No other way takes more of the proposals.  Texts have
the distribution that they have without proposals; the n-th token is another one, as it uses other
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nbflow.engine.request import Request
from nbflow.engine.sampler import state_of
from nbflow_kernels.sampling import chain_speculative_sampling


def rejection_sample(
    logits: np.ndarray, request: Request, drafts: Sequence[int], draft_probs: np.ndarray
) -> list[int]:
    """Return the proposed tokens that are taken and the one that is drawn after them.

    Parameters
    ----------
    logits : array of float32, shape (n + 1, V)
        Scores after the last token and after each of the `n` proposed ones.
    request : Request
        The request.
    drafts : sequence of int, length n
        The proposed tokens.
    draft_probs : array of float32, shape (n, V)
        What each of them was drawn from.
    """
    state = state_of(request).fork()
    target = np.empty(logits.shape, np.float32)
    for i, row in enumerate(logits):
        target[i] = state.probs(row.copy())
        if i < len(drafts):
            state.accept(drafts[i])
    tokens, _, n_taken = chain_speculative_sampling(
        draft_probs[None], np.array([drafts], np.int32), target[None],
        seed=np.array([request.seed], np.uint64), offset=np.array([len(request.ids)], np.uint64),
    )  # fmt: skip
    taken: list[int] = tokens[0, : n_taken[0] + 1].tolist()
    return taken
