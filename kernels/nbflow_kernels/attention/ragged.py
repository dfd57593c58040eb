"""Batch attention over ragged keys and values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_indptr, is_cuda, on_host
from nbflow_kernels.attention.cuda_graph import graph_of
from nbflow_kernels.attention.options import from_arguments
from nbflow_kernels.attention.paged_base import PagedAttentionWrapper
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.run import AttentionCall, PlannedRun, run_plan
from nbflow_kernels.kv_cache.formats import formats_of
from nbflow_kernels.kv_cache.nvfp4 import nvfp4_rows


class BatchPrefillWithRaggedKVCacheWrapper(PagedAttentionWrapper):
    """Attention of a batch with contiguous keys, one request after the other.

    Parameters, attributes and errors as for `BatchPrefillWithPagedKVCacheWrapper`, but:

    Parameters
    ----------
    kv_layout : str
        ``"NHD"``: keys are (nnz_kv, G, D); ``"HND"``: (G, nnz_kv, D).
    use_cuda_graph : bool
        `k` and `v` have the rows of the first plan in every call, and later plans have at most its
        number of keys.
    qo_indptr_buf, kv_indptr_buf : arrays of int32, optional
        Buffers of `use_cuda_graph`, of B + 1 elements each, on the device of the queries.

    Examples
    --------
    Request 0 has one row and two keys, request 1 has two rows and two keys:

    >>> import numpy as np
    >>> from nbflow_kernels import BatchPrefillWithRaggedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper()
    >>> plan = wrapper.plan(ints(0, 1, 3), ints(0, 2, 4), 1, 1, 4, causal=True)
    >>> kv = np.repeat(np.arange(4, dtype=np.float32), 4).reshape(4, 1, 4)
    >>> wrapper.run(np.zeros((3, 1, 4), np.float32), kv, kv)[:, 0, 0]
    array([0.5, 2. , 2.5], dtype=float32)
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        *,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "qo_indptr": ("qo_indptr_buf", qo_indptr_buf),
            "kv_indptr": ("kv_indptr_buf", kv_indptr_buf),
        }
        graph = graph_of(use_cuda_graph, buffers)
        super().__init__(kv_layout, backend, float_workspace_buffer, graph)
        self._nnz_kv = 0

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        kv_format: str | None = None,
        variant: Any = None,
    ) -> AttentionPlan:
        """Schedule a step; the plan serves every layer with the same options.

        Parameters
        ----------
        qo_indptr, kv_indptr : array of int32, shape (B + 1,)
            Query rows and key rows of each request.
        num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, custom_mask, packed_custom_mask
        causal, pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale
        rope_scale, rope_theta, q_data_type, kv_data_type, o_data_type, non_blocking
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        disable_split_kv, kv_format, variant
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        fixed_split_size : int, optional
            Keys per split, instead of 2048; other sizes change the last bits.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`; each request is one page.
        """
        rows, starts = on_host(qo_indptr), on_host(kv_indptr)
        check_indptr("kv_indptr", starts)
        kv_lens = starts[1:] - starts[:-1]
        n_keys = int(starts[-1])
        longest = max(int(kv_lens.max()), 1) if len(kv_lens) else 1
        if self._graph is not None:  # fixed by the captured launches
            longest = max(self._graph.n_keys, 1) if self._graph.is_planned else max(n_keys, 1)
        # "page" b starts at token starts[b]: the cache is viewed as overlapping pages
        plan = self._plan_lens(
            (rows, np.arange(len(starts), dtype=np.int32), starts[:-1], kv_lens),
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo), longest, locals(),
            split_keys=fixed_split_size,
        )  # fmt: skip
        self._nnz_kv = n_keys if self._graph is None else self._graph.n_keys
        return plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        sinks: Any = None,
        lse_base: str = "2",
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend with the current plan.

        Parameters
        ----------
        q : array of float32 or float16, shape (nnz, H, D)
            Query rows of all requests, with any row stride.
        k, v : array, shapes (nnz_kv, G, D) and (nnz_kv, G, D_v), or (G, nnz_kv, ...)
            Keys and values of all requests in `kv_layout`.
        q_scale, k_scale, v_scale, out, lse, return_lse, sinks, lse_base
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        kv_cache_sf : pair of arrays of uint8 or float8_e4m3fn, optional
            Scales of keys and values in NVFP4, (nnz_kv, G, D / 16) or (G, nnz_kv, D / 16) each; `k`
            and `v` are their codes, with rows of D / 2 bytes.  Arrays in host memory only.

        Returns
        -------
        array, shape (nnz, H, D_v), or a pair with the LSE
            The bits of a row do not depend on the batch.
        """
        call = from_arguments(AttentionCall, locals(), o_dtype=self._dtypes["o"])
        plan = self._planned()
        _, G, *sizes = plan.heads
        heads_first = self.kv_layout == "HND"
        token_bytes, scales = None, None
        if kv_cache_sf is not None:
            k, v, kinds, scales = nvfp4_rows(
                (k, v), kv_cache_sf, self._nnz_kv, G, (sizes[0], sizes[1]), self.kv_layout,
                self._kv_format,
            )  # fmt: skip
        else:
            formats = formats_of(k, v, self._kv_format)
            for name, array, format, size in zip("kv", (k, v), formats, sizes, strict=True):
                row = format.row_length(size)
                shape = (G, self._nnz_kv, row) if heads_first else (self._nnz_kv, G, row)
                check_array(name, array, shape, array.dtype, any_stride=True)
            kinds = (formats[0].kind, formats[1].kind)
        self._check_arrays(plan, q, ("k", k), ("v", v))
        if is_cuda(k):  # overlapping pages by strides
            token_bytes = (k.strides[heads_first], v.strides[heads_first])
            k, v = k[None], v[None]
        else:
            k, v = (_pages_of_tokens(array, heads_first) for array in (k, v))
            if scales is not None:
                scales = tuple(_pages_of_tokens(array, heads_first) for array in scales)
        return run_plan(PlannedRun(plan, q, k, v, kinds, call, self._variant, token_bytes, scales))

    run_return_lse = functools.partialmethod(run, return_lse=True)


def _pages_of_tokens(rows: Any, heads_first: bool) -> Any:
    """Return a 4-D view of ragged rows as overlapping pages, one starting at each token."""
    token = 1 if heads_first else 0
    lengths = list(rows.shape)
    n, lengths[token] = lengths[token], 1
    return np.lib.stride_tricks.as_strided(
        rows, (n, *lengths), (rows.strides[token], *rows.strides), writeable=False
    )
