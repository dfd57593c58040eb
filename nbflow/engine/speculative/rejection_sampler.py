"""Rejection sampling of draft tokens, which preserves the distribution of the model.

A draft token with draft probability p and model probability q is accepted with probability
min(1, q / p), the maximum possible; otherwise a token is sampled from the normalized max(q - p, 0)
(`nbflow_kernels.chain_speculative_sampling`).  The tokens differ from those without a draft,
because other random numbers are used.
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
    """Return the accepted draft tokens and the token sampled after them.

    `draft_probs` are the distributions of the `n` draft tokens, float32 (n, V); the logits are
    those of `nbflow.engine.outputs.verify_drafts`.
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
