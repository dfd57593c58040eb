"""Batch attention over a paged cache with attention sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbflow_kernels.attention.options import POSITION_MODES
from nbflow_kernels.attention.paged import BatchPrefillWithPagedKVCacheWrapper
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.errors import UsageError, unknown_name


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Attention of prefill and decode requests with a learned sink per head.

    `BatchPrefillWithPagedKVCacheWrapper` whose `run` takes the sinks, with FlashInfer's signature;
    `run(..., sinks=)` of the other wrappers is the same.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf
    paged_kv_indices_buf, paged_kv_last_page_len_buf, backend
        As in `BatchPrefillWithPagedKVCacheWrapper`.
    pos_encoding_mode, window_left, q_data_type, kv_data_type
        Options of all plans, as in `BatchPrefillWithPagedKVCacheWrapper.plan`, which may repeat
        them and not change them.
    head_dim_qk, head_dim_vo : int, optional
        Head sizes that all plans must have.

    Examples
    --------
    One row over two keys of score 0, with the value 1, and a sink of the same score:

    >>> import numpy as np
    >>> from nbflow_kernels import BatchAttentionWithAttentionSinkWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BatchAttentionWithAttentionSinkWrapper()
    >>> plan = wrapper.plan(ints(0, 1), ints(0, 1), ints(0), ints(2), 1, 1, 4, 2)
    >>> pages = np.ones((1, 2, 1, 4), np.float32)
    >>> wrapper.run(np.zeros((1, 1, 4), np.float32), (pages, pages), np.zeros(1, np.float32))
    array([[[0.6666667, 0.6666667, 0.6666667, 0.6666667]]], dtype=float32)
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
        pos_encoding_mode: str = "NONE",
        q_data_type: Any = None,
        kv_data_type: Any = None,
        head_dim_qk: int | None = None,
        head_dim_vo: int | None = None,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, backend=backend,
        )  # fmt: skip
        if pos_encoding_mode not in POSITION_MODES:
            raise unknown_name("pos_encoding_mode", pos_encoding_mode, POSITION_MODES)
        self._sizes = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}
        self._fixed = {
            "pos_encoding_mode": (pos_encoding_mode, "NONE"), "window_left": (window_left, -1),
            "q_data_type": (q_data_type, None), "kv_data_type": (kv_data_type, None),
        }  # fmt: skip

    def _plan_pages(
        self,
        tables: tuple[Any, Any, Any, Any],
        heads: tuple[int, int, int, int | None],
        page_size: int,
        arguments: Mapping[str, Any],
    ) -> AttentionPlan:
        """Plan with the constructor's options."""
        found = (heads[2], heads[2] if heads[3] is None else heads[3])
        for (name, wanted), size in zip(self._sizes.items(), found, strict=True):
            if wanted is not None and wanted != size:
                raise UsageError(f"{name} must be the wrapper's, {wanted}, got {size}")
        fixed = {name: value for name, (value, default) in self._fixed.items() if value != default}
        for name, value in fixed.items():
            if arguments[name] not in (self._fixed[name][1], value):
                raise UsageError(
                    f"{name} must be the wrapper's, {value!r}, got {arguments[name]!r}"
                )
        return super()._plan_pages(tables, heads, page_size, {**arguments, **fixed})

    def run(  # type: ignore[override]
        self,
        q: Any,
        paged_kv_cache: Any,
        sink: Any,
        sm_scale: float | None = None,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        window_left: int | None = None,
        lse_base: str = "2",
    ) -> Any:
        """Attend with the current plan.

        Parameters
        ----------
        sink : array of float32, shape (H,)
            Per head, the score of an additional key without a value.
        sm_scale : float, optional
            Replaces the plan's `sm_scale` in this call.
        q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, window_left, lse_base
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        array, shape (nnz, H, D_v), or a pair with the LSE
            The attention; the sink takes part in the LSE.
        """
        if sink is None:
            raise UsageError("sink must be an array of float32 with a score per head, got None")
        scale = None if q_scale is None else q_scale
        if sm_scale is not None:
            ratio = float(sm_scale) / self._planned().sm_scale
            scale = ratio if scale is None else ratio * scale
        return super().run(
            q, paged_kv_cache, q_scale=scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, window_left=window_left, sinks=sink, lse_base=lse_base,
        )  # fmt: skip
