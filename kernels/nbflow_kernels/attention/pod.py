"""Prefill of one request and decode of a batch in one launch (POD attention [1]_).

.. [1] A. Kamath et al., "POD-Attention: unlocking full prefill-decode overlap for faster LLM
   inference", arXiv:2410.18038.
"""

from __future__ import annotations

from typing import Any

from nbflow_kernels.arrays import check_together, is_cuda
from nbflow_kernels.attention.options import Options, PlanInputs, from_arguments
from nbflow_kernels.attention.paged import BatchDecodeWithPagedKVCacheWrapper
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.attention.run import AttentionCall, PlannedRun, run_plan
from nbflow_kernels.attention.single import single_run
from nbflow_kernels.cpu.parallel_for import get_num_threads
from nbflow_kernels.errors import UsageError

SHARES_PER_THREAD = 4
"""Shares of a plan per thread, so that the work of both parts divides evenly."""


class PODWithPagedKVCacheWrapper:
    """Attention of one prompt with contiguous keys, and decode of a batch over a paged cache.

    On the CPU both are one launch, whose threads divide the work of both.  On a CUDA device their
    kernels are launched one after the other.  `BatchAttention` takes prompts whose keys are in the
    cache already.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, paged_kv_indptr_buffer
    paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        As in `BatchDecodeWithPagedKVCacheWrapper`; `kv_layout` is that of the paged cache.  With
        `use_cuda_graph`, the prompt has the same shapes and options in every call, and the first
        call on a stream copies its plan: run once on a stream before capturing there.

    Attributes
    ----------
    current : AttentionPlan or None
        The plan of the decode requests.

    Examples
    --------
    A prompt of two rows, and two requests of 3 keys on pages 2 and 0, and of 2 keys on page 1:

    >>> import numpy as np
    >>> from nbflow_kernels import PODWithPagedKVCacheWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = PODWithPagedKVCacheWrapper()
    >>> plan = wrapper.plan(ints(0, 2, 3), ints(2, 0, 1), ints(1, 2), 1, 1, 4, 2)
    >>> pages = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(3, 2, 1, 4)
    >>> rows, q = pages[0], np.zeros((2, 1, 4), np.float32)
    >>> prompt, decoded = wrapper.run(q, rows, rows, q, (pages, pages), causal_p=True)
    >>> prompt[:, 0, 0], decoded[:, 0, 0]
    (array([0. , 0.5], dtype=float32), array([3. , 2.5], dtype=float32))
    """

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer,
        )  # fmt: skip
        self._use_cuda_graph = use_cuda_graph
        self._prompt: tuple[Any, AttentionPlan] | None = None

    @property
    def current(self) -> AttentionPlan | None:
        """Return the plan of the decode requests."""
        return self._decode.current

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any = None, int_workspace_buffer: Any = None
    ) -> None:
        """Set the split-KV workspace of later plans; None to allocate per plan."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

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
        q_data_type: Any = None,
        kv_data_type: Any = None,
        *,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        kv_format: str | None = None,
    ) -> AttentionPlan:
        """Schedule the decode requests; the prompt is scheduled by `run`.

        Parameters
        ----------
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
        pos_encoding_mode, window_left, q_data_type, kv_data_type, sm_scale, rope_scale, rope_theta
        non_blocking, kv_format
            As in `BatchDecodeWithPagedKVCacheWrapper.plan`.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.
        """
        plan = self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode, window_left, None, q_data_type, kv_data_type, sm_scale=sm_scale,
            rope_scale=rope_scale, rope_theta=rope_theta, non_blocking=non_blocking,
            kv_format=kv_format,
        )  # fmt: skip
        if not self._use_cuda_graph:
            _divide(plan)
        return plan

    def run(
        self,
        q_p: Any,
        k_p: Any,
        v_p: Any,
        q_d: Any,
        paged_kv_cache_d: Any,
        custom_mask_p: Any = None,
        packed_custom_mask_p: Any = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        causal_d: bool = False,
        kv_layout_d: str | None = None,
        pos_encoding_mode_d: str | None = None,
        sm_scale_d: float | None = None,
        window_left_d: int | None = None,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        *,
        out_p: Any = None,
        out_d: Any = None,
    ) -> tuple[Any, Any]:
        """Attend from the prompt and from the decode rows.

        Parameters
        ----------
        q_p : array of float32 or float16, shape (T, H, D)
            Query rows of the prompt.
        k_p, v_p : array, shape (N, G, D) or (G, N, D)
            Keys and values of the prompt in `kv_layout_p`.
        q_d : array of float32 or float16, shape (B, H, D)
            The newest row of each decode request.
        paged_kv_cache_d : pair of arrays, or one array
            The paged cache, as in `BatchDecodeWithPagedKVCacheWrapper.run`.
        custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p, pos_encoding_mode_p, sm_scale_p
        window_left_p, rope_scale_p, rope_theta_p, return_lse_p, use_fp16_qk_reduction, out_p
            Options of the prompt, as in `single_prefill_with_kv_cache`.
        causal_d : bool
            Must be False: a decode row is at the end of its sequence and sees all keys.
        kv_layout_d, pos_encoding_mode_d, sm_scale_d : optional
            Must be those of the wrapper and its plan, if given.
        window_left_d : int, optional
            Replaces the plan's window, also for later calls.
        q_scale, k_scale, v_scale, return_lse_d, out_d
            As in `BatchDecodeWithPagedKVCacheWrapper.run`, for the decode rows.

        Returns
        -------
        prompt, decoded : arrays, shapes (T, H, D) and (B, H, D)
            Each a pair with the LSE if wanted.  The bits are those of
            `single_prefill_with_kv_cache` and `BatchDecodeWithPagedKVCacheWrapper`.
        """
        plan = self._decode._planned()
        if causal_d:
            raise UsageError("causal_d must be False: decode rows are the last of their sequences")
        _check_planned("kv_layout_d", kv_layout_d, self._decode.kv_layout)
        _check_planned("pos_encoding_mode_d", pos_encoding_mode_d, self._decode.position_mode)
        _check_planned("sm_scale_d", sm_scale_d, plan.sm_scale)
        check_together(q_p=q_p, q_d=q_d)
        own = {name[:-2]: value for name, value in locals().items() if name.endswith("_p")}
        options = from_arguments(Options, own, use_fp16_qk_reduction=use_fp16_qk_reduction)
        inputs = from_arguments(PlanInputs, own)
        if self._use_cuda_graph and inputs.masked:
            raise UsageError("custom_mask_p is not supported with use_cuda_graph: it has no buffer")
        prompt = single_run(q_p, k_p, v_p, options, inputs, from_arguments(AttentionCall, own))
        self._keep_plan(prompt, options, masked=inputs.masked)
        call_d = AttentionCall(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out_d, return_lse=return_lse_d
        )
        decoded = self._decode._pages_run(q_d, paged_kv_cache_d, window_left_d, call_d)
        results: tuple[Any, Any] = run_plan(prompt, decoded)
        return results

    def _keep_plan(self, run: PlannedRun, options: Options, *, masked: bool) -> None:
        """Use the plan of the last prompt of the same sizes, whose tables are on the device."""
        key = (run.q.shape, run.k.shape, run.v.shape, options, get_num_threads())
        if self._prompt is not None and self._prompt[0] == key and not masked:
            run.plan = self._prompt[1]
            return
        if self._use_cuda_graph and self._prompt is not None:
            raise UsageError(
                "the prompt must keep its shapes and options with use_cuda_graph; make another "
                "wrapper"
            )
        if not is_cuda(run.q):
            _divide(run.plan)
        self._prompt = None if masked else (key, run.plan)


def _check_planned(name: str, given: Any, wanted: Any) -> None:
    """Raise unless an option of the decode rows, if given, is that of the wrapper or its plan."""
    if given is not None and given != wanted:
        raise UsageError(
            f"{name} must be that of the wrapper or its plan ({wanted!r}), got {given!r}; "
            "give it there"
        )


def _divide(plan: AttentionPlan) -> None:
    """Fill a plan again, with more shares than threads if there are several."""
    plan.shares_per_thread = SHARES_PER_THREAD if get_num_threads() > 1 else 1
    plan_into(plan, plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens)
