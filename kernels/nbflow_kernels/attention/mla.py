"""Multi-head latent attention over a paged cache, in the absorbed form.

All heads share one compressed vector ckv and one rotated vector kpe per token.  With the
up-projection of keys absorbed into the query, and that of values into the output projection,
attention has H query heads over *one* KV head with key (ckv, kpe) and value ckv [1]_.

.. [1] DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, check_indptr, empty, is_cuda, on_host
from nbflow_kernels.attention import cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cascade import wide_output
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.options import check_dtype
from nbflow_kernels.attention.paged_base import PlannedWrapper
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.attention.run import AttentionCall, check_devices, narrow_output
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.page_table import check_kv_lens, check_mla_cache

FLOATS = (np.float32, np.float16)


class BatchMLAPagedAttentionWrapper(PlannedWrapper):
    r"""Latent attention of a batch, prefill and decode mixed.

    .. math:: o_{th} = \sum_n \mathrm{softmax}_n\bigl(\mathrm{scale}\,(q^{nope}_{th} \cdot ckv_n
              + q^{pe}_{th} \cdot kpe_n)\bigr)\, ckv_n

    Parameters
    ----------
    float_workspace_buffer : array, optional
        Split-KV workspace, as in `BatchPrefillWithPagedKVCacheWrapper`.

    Attributes
    ----------
    current : AttentionPlan or None
        The plan of the current step, inspectable as NumPy arrays.

    Examples
    --------
    One request with one row and two tokens; the sizes are 2 + 2 instead of 512 + 64:

    >>> import numpy as np
    >>> from nbflow_kernels import BatchMLAPagedAttentionWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchMLAPagedAttentionWrapper()
    >>> _ = wrapper.plan(ints(0, 1), ints(0, 1), ints(0), ints(2), 1, 2, 2, 2, True, 1.0)
    >>> ckv, kpe = np.float32([[[1, 0], [0, 1]]]), np.float32([[[0, 0], [0, 9]]])
    >>> zero = np.zeros((1, 1, 2), np.float32)
    >>> wrapper.run(zero, zero, ckv, kpe)[0]  # equal scores
    array([[0.5, 0.5]], dtype=float32)
    >>> wrapper.run(zero, zero + 1, ckv, kpe)[0].round(4)  # scores 0 and 9
    array([[1.000e-04, 9.999e-01]], dtype=float32)
    """

    def __init__(self, float_workspace_buffer: Any = None) -> None:
        super().__init__(float_workspace_buffer)
        self._sizes = (0, 0, 0, 0)
        self._dtypes: tuple[Any, Any] = (None, None)
        self._q = np.zeros((0, 0, 0), np.float32)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any = None,
        kv_data_type: Any = None,
    ) -> AttentionPlan:
        """Schedule a step; the plan serves every layer.

        Parameters
        ----------
        qo_indptr, kv_indptr, kv_indices : arrays of int32, shapes (B + 1,), (B + 1,) and (n_pages,)
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        kv_len_arr : array of int32, shape (B,)
            Tokens of each request, at most the capacity of its pages.
        num_heads : int
            H.
        head_dim_ckv, head_dim_kpe : int
            Sizes of ckv and kpe, 512 and 64 in DeepSeek-V2 and -V3; kpe may have size 0.
        page_size, causal
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        sm_scale : float
            Softmax scale, from the head size before the absorption: ``1 / sqrt(128 + 64)`` in
            DeepSeek-V2 and -V3, times the YaRN factor.
        q_data_type, kv_data_type : dtype or str, optional
            If given, `run` requires these dtypes.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.  It references the given arrays: do not change them
            before the last `run`.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        self.current = None
        least = {"num_heads": 1, "head_dim_ckv": 1, "head_dim_kpe": 0}
        for name, value in zip(least, (num_heads, head_dim_ckv, head_dim_kpe), strict=True):
            if value < least[name]:
                raise UsageError(f"{name} must be at least {least[name]}, got {value}")
        if not np.isfinite(sm_scale):
            raise UsageError(f"sm_scale must be finite, got {sm_scale}")
        qo_indptr, kv_indptr = on_host(qo_indptr), on_host(kv_indptr)
        kv_indices, kv_len_arr = on_host(kv_indices), on_host(kv_len_arr)
        check_kv_lens(kv_indptr, kv_indices, kv_len_arr, page_size)
        check_indptr("qo_indptr", qo_indptr, len(kv_indptr))
        plan = AttentionPlan(
            (num_heads, 1, head_dim_ckv + head_dim_kpe, head_dim_ckv), page_size,
            causal=bool(causal), sm_scale=float(sm_scale),
        )  # fmt: skip
        plan.workspace = self._workspace
        plan_into(plan, qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self._sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self._dtypes = (q_data_type, kv_data_type)
        self._n_pages = -1
        self._q = np.empty((plan.n_rows, num_heads, head_dim_ckv + head_dim_kpe), np.float32)
        self.current = plan
        return plan

    def run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv_cache: Any,
        kpe_cache: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        *,
        return_lse_base_on_e: bool = False,
        kv_format: str | None = None,
    ) -> Any:
        """Attend with the current plan.

        Parameters
        ----------
        q_nope : array of float32 or float16, shape (nnz, H, D_ckv)
            Queries without position, times the absorbed up-projection of the keys.
        q_pe : array of the same dtype, shape (nnz, H, D_kpe)
            Rotated part of the queries.
        ckv_cache, kpe_cache : array, shape (pages, page_size, D_ckv) and (pages, page_size, D_kpe)
            Pages written by `append_paged_mla_kv_cache`.
        out : array of the queries' dtype, shape (nnz, H, D_ckv), optional
            Output array.
        lse : array of float32, shape (nnz, H), optional
            Output array of the LSE.
        return_lse : bool
            Return the pair (out, lse).
        return_lse_base_on_e : bool
            Return a natural-logarithm LSE instead of base 2.
        kv_format : str, optional
            Storage format of the caches, as in `append_paged_mla_kv_cache`.

        Returns
        -------
        array of the queries' dtype, shape (nnz, H, D_ckv), or a pair with the LSE
            Input of the value up-projection.  The bits of a row depend neither on the batch nor on
            page size and threads.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        plan = self._planned()
        H, D_ckv, D_kpe, page_size = self._sizes
        check_array("q_nope", q_nope, (plan.n_rows, H, D_ckv), FLOATS, rows=True)
        check_array("q_pe", q_pe, (plan.n_rows, H, D_kpe), q_nope.dtype, rows=True)
        check_dtype("q_nope", self._dtypes[0], q_nope.dtype)
        format = check_mla_cache(ckv_cache, kpe_cache, page_size, (D_ckv, D_kpe), kv_format)
        if kv_format is None:
            check_dtype("ckv_cache", self._dtypes[1], ckv_cache.dtype)
        check_devices(plan, AttentionCall(), q_nope)
        self._check_page_numbers(plan, ckv_cache.shape[0])
        into = wide_output(q_nope, out)
        if into is None:
            into = empty(q_nope, q_nope.shape)
        if lse is not None:
            check_array("lse", lse, q_nope.shape[:2])
        if lse is None and return_lse:
            lse = empty(q_nope, q_nope.shape[:2])
        plan.header[at.LSE_NATURAL] = return_lse_base_on_e
        q = self._q
        if is_cuda(q_nope):
            q = empty(q_nope, q.shape, q_nope.dtype)
        q[:, :, :D_ckv], q[:, :, D_ckv:] = q_nope, q_pe
        variant = cuda if is_cuda(q_nope) else launch
        variant.latent_attention(plan, q, ckv_cache, kpe_cache, into, lse, format.kind)
        out = narrow_output(into, out, q_nope.dtype)
        return (out, lse) if return_lse else out
