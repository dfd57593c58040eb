"""Logits processors: repetition, n-gram and DRY penalties, biases, token masks.

All of them work in place, row by row.  Lists of tokens are ragged: the tokens of row b are
``token_ids[indptr[b]:indptr[b + 1]]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_ids, check_rows, is_cuda, per_row
from nbflow_kernels.errors import UsageError
from nbflow_kernels.penalties import cpu, cuda

__all__ = [
    "Breakers", "apply_dry_penalty", "apply_logit_bias", "apply_no_repeat_ngram", "apply_penalties",
    "apply_token_bitmask", "mask_token_ids",
]  # fmt: skip


def apply_penalties(
    logits: Any,
    token_ids: Any,
    indptr: Any,
    *,
    repetition_penalty: Any = 1.0,
    frequency_penalty: Any = 0.0,
    presence_penalty: Any = 0.0,
    window: Any = -1,
    prompt_lens: Any = None,
) -> Any:
    r"""Lower the logits of tokens that occurred.

    .. math::
        l' = \begin{cases} l / r & l > 0 \\ l \, r & l \le 0 \end{cases}
        \; - f \, n - p \, [n > 0]

    for each token of the row's history; n counts its occurrences after the prompt.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Changed in place.
    token_ids : array of int32, shape (N,)
        Histories of all rows, oldest token first.
    indptr : array of int32, shape (B + 1,)
        Where each row's history starts and ends.
    repetition_penalty : float or array, shape (B,)
        The factor r of Hugging Face and llama.cpp, positive; 1 switches it off.
    frequency_penalty : float or array, shape (B,)
        OpenAI's penalty f for each occurrence; 0 switches it off.
    presence_penalty : float or array, shape (B,)
        OpenAI's penalty p for having occurred; 0 switches it off.
    window : int or array of integers, shape (B,)
        How many of the last tokens count; -1 is all, 0 none (llama.cpp's ``repeat_last_n``).
    prompt_lens : int or array of integers, shape (B,), optional
        How many of the first tokens are the prompt.  They count for the repetition penalty only, as
        in vLLM and the OpenAI API.  Without it all tokens count for all penalties, as in llama.cpp.

    Returns
    -------
    array of float32, shape (B, V)
        `logits`.

    Raises
    ------
    UsageError
        If a shape does not fit, a token is not in 0..V - 1, or a number is out of range.
    TypeError
        If an array has another dtype.

    References
    ----------
    .. [1] N. S. Keskar et al., "CTRL", arXiv:1909.05858, section 4.1; the paper only divides, which
       makes tokens of negative logit more likely; everybody multiplies those.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_penalties
    >>> logits = np.array([[2.0, -1.0, 3.0]], np.float32)
    >>> history, indptr = np.array([0, 1, 1], np.int32), np.array([0, 3], np.int32)
    >>> apply_penalties(logits, history, indptr, repetition_penalty=2.0, frequency_penalty=0.5)
    array([[ 0.5, -3. ,  3. ]], dtype=float32)
    """
    B = _check(logits, token_ids, indptr)
    parameters = _columns(
        B,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )
    if not np.isfinite(parameters).all() or not (parameters[:, 0] > 0).all():
        raise UsageError("penalties must be finite and repetition_penalty positive")
    n_prompt = _whole("prompt_lens", 0 if prompt_lens is None else prompt_lens, B, 0)
    spans = np.stack([_whole("window", window, B, -1), n_prompt], axis=1)
    (cuda if is_cuda(logits) else cpu).penalties(logits, token_ids, indptr, parameters, spans)
    return logits


def apply_no_repeat_ngram(logits: Any, token_ids: Any, indptr: Any, ngram_size: Any) -> Any:
    """Forbid the tokens that would complete an n-gram that occurred: their logits become -inf.

    Parameters
    ----------
    logits, token_ids, indptr
        As in `apply_penalties`; so are the result and the errors.
    ngram_size : int or array of integers, shape (B,)
        The n of the n-grams; 1 forbids every token that occurred, 0 nothing.

    References
    ----------
    .. [1] R. Paulus et al., "A Deep Reinforced Model for Abstractive Summarization",
       arXiv:1705.04304, section 2.5.

    Examples
    --------
    The last token is 5; after it came 7 before.

    >>> import numpy as np
    >>> from nbflow_kernels import apply_no_repeat_ngram
    >>> logits = np.zeros((1, 8), np.float32)
    >>> history, indptr = np.array([5, 7, 2, 5], np.int32), np.array([0, 4], np.int32)
    >>> np.flatnonzero(apply_no_repeat_ngram(logits, history, indptr, 2) == -np.inf).tolist()
    [7]
    """
    B = _check(logits, token_ids, indptr)
    sizes = _whole("ngram_size", ngram_size, B, 0)
    (cuda if is_cuda(logits) else cpu).no_repeat_ngram(logits, token_ids, indptr, sizes)
    return logits


class Breakers(tuple[Sequence[int], ...]):
    """Token sequences for `apply_dry_penalty` that are converted and hashed once."""

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Their tokens, and where each begins and ends there; int32.

        They are ordered by their tokens from the last one to the first.

        Raises
        ------
        UsageError
            If a sequence is empty.
        """
        if not all(self):
            raise UsageError("breakers must not be empty sequences of tokens")
        ordered = sorted(self, key=lambda breaker: tuple(breaker)[::-1])
        words = np.array([token for breaker in ordered for token in breaker], np.int32)
        sizes = np.array([len(breaker) for breaker in ordered], np.int64)
        return words, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)


def apply_dry_penalty(
    logits: Any,
    token_ids: Any,
    indptr: Any,
    *,
    multiplier: Any,
    base: Any = 1.75,
    allowed_length: Any = 2,
    window: Any = -1,
    breakers: Sequence[Sequence[int]] = (),
) -> Any:
    r"""Lower the logits of tokens that would extend a repetition ("don't repeat yourself").

    If the last m tokens also occur earlier, the token that followed them there is lowered by
    :math:`\mathrm{multiplier} \cdot \mathrm{base}^{m - \mathrm{allowed}}`, for the greatest such
    m >= `allowed_length`.

    Parameters
    ----------
    logits, token_ids, indptr
        As in `apply_penalties`; so are the result and the errors.
    multiplier : float or array, shape (B,)
        Penalty of a repetition of the allowed length, not negative; 0 switches it off.
    base : float or array, shape (B,)
        Growth of the penalty with each further token, at least 1.
    allowed_length : int or array of integers, shape (B,)
        Repetitions shorter than this go free.
    window : int or array of integers, shape (B,)
        As in `apply_penalties`.
    breakers : sequence of sequences of int
        Token sequences, not empty, over which no repetition reaches.  A token that is a breaker by
        itself is never lowered.

    Notes
    -----
    Names and rules are llama.cpp's.  The exponent is bounded where ``base ** exponent`` would leave
    float32.

    References
    ----------
    .. [1] P. E. Weidmann, "DRY: A modern repetition penalty", text-generation-webui pull request
       5677, 2024.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_dry_penalty
    >>> logits = np.zeros((1, 4), np.float32)
    >>> history, indptr = np.array([0, 1, 2, 0, 1], np.int32), np.array([0, 5], np.int32)
    >>> apply_dry_penalty(logits, history, indptr, multiplier=1.5)
    array([[ 0. ,  0. , -1.5,  0. ]], dtype=float32)
    """
    B = _check(logits, token_ids, indptr)
    parameters = _columns(B, multiplier=multiplier, base=base)
    if not np.isfinite(parameters).all() or not (parameters >= [0.0, 1.0]).all():
        raise UsageError("multiplier must be finite and not negative, base finite and at least 1")
    spans = np.stack(
        [_whole("window", window, B, -1), _whole("allowed_length", allowed_length, B, 1)], axis=1
    )
    words, edges = (breakers if isinstance(breakers, Breakers) else Breakers(breakers)).arrays
    variant = cuda if is_cuda(logits) else cpu
    variant.dry(logits, token_ids, indptr, parameters, spans, words, edges)
    return logits


def apply_logit_bias(logits: Any, token_ids: Any, biases: Any, indptr: Any) -> Any:
    """Add a bias to some logits of each row.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Changed in place.
    token_ids : array of int32, shape (N,)
        Tokens of all rows.
    biases : array of float32, shape (N,)
        What is added to each; the OpenAI API allows -100..100.  -inf forbids the token.
    indptr : array of int32, shape (B + 1,)
        Where each row's tokens start and end.

    Returns
    -------
    array of float32, shape (B, V)
        `logits`.

    Raises
    ------
    UsageError
        If a shape does not fit or a token is not in 0..V - 1.
    TypeError
        If an array has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_logit_bias
    >>> logits = np.zeros((2, 3), np.float32)
    >>> ids, indptr = np.array([1, 2, 0], np.int32), np.array([0, 2, 3], np.int32)
    >>> apply_logit_bias(logits, ids, np.array([1, -2, 5], np.float32), indptr)
    array([[ 0.,  1., -2.],
           [ 5.,  0.,  0.]], dtype=float32)
    """
    _check(logits, token_ids, indptr)
    check_array("biases", biases, token_ids.shape)
    (cuda if is_cuda(logits) else cpu).logit_bias(logits, token_ids, biases, indptr)
    return logits


def mask_token_ids(logits: Any, token_ids: Any, indptr: Any, *, keep: bool = False) -> Any:
    """Set the logits of listed tokens to -inf, or those of all others.

    Implements bad words, allowed tokens and a minimum length (the end tokens are masked until it is
    reached).

    Parameters
    ----------
    logits, token_ids, indptr
        As in `apply_logit_bias`; so are the result and the errors.
    keep : bool
        Keep the listed tokens and mask the others; a row without a list stays as it is.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import mask_token_ids
    >>> ids, indptr = np.array([1], np.int32), np.array([0, 1], np.int32)
    >>> mask_token_ids(np.zeros((1, 3), np.float32), ids, indptr)
    array([[  0., -inf,   0.]], dtype=float32)
    >>> mask_token_ids(np.zeros((1, 3), np.float32), ids, indptr, keep=True)
    array([[-inf,   0., -inf]], dtype=float32)
    """
    _check(logits, token_ids, indptr)
    (cuda if is_cuda(logits) else cpu).mask(logits, token_ids, indptr, bool(keep))
    return logits


def apply_token_bitmask(logits: Any, bitmask: Any) -> Any:
    """Set the logits of tokens whose bit is 0 to -inf.

    Parameters
    ----------
    logits : array of float32, shape (B, V)
        Changed in place.
    bitmask : array of int32, shape (B, ceil(V / 32))
        Bit ``j % 32`` of word ``j // 32`` says whether token j is allowed: the layout of
        the grammar engines (xgrammar, llguidance).

    Returns
    -------
    array of float32, shape (B, V)
        `logits`.

    Raises
    ------
    UsageError
        If a shape does not fit.
    TypeError
        If an array has another dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import apply_token_bitmask
    >>> apply_token_bitmask(np.zeros((1, 4), np.float32), np.array([[0b0110]], np.int32))
    array([[-inf,   0.,   0., -inf]], dtype=float32)
    """
    check_rows("logits", logits)
    check_array("bitmask", bitmask, (logits.shape[0], (logits.shape[1] + 31) // 32), np.int32)
    (cuda if is_cuda(logits) else cpu).bitmask(logits, bitmask)
    return logits


def _check(logits: Any, token_ids: Any, indptr: Any) -> int:
    """Raise unless the ragged lists fit the rows and tokens are in range; return B."""
    check_rows("logits", logits)
    B, V = logits.shape
    check_array("token_ids", token_ids, (None,), np.int32)
    check_array("indptr", indptr, (B + 1,), np.int32)
    if not is_cuda(logits) and (
        indptr[0] != 0 or indptr[-1] != len(token_ids) or (np.diff(indptr) < 0).any()
    ):
        raise UsageError(
            f"indptr must rise from 0 to the number of token_ids, {len(token_ids)}, got "
            f"{indptr[0]}..{indptr[-1]}"
        )
    check_ids("token_ids", token_ids, V, "the columns of logits")
    return int(B)


def _columns(B: int, **values: Any) -> Any:
    """Return named numbers per row as columns, float64."""
    return np.stack([per_row(name, value, B) for name, value in values.items()], axis=1)


def _whole(name: str, value: Any, B: int, least: int) -> Any:
    """Return one int64 per row from integers of at least `least`."""
    numbers = per_row(name, value, B)
    if (np.floor(numbers) != numbers).any() or (numbers < least).any():
        raise UsageError(f"{name} must be an integer of at least {least}, got {numbers.min():g}")
    return numbers.astype(np.int64)
