"""Batch attention over a paged cache, prefill and decode mixed, with lengths in tokens."""

from __future__ import annotations

from typing import Any

from nbflow_kernels.arrays import on_host
from nbflow_kernels.attention.options import from_arguments
from nbflow_kernels.attention.paged_base import PagedAttentionWrapper
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.run import AttentionCall
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.page_table import check_kv_lens


class BatchAttention(PagedAttentionWrapper):
    """Attention of prefill and decode requests in one batch, with lengths in tokens.

    `kv_layout` and `current` as for `BatchPrefillWithPagedKVCacheWrapper`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import BatchAttention
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> batch = BatchAttention()
    >>> plan = batch.plan(
    ...     ints(0, 1, 3), ints(0, 2, 3), ints(2, 0, 1), ints(3, 2), 1, 1, 4, 4, 2, causal=True
    ... )
    >>> pages = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(3, 2, 1, 4)
    >>> out, lse = batch.run(np.zeros((3, 1, 4), np.float32), (pages, pages))
    >>> out[:, 0, 0], lse[:, 0].round(3)  # over 3, 1 and 2 keys
    (array([3. , 2. , 2.5], dtype=float32), array([1.585, 0.   , 1.   ], dtype=float32))
    """

    def __init__(self, kv_layout: str = "NHD") -> None:
        super().__init__(kv_layout)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        *,
        kv_format: str | None = None,
    ) -> AttentionPlan:
        """Schedule a step; the plan serves every layer with the same options.

        Parameters
        ----------
        qo_indptr, kv_indptr, kv_indices : arrays of int32
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        kv_len_arr : array of int32, shape (B,)
            Keys of each request, at most the capacity of its pages.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size : int
            H, G, the head sizes of queries and keys and of values, and tokens per page.
        causal, sm_scale, logits_soft_cap, q_data_type, kv_data_type, kv_format
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.
        """
        qo_indptr, kv_indptr = on_host(qo_indptr), on_host(kv_indptr)
        kv_indices, kv_len_arr = on_host(kv_indices), on_host(kv_len_arr)
        check_kv_lens(kv_indptr, kv_indices, kv_len_arr, page_size)
        return self._plan_lens(
            (qo_indptr, kv_indptr, kv_indices, kv_len_arr),
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo), page_size, locals(),
        )  # fmt: skip

    def run(
        self,
        q: Any,
        kv_cache: Any,
        out: Any = None,
        lse: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        logits_soft_cap: float = 0.0,
        *,
        sinks: Any = None,
        kv_cache_sf: Any = None,
    ) -> tuple[Any, Any]:
        """Attend with the current plan.

        Parameters
        ----------
        q, kv_cache, out, lse, k_scale, v_scale
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        logits_soft_cap : float
            0, or the value given to `plan`.
        sinks : array of float32, shape (H,), optional
            Per head, the score of an additional key without a value.
        kv_cache_sf
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        out, lse : arrays, shapes (nnz, H, D_v) and (nnz, H)
            The result and its base-2 LSE.
        """
        plan = self._planned()
        if logits_soft_cap and logits_soft_cap != plan.logits_soft_cap:
            raise UsageError(
                f"logits_soft_cap must be the plan's ({plan.logits_soft_cap}), got "
                f"{logits_soft_cap}; give it to plan(...)"
            )
        call = from_arguments(AttentionCall, locals(), return_lse=True)
        result: tuple[Any, Any] = self._run_pages(q, kv_cache, None, call, kv_cache_sf)
        return result
