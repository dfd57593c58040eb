"""Attention of query rows over a key/value cache: single requests and paged batches.

Names and conventions are FlashInfer's: ragged rows with an int32 `indptr`, the page table as a CSR
triple, ``"NHD"``/``"HND"`` layouts, causal masks aligned to the end, `window_left` as the number of
keys to the left, a log-sum-exp (LSE) to base 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.attention import cpu, cuda
from nbflow_kernels.attention.plan import (
    AttentionPlan,
    check_heads,
    check_layout,
    make_plan,
)
from nbflow_kernels.attention.wrapper import BatchPrefillWithPagedKVCacheWrapper
from nbflow_kernels.errors import UsageError

__all__ = [
    "AttentionPlan",
    "BatchPrefillWithPagedKVCacheWrapper",
    "merge_state",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
]

CACHE_DTYPES = (np.float32, np.float16)


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    kv_layout: str = "NHD",
    custom_mask: Any = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
) -> Any:
    r"""Attend from the rows of one request to its keys.

    .. math:: o_{th} = \sum_n \mathrm{softmax}_n\bigl(\mathrm{scale}\; q_{th} \cdot k_{ng}\bigr)\,
              v_{ng}, \qquad g = \lfloor h G / H \rfloor

    Parameters
    ----------
    q : array of float32, shape (T, H, D)
        Query rows, the last T of the sequence; rows may be far apart (columns of a wider matrix).
    k, v : array of float32 or float16, shape (N, G, D) or (G, N, D)
        Keys and values as `kv_layout` says; H must be a multiple of G.
    causal : bool
        Row t sees keys 0..N - T + t: the mask is aligned to the end, so that a chunk of a prompt
        sees everything before it.
    kv_layout : str
        ``"NHD"`` for (N, G, D), ``"HND"`` for (G, N, D).
    custom_mask : array of bool, shape (T, N) or (T * N,), optional
        True where a row sees a key.  It takes the place of `causal`.
    sm_scale : float, optional
        Factor of the dot products; ``1 / sqrt(D)`` unless given.
    window_left : int
        How many keys before its own position a row sees; -1 for all.
    logits_soft_cap : float, optional
        Scores become ``cap * tanh(score / cap)`` before the mask; None or 0 for no cap.
    return_lse : bool
        Return the pair (out, lse).
    out : array of float32, shape (T, H, D), optional
        Where to write the result.
    lse : array of float32, shape (T, H), optional
        Where to write the base-2 logarithm of the sum of exponentials.

    Returns
    -------
    array of float32, shape (T, H, D), or a pair with the LSE, shape (T, H)
        A row that sees no key gets zeros and an LSE of -inf.

    Raises
    ------
    UsageError
        If a shape does not fit, or `causal` and `custom_mask` are both given.
    TypeError
        If an argument is not an array or has another dtype.

    Notes
    -----
    Keys are taken 64 at a time from the start of the sequence, whatever the number of rows: a row's
    result is bitwise the same in a prompt, in a chunk of it and alone.  A NaN or an overflow in the
    scores that a row sees makes the row NaN.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention", NeurIPS 2022, arXiv:2205.14135, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import single_prefill_with_kv_cache
    >>> q = np.zeros((2, 1, 4), np.float32)  # all scores are 0: the mean of the visible values
    >>> k = v = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
    >>> single_prefill_with_kv_cache(q, k, v, causal=True)[:, 0]
    array([[0., 1., 2., 3.],
           [2., 3., 4., 5.]], dtype=float32)
    """
    check_layout(kv_layout)
    check_array("q", q, (None, None, None), rows=True)
    T, H, D = q.shape
    N, G = _check_keys(k, v, H, D, kv_layout)
    if causal and custom_mask is not None:
        raise UsageError("custom_mask takes the place of causal; pass causal=False with it")
    mask = None if custom_mask is None else _check_mask(custom_mask, T, N)
    plan = make_plan(
        np.array([0, T], np.int32),
        np.array([0, 1 if N else 0], np.int32),
        np.zeros(1, np.int32),
        np.array([N], np.int32),
        (H, G, D),
        max(N, 1),
        kv_layout=kv_layout,
        causal=causal,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
    )
    out, lse = _outputs(q, out, lse, return_lse)
    variant = cuda if is_cuda(q) else cpu
    # the contiguous keys are one big page
    variant.attend(plan, q, k[None], v[None], out, lse, mask)
    return (out, lse) if return_lse else out


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    *,
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
) -> Any:
    """Attend from the one newest row of a request to its keys.

    Parameters
    ----------
    q : array of float32, shape (H, D)
        The query row, at the position of the last key.
    k, v : array of float32 or float16, shape (N, G, D) or (G, N, D)
        Keys and values as `kv_layout` says.
    kv_layout, sm_scale, window_left, logits_soft_cap, return_lse
        As in `single_prefill_with_kv_cache`.
    out : array of float32, shape (H, D), optional
        Where to write the result.
    lse : array of float32, shape (H,), optional
        Where to write the base-2 LSE.

    Returns
    -------
    array of float32, shape (H, D), or a pair with the LSE, shape (H,)
        Bitwise the last row of `single_prefill_with_kv_cache`.

    Raises
    ------
    UsageError, TypeError
        As `single_prefill_with_kv_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import single_decode_with_kv_cache
    >>> k = v = np.array([[[1.0, 0.0]], [[0.0, 1.0]]], np.float32)
    >>> out, lse = single_decode_with_kv_cache(np.zeros((1, 2), np.float32), k, v, return_lse=True)
    >>> out, lse  # two keys of score 0: log2(e**0 + e**0) = 1
    (array([[0.5, 0.5]], dtype=float32), array([1.], dtype=float32))
    """
    check_array("q", q, (None, None))
    if out is not None:
        check_array("out", out, q.shape)
    if lse is not None:
        check_array("lse", lse, q.shape[:1])
    result = single_prefill_with_kv_cache(
        q[None],
        k,
        v,
        kv_layout=kv_layout,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        return_lse=return_lse,
        out=None if out is None else out[None],
        lse=None if lse is None else lse[None],
    )
    if return_lse:
        found, found_lse = result
        return found[0] if out is None else out, found_lse[0] if lse is None else lse
    return result[0] if out is None else out


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge the attention over two sets of keys into the attention over both.

    Parameters
    ----------
    v_a, v_b : array of float32, shape (T, H, D)
        Outputs over the one and the other set of keys.
    s_a, s_b : array of float32, shape (T, H)
        Their base-2 LSE; -inf where a row saw no key.

    Returns
    -------
    v : array of float32, shape (T, H, D)
        The output over the union; zeros where neither side saw a key.
    s : array of float32, shape (T, H)
        Its base-2 LSE.

    Raises
    ------
    UsageError, TypeError
        If the arrays do not have these shapes or are not float32.

    References
    ----------
    .. [1] Z. Ye et al., "FlashInfer", arXiv:2501.01005, section 2.2.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels.attention import merge_state
    >>> one, zero = np.ones((1, 1, 2), np.float32), np.zeros((1, 1), np.float32)
    >>> v, s = merge_state(one, zero, 3 * one, zero)
    >>> v.ravel(), s.ravel()
    (array([2., 2.], dtype=float32), array([1.], dtype=float32))
    """
    check_array("v_a", v_a, (None, None, None))
    check_array("s_a", s_a, v_a.shape[:2])
    check_array("v_b", v_b, v_a.shape)
    check_array("s_b", s_b, v_a.shape[:2])
    variant, v, s = (
        (cuda, v_a, s_a) if is_cuda(v_a) else (cpu, np.empty_like(v_a), np.empty_like(s_a))
    )
    variant.merge_state(v_a, s_a, v_b, s_b, v, s)
    return v, s


def _check_keys(k: Any, v: Any, H: int, D: int, kv_layout: str) -> tuple[int, int]:
    """Return the numbers of keys and of key/value heads."""
    check_array("k", k, (None, None, D), CACHE_DTYPES)
    N, G = k.shape[:2] if kv_layout == "NHD" else k.shape[1::-1]
    check_heads(H, G, D)
    check_array("v", v, k.shape, k.dtype)
    return N, G


def _check_mask(custom_mask: Any, T: int, N: int) -> Any:
    """Return the mask as (T, N) bytes."""
    flat = getattr(custom_mask, "ndim", 0) == 1
    check_array("custom_mask", custom_mask, (T * N,) if flat else (T, N), np.bool_)
    return custom_mask.reshape(T, N)


def _outputs(q: Any, out: Any, lse: Any, return_lse: bool) -> tuple[Any, Any]:
    """Return checked or new output arrays; `lse` stays None unless it is wanted."""
    if out is not None:
        check_array("out", out, q.shape)
    if lse is not None:
        check_array("lse", lse, q.shape[:2])
    if is_cuda(q):
        return out, lse
    if out is None:
        out = np.empty(q.shape, np.float32)
    if lse is None and return_lse:
        lse = np.empty(q.shape[:2], np.float32)
    return out, lse
