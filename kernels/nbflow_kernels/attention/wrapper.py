"""Batch attention over a paged cache: plan once per step, run once per layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array, is_cuda
from nbflow_kernels.attention import cpu, cuda
from nbflow_kernels.attention.plan import AttentionPlan, check_layout, make_plan
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kvcache.pages import check_cache, check_page_numbers


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of a batch of requests over a paged key/value cache, prefill and decode mixed.

    Parameters
    ----------
    kv_layout : str
        ``"NHD"``: cache pages are (page_size, G, D); ``"HND"``: (G, page_size, D).

    Attributes
    ----------
    current : AttentionPlan or None
        The plan of the present step; NumPy arrays to look at.

    Raises
    ------
    UsageError
        If `kv_layout` is another name.

    Examples
    --------
    Request 0 decodes one row over 3 keys on pages 2 and 0, request 1 prefills two rows on page 1:

    >>> import numpy as np
    >>> from nbflow_kernels.attention import BatchPrefillWithPagedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper()
    >>> plan = wrapper.plan(ints(0, 1, 3), ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 1, 1, 4, 2)
    >>> dict(zip(plan.COLUMNS, plan.items.T.tolist()))["n_rows"]
    [1, 2]
    >>> pages = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(3, 2, 1, 4)
    >>> wrapper.run(np.zeros((3, 1, 4), np.float32), (pages, pages))[:, 0, 0]
    array([3. , 2. , 2.5], dtype=float32)
    """

    def __init__(self, kv_layout: str = "NHD") -> None:
        check_layout(kv_layout)
        self.kv_layout = kv_layout
        self.current: AttentionPlan | None = None
        self._n_pages = -1

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool = True,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> AttentionPlan:
        """Divide the step's work; the plan serves every layer with the same window and cap.

        Parameters
        ----------
        qo_indptr : array of int32, shape (B + 1,)
            Query rows of request b are ``qo_indptr[b]:qo_indptr[b + 1]``, the last ones of its
            sequence.
        paged_kv_indptr : array of int32, shape (B + 1,)
            Its pages are ``paged_kv_indices[paged_kv_indptr[b]:paged_kv_indptr[b + 1]]``.
        paged_kv_indices : array of int32, shape (n_pages,)
            Page numbers; more entries than `paged_kv_indptr` uses are allowed.
        paged_kv_last_page_len : array of int32, shape (B,)
            Tokens on each request's last page, 1..page_size; 0 for a request without pages.
        num_qo_heads, num_kv_heads, head_dim : int
            H, G and D; H must be a multiple of G.
        page_size : int
            Tokens per page.
        causal, window_left, logits_soft_cap, sm_scale
            As in `single_prefill_with_kv_cache`, but causal unless told otherwise.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.  It refers to the given arrays: do not change them
            before the last `run`.

        Raises
        ------
        UsageError
            If the tables contradict each other, or a number is out of range.
        TypeError
            If an argument is not an int32 array.
        """
        self._n_pages = -1
        self.current = make_plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim),
            page_size,
            kv_layout=self.kv_layout,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        return self.current

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend with the present plan.

        Parameters
        ----------
        q : array of float32, shape (nnz, H, D)
            Query rows of all requests; rows may be far apart.
        paged_kv_cache : pair of arrays, or one array, float32 or float16
            Keys and values, (pages, page_size, G, D) each for ``"NHD"`` or
            (pages, G, page_size, D) for ``"HND"``; or both in one 5-D array (pages, 2, ...).
        out : array of float32, shape (nnz, H, D), optional
            Where to write the result.
        lse : array of float32, shape (nnz, H), optional
            Where to write the base-2 LSE.
        return_lse : bool
            Return the pair (out, lse).

        Returns
        -------
        array of float32, shape (nnz, H, D), or a pair with the LSE
            Each row is bitwise what it is alone, in any other batch and with any page size.

        Raises
        ------
        UsageError
            If there is no plan, or the arrays do not fit it.
        TypeError
            If an argument is not an array or has another dtype.
        """
        plan = self.current
        if plan is None:
            raise UsageError("run needs a plan: call plan(...) first, once per step")
        H, G, D, page_size = plan.sizes[:4]
        check_array("q", q, (plan.n_rows, H, D), rows=True)
        k, v = check_cache(paged_kv_cache, page_size, G, D, self.kv_layout)
        if self._n_pages != k.shape[0]:  # once per plan: layers have equally many pages
            check_page_numbers(plan.kv_indices[: plan.kv_indptr[-1]], k.shape[0])
            self._n_pages = k.shape[0]
        if out is None and not is_cuda(q):
            out = np.empty(q.shape, np.float32)
        elif out is not None:
            check_array("out", out, q.shape)
        if lse is None and return_lse and not is_cuda(q):
            lse = np.empty(q.shape[:2], np.float32)
        elif lse is not None:
            check_array("lse", lse, q.shape[:2])
        (cuda if is_cuda(q) else cpu).batch_attention(plan, q, k, v, out, lse)
        return (out, lse) if return_lse else out
