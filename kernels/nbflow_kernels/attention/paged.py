"""Batch attention over a paged cache: plan once per step, run once per layer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.attention.cuda_graph import graph_of
from nbflow_kernels.attention.options import from_arguments
from nbflow_kernels.attention.paged_base import PagedAttentionWrapper
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.run import AttentionCall
from nbflow_kernels.errors import UsageError


class BatchPrefillWithPagedKVCacheWrapper(PagedAttentionWrapper):
    """Attention of a batch over a paged key/value cache, prefill and decode mixed.

    Parameters
    ----------
    float_workspace_buffer : array, optional
        Split-KV workspace, of any dtype, on the device of the queries; wrappers that run one after
        the other may share it.  If it is too small, keys are not split (the bits are the same).
        None: each plan allocates its own.
    kv_layout : str
        ``"NHD"``: cache pages are (page_size, G, D); ``"HND"``: (G, page_size, D), the faster one,
        because the keys of a head are contiguous.
    use_cuda_graph : bool
        Make `run` capturable into a CUDA graph: each `plan` refills the buffers below and the
        wrapper's workspace in place, and captured launches read them.  The buffers fix the number
        of requests, the first plan fixes the options and the largest number of query rows; a plan
        that does not fit is refused.  `q` has the rows of the first plan in every call; rows after
        ``qo_indptr[-1]`` are not written on a device.  Use one stream for all calls and graphs of
        a wrapper, `plan` included.  Custom masks and variants are refused.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : arrays
        Buffers of `use_cuda_graph`, int32, on the device of the queries, with B + 1, B + 1, the
        largest number of pages, and B elements.
    backend : str
        Must be ``"auto"``: the kernel is selected by the arrays.

    Attributes
    ----------
    current : AttentionPlan or None
        The plan of the current step, inspectable as NumPy arrays.

    Raises
    ------
    UsageError
        If `kv_layout` or `backend` is another name, or the buffers do not fit each other.

    Examples
    --------
    Request 0 decodes one row over 3 keys on pages 2 and 0, request 1 prefills two rows on page 1:

    >>> import numpy as np
    >>> from nbflow_kernels.attention import BatchPrefillWithPagedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper()
    >>> plan = wrapper.plan(
    ...     ints(0, 1, 3), ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 1, 1, 4, 2, causal=True
    ... )
    >>> dict(zip(plan.COLUMNS, plan.items.T.tolist()))["n_rows"]
    [1, 2]
    >>> pages = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(3, 2, 1, 4)
    >>> wrapper.run(np.zeros((3, 1, 4), np.float32), (pages, pages))[:, 0, 0]
    array([3. , 2. , 2.5], dtype=float32)
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        *,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr": ("qo_indptr_buf", qo_indptr_buf),
            "kv_indptr": ("paged_kv_indptr_buf", paged_kv_indptr_buf),
            "kv_indices": ("paged_kv_indices_buf", paged_kv_indices_buf),
            "last_page_len": ("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
        }
        graph = graph_of(use_cuda_graph, buffers)
        super().__init__(kv_layout, backend, float_workspace_buffer, graph)

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        *,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        disable_page_sharing: bool = False,
        kv_format: str | None = None,
        variant: Any = None,
        attention_chunk: int = 0,
        key_cos_sin: Any = None,
        key_interleave: bool = False,
    ) -> AttentionPlan:
        """Schedule a step; the plan serves every layer with the same options.

        Parameters
        ----------
        qo_indptr : array of int32, shape (B + 1,)
            Query rows of request b are ``qo_indptr[b]:qo_indptr[b + 1]``, at the end of its
            sequence.
        paged_kv_indptr : array of int32, shape (B + 1,)
            Pages of request b are ``paged_kv_indices[paged_kv_indptr[b]:paged_kv_indptr[b + 1]]``.
        paged_kv_indices : array of int32, shape (n_pages,)
            Page numbers; unused entries at the end are allowed.
        paged_kv_last_page_len : array of int32, shape (B,)
            Tokens on each request's last page, 1..page_size; 0 for a request without pages.
        num_qo_heads, num_kv_heads, head_dim_qk : int
            H, G and the head size of queries and keys; H must be a multiple of G.
        page_size : int
            Tokens per page.
        head_dim_vo : int, optional
            Head size of the values; `head_dim_qk` by default.
        custom_mask : array of bool, optional
            The masks (qo_len, kv_len) of all requests, flattened and concatenated; replaces
            `causal`.
        packed_custom_mask : array of uint8, optional
            The same packed into bits, lowest bit first; each request starts at a byte.
        causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap
        rope_scale, rope_theta
            As in `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type : dtype or str, optional
            If given, `run` requires these dtypes (FlashInfer's default is float16).
        o_data_type : dtype, optional
            dtype of the result, float32 or float16; by default that of the queries.
        non_blocking : bool
            If False, the call that uploads the plan's tables (the first `run`; `plan` with
            `use_cuda_graph`) waits until they have arrived.
        prefix_len_ptr : array of integers, shape (B,), optional
            Multi-item scoring: keys of each request's prompt, which all its rows see.  Items follow
            it, and a row of an item sees the prompt and the keys of the item up to itself.  Makes
            a `custom_mask` (a byte for each row and key); needs ``causal=True``.
        token_pos_in_items_ptr : array of integers, optional
            For each key after the prompt its position in its item, from 1; 0 for the delimiters
            before the items and after the last, which see the prompt only.
        token_pos_in_items_len : int
            Elements of `token_pos_in_items_ptr` for each request, with padding at the end.
        max_item_len_ptr : array of integers, shape (B,), optional
            Longest item of each request; checked.
        fixed_split_size : int, optional
            Pages per split, instead of 2048 keys; other sizes change the last bits.
        disable_split_kv : bool
            Never split the keys of a row among threads; the bits are the same.
        disable_page_sharing : bool
            Load the pages of every request separately.  By default the CPU processes neighbouring
            requests with a common prefix of pages together; the bits are the same.
        kv_format : str, optional
            Storage format of the cache if its dtype does not tell, e.g. ``"q8_0"``, or
            ``"q8_0/q4_0"`` for keys and values; see `kv_formats`.
        variant : object, optional
            User-defined functions; see `AttentionVariant`.
        attention_chunk, key_cos_sin, key_interleave
            As in `single_prefill_with_kv_cache`.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.  It references the given arrays: do not change them
            before the last `run`.

        Raises
        ------
        UsageError
            If the tables are inconsistent, or a number is out of range.
        TypeError
            If an argument is not an array of the required dtype.
        """
        return self._plan_pages(
            (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo), page_size, locals(),
        )  # fmt: skip

    def run(
        self: PagedAttentionWrapper,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        window_left: int | None = None,
        sinks: Any = None,
        key_bias: Any = None,
        lse_base: str = "2",
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend with the current plan.

        Parameters
        ----------
        q : array of float32 or float16, shape (nnz, H, D)
            Query rows of all requests, with any row stride.
        paged_kv_cache : pair of arrays, or one array
            Keys and values, (pages, page_size, G, D) each for ``"NHD"`` or
            (pages, G, page_size, D) for ``"HND"``; or both in one 5-D array (pages, 2, ...), in
            float32, float16 or `kv_format`; keys and values may differ.  A pair of arrays
            (pages, G, D) has pages of one token.
        q_scale, k_scale, v_scale : float or array, optional
            Factors of queries, keys and values; a number, or one per head.
        out : array of the result's dtype, shape (nnz, H, D_v), optional
            Output array.
        lse : array of float32, shape (nnz, H), optional
            Output array of the LSE.
        return_lse : bool
            Return the pair (out, lse).
        window_left : int, optional
            Replaces the plan's window, also for later calls.
        sinks : array of float32, shape (H,), optional
            Per head, the score of an additional key without a value.
        key_bias : array of float32, shape (G, D), optional
            As in `single_prefill_with_kv_cache`.
        lse_base : str
            ``"2"`` or ``"e"``: base of the logarithm in the LSE.
        kv_cache_sf : pair of arrays of uint8 or float8_e4m3fn, or one array, optional
            Scales of an NVFP4 cache, whose codes `paged_kv_cache` has; see
            `nvfp4_quantize_append_paged_kv_cache`.  Pass the global scales as `k_scale` and
            `v_scale`.  Arrays in host memory only.

        Returns
        -------
        array, shape (nnz, H, D_v), or a pair with the LSE
            The bits of a row depend neither on the batch nor on the page size.

        Raises
        ------
        UsageError
            If `plan` was not called, or the arrays do not fit the plan.
        TypeError
            If an argument is not an array or has another dtype.
        """
        call = from_arguments(
            AttentionCall, locals(), o_dtype=self._dtypes.get("o"), tensor_cores=self._tensor_cores
        )
        return self._run_pages(q, paged_kv_cache, window_left, call, kv_cache_sf)

    run_return_lse = functools.partialmethod(run, return_lse=True)


class BatchDecodeWithPagedKVCacheWrapper(PagedAttentionWrapper):
    """Decode attention over a paged key/value cache: the newest row of each request.

    Parameters, attributes and errors as for `BatchPrefillWithPagedKVCacheWrapper`, with three
    buffers for `use_cuda_graph`, and `use_tensor_cores`: with True, `run` raises if no tensor-core
    kernel supports the call; with False, tensor cores are used where supported.

    Examples
    --------
    Two requests, of 3 keys on pages 2 and 0, and of 2 keys on page 1:

    >>> import numpy as np
    >>> from nbflow_kernels import BatchDecodeWithPagedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper()
    >>> plan = wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 1, 1, 4, 2)
    >>> pages = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(3, 2, 1, 4)
    >>> wrapper.run(np.zeros((2, 1, 4), np.float32), (pages, pages))[:, 0, 0]
    array([3. , 2.5], dtype=float32)
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "kv_indptr": ("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
            "kv_indices": ("paged_kv_indices_buffer", paged_kv_indices_buffer),
            "last_page_len": ("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer),
        }
        graph = graph_of(use_cuda_graph, buffers)
        super().__init__(kv_layout, backend, float_workspace_buffer, graph)
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        *,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        disable_page_sharing: bool = False,
        q_len_per_req: int = 1,
        head_dim_vo: int | None = None,
        kv_format: str | None = None,
        variant: Any = None,
        attention_chunk: int = 0,
        key_cos_sin: Any = None,
        key_interleave: bool = False,
    ) -> AttentionPlan:
        """Schedule a step; the plan serves every layer with the same options.

        Parameters
        ----------
        indptr, indices, last_page_len : arrays of int32, shapes (B + 1,), (n_pages,) and (B,)
            The page table, as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        num_qo_heads, num_kv_heads, head_dim, page_size, head_dim_vo : int
            H, G, the head size of queries and keys, tokens per page, and the head size of the
            values, `head_dim` by default.
        q_len_per_req : int
            Query rows of each request, with a causal mask among them.
        data_type : dtype or str, optional
            The one of `q_data_type` and `kv_data_type` that is not given, or both.
        pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type
        sm_scale, rope_scale, rope_theta, non_blocking, fixed_split_size, disable_split_kv
        disable_page_sharing, kv_format, variant, attention_chunk, key_cos_sin, key_interleave
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.
        """
        if data_type is not None:
            if q_data_type is not None and kv_data_type is not None:
                raise UsageError(
                    "data_type goes without q_data_type and kv_data_type, or with one of them"
                )
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        if q_len_per_req < 1:
            raise UsageError(f"q_len_per_req must be positive, got {q_len_per_req}")
        rows = np.arange(max(len(indptr), 1), dtype=np.int32) * np.int32(q_len_per_req)
        return self._plan_pages(
            (rows, indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, head_dim_vo), page_size,
            {**locals(), "causal": True},
        )  # fmt: skip

    run = BatchPrefillWithPagedKVCacheWrapper.run
    run_return_lse = functools.partialmethod(run, return_lse=True)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *args: Any,
    global_override_indptr_cpu: Any = None,
    **options: Any,
) -> AttentionPlan:
    """Schedule a step of a decode wrapper; FlashInfer's name for engines that set it as `plan`.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
        The wrapper.
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
    *args, **options
        As in `BatchDecodeWithPagedKVCacheWrapper.plan`.
    global_override_indptr_cpu : array of int32, shape (B + 1,), optional
        `indptr` in host memory, which saves the copy of one on a device.

    Returns
    -------
    AttentionPlan
        The plan, also kept as `current`.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper()
    >>> plan = fast_decode_plan(wrapper, ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 1, 1, 4, 2)
    >>> plan.kv_lens
    array([3, 2], dtype=int32)
    """
    if global_override_indptr_cpu is not None:
        indptr = global_override_indptr_cpu
    plan = BatchDecodeWithPagedKVCacheWrapper.plan  # an instance may have this function as `plan`
    return plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *args, **options,
    )  # fmt: skip
