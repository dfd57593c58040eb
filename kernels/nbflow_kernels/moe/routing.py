"""Top-k routing of tokens to experts, and permutation of tokens by expert."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.arrays import check_array, empty, is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.moe import cpu, cuda

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2_sum")


def moe_routing(
    logits: NDArray[np.float32],
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: NDArray[np.float32] | None = None,
    n_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "max",
    routed_scaling_factor: float = 1.0,
    min_score: float = 0.0,
    mixer_margin: float = 0.0,
) -> tuple[Any, Any]:
    """Choose the experts of each token and their weights.

    The scores are the softmax or the sigmoid of the logits.  The experts with the `top_k` largest
    scores (plus `correction_bias`) are chosen, among the `top_k_groups` best groups of neighbouring
    experts; their weights are the scores (without bias), divided by their sum if `renormalize`,
    times `routed_scaling_factor`.

    Parameters
    ----------
    logits : array of float32, shape (T, E)
        The router's output; -inf excludes an expert.
    top_k : int
        Experts for each token.
    scoring : {"softmax", "sigmoid"}
        Scores of all experts of a token.
    renormalize : bool
        Divide a token's weights by their sum.
    correction_bias : array of float32, shape (E,), optional
        Added to the scores for the choice only.
    n_groups : int
        Number of groups of E / n_groups experts each.
    top_k_groups : int
        Groups a token may use.
    group_score : {"max", "top2_sum"}
        Score of a group: that of its best expert, or the sum of its two best.
    routed_scaling_factor : float
        Factor of all weights.
    min_score : float
        Experts with a smaller score get id -1 and weight 0.
    mixer_margin : float
        Above 0 (SparseMixer): the score of a chosen expert with logit m is its softmax among the
        experts not chosen before it whose logits l are near, ``m - l <= mixer_margin * max(|l|,
        m)``.

    Returns
    -------
    weights : array of float32, shape (T, top_k)
        Weights, the best choice first.
    ids : array of int32, shape (T, top_k)
        Experts, or -1.  The lowest index wins among equals.

    Raises
    ------
    UsageError
        If a number is out of range, a name is unknown, or a row of `logits` has a NaN or +inf, or
        only -inf.  On a CUDA device the call does not wait for the result: the weights of such a
        row are NaN and its ids -1.
    TypeError
        If an array is not of float32.

    Notes
    -----
    ==========================  ==============================================================
    Mixtral, Qwen3-MoE          defaults; softmax of the chosen logits alone is the same
    gpt-oss                     defaults
    Qwen2-MoE, DeepSeek-MoE     ``renormalize=False``
    DeepSeek-V2                 ``renormalize=False``, groups, `routed_scaling_factor`
    DeepSeek-V3                 ``scoring="sigmoid"``, `correction_bias`, groups,
                                ``group_score="top2_sum"``, `routed_scaling_factor`
    Llama 4                     ``scoring="sigmoid"``, ``renormalize=False``, ``top_k=1``; it
                                multiplies the expert's input by the weight, not its output
    Phi-3.5-MoE                 ``renormalize=False``, ``mixer_margin=0.02``
    Inferflow                   ``min_score=1e-5``
    ==========================  ==============================================================

    Scores are computed in float64.  Experts outside the chosen groups are never used, even if all
    others have a negative biased score.

    References
    ----------
    .. [1] A. Q. Jiang et al., "Mixtral of Experts", arXiv:2401.04088, section 2.1.
    .. [2] DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, equations 12 to 16.
    .. [3] L. Liu et al., "GRIN: GRadient-INformed MoE", arXiv:2409.12136.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import moe_routing
    >>> logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))
    >>> weights, ids = moe_routing(logits, 2, renormalize=False)
    >>> weights.round(3), ids
    (array([[0.4, 0.3]], dtype=float32), array([[1, 3]], dtype=int32))
    """
    check_array("logits", logits, (None, None))
    T, E = logits.shape
    numbers = routing_numbers(
        E, top_k, scoring=scoring, renormalize=renormalize, n_groups=n_groups,
        top_k_groups=top_k_groups, group_score=group_score,
        routed_scaling_factor=routed_scaling_factor, min_score=min_score,
        mixer_margin=mixer_margin,
    )  # fmt: skip
    if correction_bias is not None:
        check_array("correction_bias", correction_bias, (E,))
    weights, ids = empty(logits, (T, top_k)), empty(logits, (T, top_k), np.int32)
    (cuda if is_cuda(logits) else cpu).routing(logits, correction_bias, *numbers, weights, ids)
    if not is_cuda(logits) and T and np.isnan(weights[:, 0]).any():
        row = int(np.flatnonzero(np.isnan(weights[:, 0]))[0])
        raise UsageError(f"logits: row {row} must not have a NaN or +inf, nor be all -inf")
    return weights, ids


def routing_numbers(
    n_experts: int,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    n_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "max",
    routed_scaling_factor: float = 1.0,
    min_score: float = 0.0,
    mixer_margin: float = 0.0,
) -> tuple[bool, bool, int, int, bool, float, float, float]:
    """Check options of `moe_routing`; return them as the launchers of the router take them.

    Raises
    ------
    UsageError
        If a number is out of range or a name is unknown.
    """
    E = n_experts
    if scoring not in SCORINGS:
        raise unknown_name("scoring", scoring, SCORINGS)
    if group_score not in GROUP_SCORES:
        raise unknown_name("group_score", group_score, GROUP_SCORES)
    if n_groups < 1 or E % n_groups:
        raise UsageError(f"n_groups must divide the number of experts, {E}, got {n_groups}")
    if not 1 <= top_k_groups <= n_groups:
        raise UsageError(f"top_k_groups must be 1..n_groups = 1..{n_groups}, got {top_k_groups}")
    max_top_k = top_k_groups * (E // n_groups)
    if not 1 <= top_k <= max_top_k:
        raise UsageError(f"top_k must be 1..{max_top_k}, the experts a token may use, got {top_k}")
    if group_score == "top2_sum" and E // n_groups < 2:
        raise UsageError('group_score="top2_sum" needs groups of at least two experts')
    if not mixer_margin >= 0 or (mixer_margin and scoring != "softmax"):
        raise UsageError(
            f'mixer_margin must be at least 0, and above 0 with scoring="softmax" alone, got '
            f"{mixer_margin:g} with {scoring!r}"
        )
    return (
        scoring == "sigmoid", bool(renormalize), int(n_groups), int(top_k_groups),
        group_score == "top2_sum", float(routed_scaling_factor), float(min_score),
        float(mixer_margin),
    )  # fmt: skip


def moe_permute(ids: NDArray[np.int32], n_experts: int) -> tuple[Any, Any, Any]:
    """Sort pairs of token and expert by expert.

    Parameters
    ----------
    ids : array of int32, shape (T, k)
        Experts of each token, 0..n_experts - 1; -1 is skipped, e.g. an expert of another rank.
    n_experts : int
        Number of experts E.

    Returns
    -------
    rows : array of int32, shape (T * k,)
        The token of each pair, sorted by expert, then by token.  Pairs without an expert come last.
    indptr : array of int32, shape (E + 1,)
        Start and end of each expert's pairs.
    inverse : array of int32, shape (T, k)
        The index of each pair in `rows`; -1 for a pair without an expert.

    Raises
    ------
    UsageError
        If an id is out of range; on a CUDA device such an id is skipped.
    TypeError
        If `ids` is not an array of int32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import moe_permute
    >>> rows, indptr, inverse = moe_permute(np.array([[2, 0], [0, -1]], np.int32), 3)
    >>> rows.tolist(), indptr.tolist(), inverse.tolist()
    ([0, 1, 0, 1], [0, 2, 2, 3], [[2, 0], [1, -1]])
    """
    check_array("ids", ids, (None, None), np.int32)
    if not is_cuda(ids) and ids.size and (ids.min() < -1 or ids.max() >= n_experts):
        bad = ids[(ids < -1) | (ids >= n_experts)][0]
        raise UsageError(f"ids must lie in -1..{n_experts - 1}, got {bad}")
    rows, inverse = empty(ids, (ids.size,), np.int32), empty(ids, ids.shape, np.int32)
    indptr = empty(ids, (n_experts + 1,), np.int32)
    (cuda if is_cuda(ids) else cpu).permute(ids, rows, indptr, inverse)
    return rows, indptr, inverse
