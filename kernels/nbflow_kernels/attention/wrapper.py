"""Batch attention over a paged cache: plan once per step, run once per layer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nbflow_kernels._dispatch import check_array, is_cuda, on_host
from nbflow_kernels.attention.options import (
    Options,
    check_backend,
    check_dtype,
    refuse_half_precision,
)
from nbflow_kernels.attention.plan import AttentionPlan, make_plan, plan_into
from nbflow_kernels.attention.running import Call, run_plan
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kvcache.formats import kinds_of
from nbflow_kernels.kvcache.pages import (
    check_cache,
    check_page_numbers,
    check_page_table,
    count_tokens,
)


class PagedWrapper:
    """What the wrappers over a paged cache have in common: the present plan, and running it."""

    def __init__(self, kv_layout: str, backend: str = "auto") -> None:
        Options(kv_layout=kv_layout)  # checks the name
        check_backend(backend)
        self.kv_layout = kv_layout
        self.current: AttentionPlan | None = None
        self._n_pages = -1
        self._dtypes: dict[str, Any] = {}
        self._kv_format: str | None = None
        self._variant: Any = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any = None, int_workspace_buffer: Any = None
    ) -> None:
        """Do nothing: plans hold their own memory, as much as a step needs."""

    def end_forward(self) -> None:
        """Do nothing; FlashInfer's former way to end a step."""

    def _plan_pages(
        self,
        qo_indptr: Any,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        heads: tuple[int, int, int, int],
        page_size: int,
        options: dict[str, Any],
        extras: dict[str, Any],
    ) -> AttentionPlan:
        """Check the page table; make the plan and keep it with what `run` needs."""
        check_page_table(indptr, indices, last_page_len, page_size)
        kv_lens = count_tokens(indptr, last_page_len, page_size)
        return self._plan_lens(
            qo_indptr, indptr, indices, kv_lens, heads, page_size, options, extras
        )

    def _plan_lens(
        self,
        qo_indptr: Any,
        indptr: Any,
        indices: Any,
        kv_lens: Any,
        heads: tuple[int, int, int, int],
        page_size: int,
        options: dict[str, Any],
        extras: dict[str, Any],
    ) -> AttentionPlan:
        """Make the plan and keep it with what `run` needs."""
        self.current, self._n_pages = None, -1
        self._variant = extras.get("variant")
        self._kv_format = extras.get("kv_format")
        self._dtypes = {name: extras.get(name) for name in ("q", "kv", "o")}
        split_off = options.pop("disable_split_kv", False) or self._variant is not None
        sharing_off = options.pop("disable_page_sharing", False) or self._variant is not None
        self.current = make_plan(
            qo_indptr, indptr, indices, kv_lens, heads, page_size,
            Options(
                kv_layout=self.kv_layout, disable_split_kv=split_off,
                disable_page_sharing=sharing_off, **options,
            ),
            custom_mask=extras.get("custom_mask"),
            packed_custom_mask=extras.get("packed_custom_mask"),
        )  # fmt: skip
        return self.current

    def _planned(self) -> AttentionPlan:
        """Return the present plan."""
        if self.current is None:
            raise UsageError("run needs a plan: call plan(...) first, once per step")
        return self.current

    def _run_pages(self, q: Any, paged_kv_cache: Any, window_left: int | None, call: Call) -> Any:
        """Check the arrays of a layer against the plan, and attend."""
        plan = self._planned()
        _, G, D_qk, D_vo = plan.heads
        k, v = check_cache(
            paged_kv_cache, plan.page_size, G, D_qk, self.kv_layout, self._kv_format, D_value=D_vo
        )
        check_array("q", q, (plan.n_rows, plan.heads[0], D_qk), (np.float32, np.float16), rows=True)
        check_dtype("q", self._dtypes["q"], q.dtype)
        if self._kv_format is None:
            for array in (k, v):
                check_dtype("paged_kv_cache", self._dtypes["kv"], array.dtype)
        if self._n_pages != k.shape[0]:  # once per plan: layers have equally many pages
            check_page_numbers(plan.kv_indices[: plan.kv_indptr[-1]], k.shape[0])
            self._n_pages = k.shape[0]
        if window_left is not None and max(window_left, -1) != plan.window_left:
            Options(window_left=window_left)  # checks it
            plan.set_window(window_left)
            plan_into(plan, plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens)
        kinds = kinds_of(k, v, self._kv_format)
        return run_plan(plan, q, k, v, kinds, call, self._variant)


def keys_of(n_pages: int | None, page_size: int) -> int | None:
    """Return the keys on so many pages."""
    return None if n_pages is None else n_pages * page_size


def keep_in(buffer: Any, name: str, array: Any) -> Any:
    """Return `array`, or the part of the caller's buffer that it was copied to."""
    array = on_host(array)
    if buffer is None:
        return array
    if is_cuda(buffer):
        raise TypeError(f"{name} must be a NumPy array: the plan is made on the host")
    check_array(name, buffer, (None,), array.dtype)
    if len(buffer) < len(array):
        raise UsageError(f"{name} must have room for {len(array)} elements, got {len(buffer)}")
    buffer[: len(array)] = array
    return buffer[: len(array)]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of a batch of requests over a paged key/value cache, prefill and decode mixed.

    Parameters
    ----------
    float_workspace_buffer : object, optional
        FlashInfer's scratch memory.  Not used on the CPU: a plan holds what it needs.
    kv_layout : str
        ``"NHD"``: cache pages are (page_size, G, D); ``"HND"``: (G, page_size, D), the faster one,
        because the keys of a head lie one behind the other.
    use_cuda_graph : bool
        Whether `plan` copies its tables to the buffers below, so that their addresses stay.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : arrays
        These buffers, int32, as long as the largest step needs.
    backend : str
        Must be ``"auto"``: the kind of array chooses the kernel.

    Attributes
    ----------
    current : AttentionPlan or None
        The plan of the present step; NumPy arrays to look at.

    Raises
    ------
    UsageError
        If `kv_layout` or `backend` is another name, or a buffer is missing.

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
        super().__init__(kv_layout, backend)
        self._buffers = (
            qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        )  # fmt: skip
        if use_cuda_graph and any(buffer is None for buffer in self._buffers):
            raise UsageError("use_cuda_graph needs the four buffers qo_indptr_buf, paged_kv_*_buf")
        if not use_cuda_graph:
            self._buffers = (None,) * 4

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
        *,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        disable_page_sharing: bool = False,
        kv_format: str | None = None,
        variant: Any = None,
    ) -> AttentionPlan:
        """Divide the step's work; the plan serves every layer with the same options.

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
        num_qo_heads, num_kv_heads, head_dim_qk : int
            H, G and the size of queries and keys; H must be a multiple of G.
        page_size : int
            Tokens per page.
        head_dim_vo : int, optional
            Size of the values; `head_dim_qk` by default.
        custom_mask : array of bool, optional
            The masks (qo_len, kv_len) of all requests, flat, one after the other; takes the place
            of `causal`.
        packed_custom_mask : array of uint8, optional
            The same as bits, the lowest of a byte first, each request from a new byte on.
        causal, pos_encoding_mode, use_fp16_qk_reduction, sm_scale, window_left, logits_soft_cap
            As in `single_prefill_with_kv_cache`.
        rope_scale, rope_theta : float, optional
            As in `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type : dtype or str, optional
            If given, `run` checks that its arrays have them (FlashInfer's default is float16).
        o_data_type : dtype, optional
            dtype of the result, float32 or float16; that of the queries by default.
        non_blocking : bool
            Whether copies to a device may overlap with other work; there are none on the CPU.
        fixed_split_size : int, optional
            Pages per partial result, in place of 2048 keys; other sizes give other last bits.
        disable_split_kv : bool
            Never divide the keys of a row among threads; the bits are the same.
        disable_page_sharing : bool
            Read the pages of every request for itself.  On the CPU requests beside each other that
            begin with the same pages share the work on these, as in a cascade; the bits are the
            same.
        kv_format : str, optional
            How the cache stores numbers where its dtype does not say it, e.g. ``"q8_0"``, or
            ``"q8_0/q4_0"`` for keys and values of formats of their own; see `kv_formats`.
        variant : object, optional
            Functions of your own; see `AttentionVariant`.

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
            If an argument is not an array of the right dtype.
        """
        refuse_half_precision(use_fp16_qk_reduction)
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        tables = [
            keep_in(buffer, f"{name}_buf", array)
            for buffer, name, array in zip(self._buffers, names, given, strict=True)
        ]
        vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        return self._plan_pages(
            tables[0], tables[1], tables[2], tables[3],
            (num_qo_heads, num_kv_heads, head_dim_qk, vo), page_size,
            {
                "causal": causal, "window_left": window_left, "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale, "pos_encoding_mode": pos_encoding_mode,
                "rope_scale": rope_scale, "rope_theta": rope_theta,
                "split_keys": keys_of(fixed_split_size, page_size),
                "disable_split_kv": disable_split_kv,
                "disable_page_sharing": disable_page_sharing,
            },
            {
                "custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask,
                "kv_format": kv_format, "variant": variant, "q": q_data_type, "kv": kv_data_type,
                "o": o_data_type,
            },
        )  # fmt: skip

    def run(
        self,
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
        lse_base: str = "2",
    ) -> Any:
        """Attend with the present plan.

        Parameters
        ----------
        q : array of float32 or float16, shape (nnz, H, D)
            Query rows of all requests; rows may be far apart.
        paged_kv_cache : pair of arrays, or one array
            Keys and values, (pages, page_size, G, D) each for ``"NHD"`` or
            (pages, G, page_size, D) for ``"HND"``; or both in one 5-D array (pages, 2, ...).  They
            are float32, float16, or as `kv_format` says; keys and values may differ.
        q_scale, k_scale, v_scale : float or array, optional
            Factors of queries, keys and values; one for all heads, or one for each head.
        out : array of the result's dtype, shape (nnz, H, D_v), optional
            Where to write the result.
        lse : array of float32, shape (nnz, H), optional
            Where to write the LSE.
        return_lse : bool
            Return the pair (out, lse).
        window_left : int, optional
            Another window than the plan's (which then has this one).
        sinks : array of float32, shape (H,), optional
            For each head the score of one more key that has no value.
        lse_base : str
            ``"2"`` or ``"e"``: base of the logarithm in the LSE.

        Returns
        -------
        array, shape (nnz, H, D_v), or a pair with the LSE
            Each row is bitwise what it is alone, in any other batch and with any page size.

        Raises
        ------
        UsageError
            If there is no plan, or the arrays do not fit it.
        TypeError
            If an argument is not an array or has another dtype.
        """
        call = Call(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks, out=out, lse=lse,
            return_lse=return_lse, lse_base=lse_base, o_dtype=self._dtypes.get("o"),
        )  # fmt: skip
        return self._run_pages(q, paged_kv_cache, window_left, call)

    begin_forward = plan
    forward = run
    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward_return_lse = run_return_lse


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of the newest row of each request over a paged key/value cache.

    Parameters
    ----------
    float_workspace_buffer : object, optional
        FlashInfer's scratch memory.  Not used on the CPU: a plan holds what it needs.
    kv_layout : str
        ``"NHD"``: cache pages are (page_size, G, D); ``"HND"``: (G, page_size, D), the faster one.
    use_cuda_graph : bool
        Whether `plan` copies its tables to the buffers below, so that their addresses stay.
    use_tensor_cores : bool
        Which of two kernels FlashInfer takes on a GPU; there is one on the CPU, for both values.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : arrays
        These buffers, int32, as long as the largest step needs.
    backend : str
        Must be ``"auto"``: the kind of array chooses the kernel.

    Attributes
    ----------
    current : AttentionPlan or None
        The plan of the present step; NumPy arrays to look at.

    Raises
    ------
    UsageError
        If `kv_layout` or `backend` is another name, or a buffer is missing.

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
        super().__init__(kv_layout, backend)
        del use_tensor_cores  # one kernel does both
        self._buffers = (
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        )  # fmt: skip
        if use_cuda_graph and any(buffer is None for buffer in self._buffers):
            raise UsageError("use_cuda_graph needs the three buffers paged_kv_*_buffer")
        if not use_cuda_graph:
            self._buffers = (None,) * 3

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
    ) -> AttentionPlan:
        """Divide the step's work; the plan serves every layer with the same options.

        Parameters
        ----------
        indptr : array of int32, shape (B + 1,)
            Pages of request b are ``indices[indptr[b]:indptr[b + 1]]``.
        indices : array of int32, shape (n_pages,)
            Page numbers.
        last_page_len : array of int32, shape (B,)
            Tokens on each request's last page, 1..page_size; 0 for a request without pages.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            H, G, the size of queries and keys, tokens per page.
        pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As in `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type, non_blocking, fixed_split_size, disable_split_kv
        disable_page_sharing
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        q_len_per_req : int
            Query rows of each request, causal among each other.
        head_dim_vo : int, optional
            Size of the values; `head_dim` by default.
        kv_format, variant
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Returns
        -------
        AttentionPlan
            The plan, also kept as `current`.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        if q_len_per_req < 1:
            raise UsageError(f"q_len_per_req must be positive, got {q_len_per_req}")
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        tables = [
            keep_in(buffer, f"{name}_buffer", array)
            for buffer, name, array in zip(
                self._buffers, names, (indptr, indices, last_page_len), strict=True
            )
        ]
        vo = head_dim if head_dim_vo is None else head_dim_vo
        rows = np.arange(max(len(tables[0]), 1), dtype=np.int32) * np.int32(q_len_per_req)
        return self._plan_pages(
            rows, tables[0], tables[1], tables[2],
            (num_qo_heads, num_kv_heads, head_dim, vo), page_size,
            {
                "causal": True, "window_left": window_left, "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale, "pos_encoding_mode": pos_encoding_mode,
                "rope_scale": rope_scale, "rope_theta": rope_theta,
                "split_keys": keys_of(fixed_split_size, page_size),
                "disable_split_kv": disable_split_kv,
                "disable_page_sharing": disable_page_sharing,
            },
            {
                "kv_format": kv_format, "variant": variant, "q": q_data_type, "kv": kv_data_type,
                "o": o_data_type,
            },
        )  # fmt: skip

    def run(
        self,
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
        lse_base: str = "2",
    ) -> Any:
        """Attend with the present plan.

        Parameters
        ----------
        q : array of float32 or float16, shape (B * q_len_per_req, H, D)
            Query rows.
        paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, window_left, sinks
            As in `BatchPrefillWithPagedKVCacheWrapper.run`.
        lse_base : str
            ``"2"`` or ``"e"``: base of the logarithm in the LSE.

        Returns
        -------
        array, shape (B * q_len_per_req, H, D_v), or a pair with the LSE
            Each row is bitwise what it is alone, in any other batch and with any page size.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        call = Call(
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks, out=out, lse=lse,
            return_lse=return_lse, lse_base=lse_base, o_dtype=self._dtypes.get("o"),
        )  # fmt: skip
        return self._run_pages(q, paged_kv_cache, window_left, call)

    begin_forward = plan
    forward = run
    run_return_lse = functools.partialmethod(run, return_lse=True)
    forward_return_lse = run_return_lse
