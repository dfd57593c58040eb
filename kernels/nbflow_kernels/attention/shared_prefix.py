"""Attention to a shared prefix in arrays of its own and to paged keys: FlashInfer's older cascade.

`MultiLevelCascadeAttentionWrapper` does the same with the prefix in pages, on any number of levels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array
from nbflow_kernels.attention.cascade import narrow_output
from nbflow_kernels.attention.merging import merge_state_in_place
from nbflow_kernels.attention.single import single_prefill_with_kv_cache
from nbflow_kernels.attention.wrapper import BatchPrefillWithPagedKVCacheWrapper
from nbflow_kernels.errors import UsageError

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
]


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefill of requests that share a prefix held in arrays of its own; FlashInfer's older form.

    Parameters
    ----------
    float_workspace_buffer : array, optional
        Memory for partial results, as in `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : str
        ``"NHD"`` or ``"HND"``, of the shared arrays and of the pages.

    Raises
    ------
    UsageError
        If the layout is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import BatchPrefillWithSharedPrefixPagedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.begin_forward(ints(0, 2), ints(0, 1), ints(0), ints(2), 1, 1, 4, 2)
    >>> shared = np.full((2, 1, 4), 8, np.float32)
    >>> pages = np.repeat(np.arange(2, dtype=np.float32), 4).reshape(1, 2, 1, 4)
    >>> q = np.zeros((2, 1, 4), np.float32)
    >>> wrapper.forward(q, shared, shared, (pages, pages), causal=True)[:, 0, 0].round(2)
    array([5.33, 4.25], dtype=float32)
    """

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        self.kv_layout = kv_layout
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._tables: dict[str, Any] | None = None
        self._planned: tuple[bool, float | None] | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Use other memory for partial results from the next plan on; None for a plan's own."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Divide the work over the requests' own keys.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : arrays of int32
            Query rows and the pages after the prefix, as in `BatchPrefillWithPagedKVCacheWrapper`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            H, G, D and the tokens of a page.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        self._tables = {
            "qo_indptr": qo_indptr, "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices, "paged_kv_last_page_len": paged_kv_last_page_len,
            "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim_qk": head_dim,
            "page_size": page_size,
        }  # fmt: skip
        self._planned = None
        self._plan(False, None)

    plan = begin_forward

    def _plan(self, causal: bool, sm_scale: float | None) -> None:
        """Plan the requests' own keys, if they are not planned in this way already."""
        if self._tables is None:
            raise UsageError("forward needs a plan: call begin_forward(...) first, once per step")
        if self._planned != (causal, sm_scale):
            self._unique.plan(
                **self._tables, causal=causal, sm_scale=sm_scale, o_data_type=np.float32
            )
            self._planned = (causal, sm_scale)

    def forward(
        self,
        q: Any,
        k_shared: Any,
        v_shared: Any,
        unique_kv_cache: Any,
        causal: bool = False,
        *,
        sm_scale: float | None = None,
    ) -> Any:
        """Attend to the shared keys and to each request's own, and merge.

        Parameters
        ----------
        q : array of float32 or float16, shape (nnz, H, D)
            Query rows of all requests.
        k_shared, v_shared : array of float32 or float16, shape (P, G, D) or (G, P, D)
            The prefix, before every request's own keys.
        unique_kv_cache : pair of arrays, or one array
            The pages, as in `BatchPrefillWithPagedKVCacheWrapper.run`.
        causal : bool
            Whether rows see their request's own keys only up to their own.
        sm_scale : float, optional
            Factor of the dot products; ``1 / sqrt(D)`` unless given.

        Returns
        -------
        array of the queries' dtype, shape (nnz, H, D)
            The attention over the prefix and the requests' own keys.

        Raises
        ------
        UsageError, TypeError
            If there is no plan, or the arrays do not fit it.
        """
        self._plan(causal, sm_scale)
        out, lse = single_prefill_with_kv_cache(
            q, k_shared, v_shared, o_dtype=np.float32, kv_layout=self.kv_layout, sm_scale=sm_scale,
            return_lse=True,
        )  # fmt: skip
        own, own_lse = self._unique.run(q, unique_kv_cache, return_lse=True)
        merge_state_in_place(out, lse, own, own_lse)
        return narrow_output(q, out, None)

    run = forward

    def end_forward(self) -> None:
        """Do nothing; FlashInfer has this name."""

    def predicted_byte_ratio(self, n_shared: int) -> float:
        """Return the bytes read without sharing over those read with it, for a prefix's length.

        Parameters
        ----------
        n_shared : int
            P, the keys of the prefix.

        Returns
        -------
        float
            ``(P B + all own keys) / (P + all own keys)`` for B requests with query rows.

        Raises
        ------
        UsageError
            If there is no plan, or `n_shared` is negative.
        """
        plan = self._unique.current
        if plan is None:
            raise UsageError("predicted_byte_ratio needs a plan: call begin_forward(...) first")
        if n_shared < 0:
            raise UsageError(f"n_shared must not be negative, got {n_shared}")
        asking = np.diff(plan.qo_indptr) > 0
        own = int(plan.kv_lens[asking].sum())
        once = n_shared + own
        return (n_shared * int(asking.sum()) + own) / once if once and asking.any() else 1.0


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decoding of requests that share a prefix held in arrays of its own; FlashInfer's older form.

    Parameters
    ----------
    float_workspace_buffer : array, optional
        Memory for partial results, as in `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : str
        ``"NHD"`` or ``"HND"``, of the shared arrays and of the pages.

    Raises
    ------
    UsageError
        If the layout is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import BatchDecodeWithSharedPrefixPagedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.begin_forward(ints(0, 1, 2), ints(0, 1), ints(1, 2), 1, 1, 4, 2)
    >>> shared = np.full((2, 1, 4), 8, np.float32)
    >>> pages = np.repeat(np.arange(4, dtype=np.float32), 4).reshape(2, 2, 1, 4)
    >>> wrapper.forward(np.zeros((2, 1, 4), np.float32), shared, shared, (pages, pages))[:, 0, 0]
    array([5.3333335, 5.25     ], dtype=float32)
    >>> wrapper.predicted_byte_ratio(2)  # 2 * 2 + 3 keys instead of 2 + 3
    1.4
    """

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout
        )

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Use other memory for partial results from the next plan on; None for a plan's own."""
        self._prefill.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: Any,
        unique_kv_indices: Any,
        unique_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Divide the work over the requests' own keys, one query row for each request.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len : arrays of int32
            The pages after the prefix, as in `BatchDecodeWithPagedKVCacheWrapper`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            H, G, D and the tokens of a page.

        Raises
        ------
        UsageError, TypeError
            As `BatchDecodeWithPagedKVCacheWrapper.plan`.
        """
        check_array("unique_kv_indptr", unique_kv_indptr, (None,), np.int32)
        self._prefill.begin_forward(
            np.arange(len(unique_kv_indptr), dtype=np.int32), unique_kv_indptr, unique_kv_indices,
            unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        )  # fmt: skip

    plan = begin_forward

    def forward(
        self,
        q: Any,
        k_shared: Any,
        v_shared: Any,
        unique_kv_cache: Any,
        *,
        sm_scale: float | None = None,
    ) -> Any:
        """Attend to the shared keys and to each request's own, and merge.

        Parameters
        ----------
        q : array of float32 or float16, shape (B, H, D)
            A query row of each request.
        k_shared, v_shared, unique_kv_cache, sm_scale
            As in `BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward`.

        Returns
        -------
        array of the queries' dtype, shape (B, H, D)
            The attention over the prefix and the requests' own keys.

        Raises
        ------
        UsageError, TypeError
            If there is no plan, or the arrays do not fit it.
        """
        return self._prefill.forward(q, k_shared, v_shared, unique_kv_cache, sm_scale=sm_scale)

    run = forward

    def end_forward(self) -> None:
        """Do nothing; FlashInfer has this name."""

    def predicted_byte_ratio(self, n_shared: int) -> float:
        """See `BatchPrefillWithSharedPrefixPagedKVCacheWrapper.predicted_byte_ratio`."""
        return self._prefill.predicted_byte_ratio(n_shared)
