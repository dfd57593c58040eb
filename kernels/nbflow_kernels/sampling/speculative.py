"""Speculative sampling: rejection sampling of draft tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_ids, empty, is_cuda
from nbflow_kernels.sampling import cpu_speculative, cuda
from nbflow_kernels.sampling.argument_checks import NOT_PROBS, check_valid, streams


def chain_speculative_sampling(
    draft_probs: Any,
    draft_token_ids: Any,
    target_probs: Any,
    maybe_output_accepted_token_num: Any = None,
    maybe_output_emitted_draft_token_num: Any = None,
    *,
    seed: Any = None,
    offset: Any = 0,
) -> tuple[Any, Any, Any]:
    r"""Accept or resample a chain of draft tokens so that the target's distribution results.

    Draft token x at position i is accepted with probability :math:`\min(1, q_i(x) / p_i(x))`, p the
    draft's and q the target's probabilities.  At the first rejection a token is drawn
    from :math:`\max(q_i - p_i, 0)`, and the chain ends; if all n are accepted, one more is drawn
    from :math:`q_n`.

    Parameters
    ----------
    draft_probs : array of float32, shape (B, n, V)
        Probabilities that the draft tokens were drawn from; rows sum to 1.
    draft_token_ids : array of int32, shape (B, n)
        Draft tokens, 0..V - 1.
    target_probs : array of float32, shape (B, n + 1, V)
        Probabilities of the target at these positions and the next one.
    maybe_output_accepted_token_num : array of int32, shape (B,), optional
        The second result is added to it, and it is returned.
    maybe_output_emitted_draft_token_num : array of int32, shape (B,), optional
        The third result is added to it, and it is returned.
    seed, offset
        As in `sampling_from_probs`; a chain draws n + 1 numbers at one offset.

    Returns
    -------
    output_token_ids : array of int32, shape (B, n + 1)
        Accepted tokens, the resampled one, then -1.
    accepted_token_num : array of int32, shape (B,)
        Draft tokens that pass their test, each by itself: a measure of how the models agree.
    emitted_draft_token_num : array of int32, shape (B,)
        Draft tokens in the output, which holds one token more.

    Raises
    ------
    UsageError
        If a shape does not fit, a token is out of range, or a row of `target_probs` that a token
        is drawn from is not a distribution.
    TypeError
        If an array has another dtype.

    Notes
    -----
    Numbers are compared and summed in float64.  If :math:`\max(q_i - p_i, 0)` is zero everywhere
    (rows with different sums), the token is drawn from the target's row.

    References
    ----------
    .. [1] C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
       arXiv:2302.01318, algorithm 2.

    Examples
    --------
    The first token is accepted: it is more likely for the target than for the draft.  The second
    has probability 0, and the only other token of the target's row is drawn.

    >>> import numpy as np
    >>> from nbflow_kernels.sampling import chain_speculative_sampling
    >>> draft = np.array([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]], np.float32)
    >>> target = np.array([[[0, 0.1, 0.6, 0.3], [1, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]]], np.float32)
    >>> ids = np.array([[2, 1]], np.int32)
    >>> out, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=0)
    >>> out.tolist(), accepted.tolist(), emitted.tolist()
    ([[2, 0, -1]], [1], [1])
    """
    check_array("draft_probs", draft_probs, (None, None, None))
    B, n, V = draft_probs.shape
    check_array("draft_token_ids", draft_token_ids, (B, n), np.int32)
    check_array("target_probs", target_probs, (B, n + 1, V))
    counters = {
        "maybe_output_accepted_token_num": maybe_output_accepted_token_num,
        "maybe_output_emitted_draft_token_num": maybe_output_emitted_draft_token_num,
    }
    for name, counter in counters.items():
        if counter is not None:
            check_array(name, counter, (B,), np.int32)
    seeds, offsets = streams(seed, offset, B)
    check_ids("draft_token_ids", draft_token_ids, V, "the columns of draft_probs")
    out = empty(draft_probs, (B, n + 1), np.int32)
    numbers = [empty(draft_probs, (B,), np.int32) for _ in "ab"]
    variant: Any = cuda if is_cuda(draft_probs) else cpu_speculative
    variant.chain_speculative(
        draft_probs, draft_token_ids, target_probs, seeds, offsets, out, *numbers
    )
    check_valid("target_probs", numbers[1], NOT_PROBS)
    for i, counter in enumerate(counters.values()):
        if counter is not None:
            counter += numbers[i]
            numbers[i] = counter
    return out, numbers[0], numbers[1]
