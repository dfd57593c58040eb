"""Cascade attention: requests with a shared prefix load it once, not once per request.

The softmax over all keys is merged from partial results and their LSE [1]_.  Each level is a batch:
on level 0 all query rows with a common prefix are the rows of *one* request over its pages, on the
last level each request has its own pages.  `merge_state_in_place` merges the levels.

.. [1] Z. Ye et al., "Cascade inference: memory bandwidth efficient shared prefix batch decoding",
   flashinfer.ai, 2024-02-02.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, empty, on_host
from nbflow_kernels.attention.block_sparse import refuse_positions
from nbflow_kernels.attention.merge import merge_state_in_place
from nbflow_kernels.attention.paged import BatchPrefillWithPagedKVCacheWrapper
from nbflow_kernels.attention.run import narrow_output
from nbflow_kernels.errors import UsageError


@dataclass(frozen=True)
class CascadeTiming:
    """Predicted and measured gain of a cascade (`MultiLevelCascadeAttentionWrapper.measure`)."""

    predicted_byte_ratio: float
    """Bytes of keys and values loaded without the cascade, over those loaded with it."""
    flat_s: float
    """Median time of a run without the cascade, in seconds."""
    cascade_s: float
    """Median time of the cascade including merges, in seconds."""

    @property
    def measured_ratio(self) -> float:
        """Measured speedup of the cascade."""
        return self.flat_s / self.cascade_s


class MultiLevelCascadeAttentionWrapper:
    """Cascade attention over a paged cache, with any number of levels of shared prefixes.

    Parameters
    ----------
    num_levels : int
        Levels of the prefix tree: 2 for one shared prefix and the requests' own keys.
    float_workspace_buffer : array, optional
        Split-KV workspace, as in `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : str
        ``"NHD"`` or ``"HND"``, as in `BatchPrefillWithPagedKVCacheWrapper`.
    use_cuda_graph : bool
        Make `run` capturable into a CUDA graph, as in `BatchPrefillWithPagedKVCacheWrapper`: the
        buffers fix the number of entries and pages of each level, the first plan the options and
        the number of query rows.  Results of rows after ``qo_indptr[-1]`` are undefined.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr
    paged_kv_last_page_len_buf_arr : lists of arrays
        Buffers of `use_cuda_graph` for each level.

    Raises
    ------
    UsageError
        If `num_levels` is below 1, the layout is unknown, or the buffers do not fit each other.

    Examples
    --------
    Two requests share page 0 and have one page each; all scores are 0, so results are means:

    >>> import numpy as np
    >>> from nbflow_kernels import MultiLevelCascadeAttentionWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = MultiLevelCascadeAttentionWrapper(2)
    >>> wrapper.plan(
    ...     [ints(0, 2), ints(0, 1, 2)],  # both rows on level 0, one for each request below
    ...     [ints(0, 1), ints(0, 1, 2)],
    ...     [ints(0), ints(1, 2)],
    ...     [ints(2), ints(1, 2)],
    ...     1, 1, 4, 2,
    ... )
    >>> pages = np.repeat(np.arange(6, dtype=np.float32), 4).reshape(3, 2, 1, 4)
    >>> wrapper.run(np.zeros((2, 1, 4), np.float32), (pages, pages))[:, 0, 0]
    array([1. , 2.5], dtype=float32)
    >>> wrapper.predicted_byte_ratio()  # 3 + 4 keys instead of 2 + 1 + 2
    1.4
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indices_buf_arr: Sequence[Any] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Any] | None = None,
    ) -> None:
        if num_levels < 1:
            raise UsageError(f"num_levels must be at least 1, got {num_levels}")
        self.kv_layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        buffers = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        for name, arrays in buffers.items():
            if not use_cuda_graph and arrays is not None:
                raise UsageError(f"{name} is for use_cuda_graph=True, got use_cuda_graph=False")
            if use_cuda_graph and len(arrays or ()) != num_levels:
                raise UsageError(
                    f"use_cuda_graph needs in {name} a buffer for each of {num_levels} levels, got "
                    f"{len(arrays or ())}"
                )
        per_level = [
            [(arrays or ())[i] for arrays in buffers.values()] if use_cuda_graph else []
            for i in range(num_levels)
        ]
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, *own
            )
            for own in per_level
        ]
        self._states: list[tuple[Any, Any]] = []
        self._flat: Callable[[], BatchPrefillWithPagedKVCacheWrapper] | None = None

    @property
    def levels(self) -> list[Any]:
        """Return the plans of all levels, shared keys first."""
        return [level.current for level in self._levels]

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffers: Any = None
    ) -> None:
        """Set the split-KV workspace for later plans; None to allocate per plan."""
        for level in self._levels:
            level.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffers)

    def plan(
        self,
        qo_indptr_arr: Sequence[Any],
        paged_kv_indptr_arr: Sequence[Any],
        paged_kv_indices_arr: Sequence[Any],
        paged_kv_last_page_len: Sequence[Any],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
        *,
        kv_format: str | None = None,
    ) -> None:
        """Schedule all levels.

        Parameters
        ----------
        qo_indptr_arr : list of arrays of int32
            For each level, the query rows that share the keys of an entry; all levels end at the
            same row.
        paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : lists of arrays of int32
            For each level, the page table of its entries; one cache holds the pages of all levels.
        causal : bool
            Causal mask on the last level, the requests' own keys; shared keys precede all rows.
        pos_encoding_mode, window_left
            Must be ``"NONE"`` and -1: the index of a key on its level is not its position.
        num_qo_heads, num_kv_heads, head_dim, page_size, use_fp16_qk_reduction, sm_scale
        logits_soft_cap, rope_scale, rope_theta, q_data_type, kv_data_type, kv_format
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        refuse_positions(pos_encoding_mode)
        if window_left >= 0:
            raise UsageError(
                f"window_left must be -1 in a cascade, got {window_left}: windows start at a "
                "different key in each request; use BatchPrefillWithPagedKVCacheWrapper"
            )
        lists = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, arrays in lists.items():
            if len(arrays) != len(self._levels):
                raise UsageError(
                    f"{name} must have an array for each of {len(self._levels)} levels, "
                    f"got {len(arrays)}"
                )
        heads = (num_qo_heads, num_kv_heads, head_dim, None)
        options = {**locals(), "o_data_type": np.float32}  # levels are merged in float32
        shared = {**options, "causal": False}  # on all levels but the last
        for level, *tables in zip(self._levels, *lists.values(), strict=True):
            own = options if level is self._levels[-1] else shared
            level._plan_pages((tables[0], tables[1], tables[2], tables[3]), heads, page_size, own)
        counts = [int(indptr[-1]) for indptr in qo_indptr_arr]
        if len(set(counts)) > 1:
            raise UsageError(f"qo_indptr_arr must end at the same row on all levels, got {counts}")
        self._flat = lambda: self._flat_wrapper(lists, heads, page_size, options)

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend on all levels and merge.

        Parameters
        ----------
        q, paged_kv_cache, lse, return_lse
            As in `BatchPrefillWithPagedKVCacheWrapper.run`; `lse` is over all levels.
        out : array of the queries' dtype, shape (nnz, H, D), optional
            Output array.

        Returns
        -------
        array of the queries' dtype, shape (nnz, H, D), or a pair with the LSE
            The attention over the keys of all levels.
        """
        self._planned("run")
        into = wide_output(q, out)
        states = self._fixed_states(q)
        if self._use_cuda_graph:
            into, lse = (
                states[-1][0] if into is None else into,
                states[-1][1] if lse is None else lse,
            )
        found, lse = self._levels[-1].run(q, paged_kv_cache, out=into, lse=lse, return_lse=True)
        for level, (shared, shared_lse) in zip(self._levels[:-1], states, strict=False):
            other = level.run(q, paged_kv_cache, out=shared, lse=shared_lse, return_lse=True)
            merge_state_in_place(found, lse, *other)
        out = narrow_output(found, out, q.dtype)
        return (out, lse) if return_lse else out

    def _fixed_states(self, q: Any) -> list[tuple[Any, Any]]:
        """Return outputs for the levels: with CUDA graphs the wrapper's arrays, else new ones.

        Captured launches refer to them, so they stay as long as the queries have these sizes.
        """
        if not self._use_cuda_graph:
            return [(None, None)] * len(self._levels)
        if not self._states or self._states[0][0].shape != q.shape:
            self._states = [(empty(q, q.shape), empty(q, q.shape[:2])) for _ in self._levels]
            for out, lse in self._states:
                out[...], lse[...] = 0.0, -np.inf
        return self._states

    def predicted_byte_ratio(self) -> float:
        """Return the bytes of keys and values loaded without the cascade over those with it.

        Without it, a request loads its entries on all levels; with it, every entry is loaded once.
        One prefix of P keys and B requests with u more each: (P + u) B / (P + u B).  The ratio
        bounds the speedup of memory-bound runs; compute-bound runs gain less.

        Returns
        -------
        float
            At least 1; 1 without shared or any keys.
        """
        self._planned("predicted_byte_ratio")
        entries, flat = self._segments()
        once = sum(
            int(plan.kv_lens[np.unique(entry)].sum())
            for plan, entry in zip(self.levels, entries, strict=True)
        )
        return float(flat.sum() / once) if once else 1.0

    def measure(self, q: Any, paged_kv_cache: Any, *, repeats: int = 5) -> CascadeTiming:
        """Time the cascade against requests that each load their whole sequence.

        Both run `repeats` times alternately, after one warm-up run; the result has medians.

        Parameters
        ----------
        q, paged_kv_cache
            As in `run`.
        repeats : int
            Number of timed runs of each.

        Returns
        -------
        CascadeTiming
            The predicted ratio of bytes and both times.

        Raises
        ------
        UsageError
            If `plan` was not called, or a shared level ends within a page: whole sequences then
            have no page table.
        """
        make_flat = self._planned("measure")
        if repeats < 1:
            raise UsageError(f"repeats must be at least 1, got {repeats}")
        flat = make_flat()
        seconds: tuple[list[float], list[float]] = ([], [])
        for i in range(repeats + 1):
            both: tuple[Any, Any] = (flat, self)
            for runs, wrapper in zip(seconds, both, strict=True):
                started = time.perf_counter()
                on_host(wrapper.run(q, paged_kv_cache).ravel()[:1])  # synchronizes
                if i:
                    runs.append(time.perf_counter() - started)
        flat_s, cascade_s = (float(np.median(runs)) for runs in seconds)
        return CascadeTiming(self.predicted_byte_ratio(), flat_s, cascade_s)

    def _planned(self, method: str) -> Callable[[], BatchPrefillWithPagedKVCacheWrapper]:
        """Return the function that plans whole sequences, without the cascade."""
        if self._flat is None:
            raise UsageError(f"{method} needs a plan: call plan(...) first, once per step")
        return self._flat

    def _segments(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return, per run of rows with the same entries, each level's entry and the total keys.

        Runs do not cross requests; empty runs are omitted.
        """
        edges = np.unique(np.concatenate([plan.qo_indptr for plan in self.levels]))
        entries = [
            np.searchsorted(plan.qo_indptr, edges[:-1], side="right") - 1 for plan in self.levels
        ]
        keys = sum(
            plan.kv_lens.astype(np.int64)[entry]
            for plan, entry in zip(self.levels, entries, strict=True)
        )
        return entries, np.asarray(keys)

    def _flat_wrapper(
        self,
        lists: dict[str, Sequence[Any]],
        heads: tuple[int, int, int, None],
        page_size: int,
        options: dict[str, Any],
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        """Return a planned wrapper over whole sequences, without the cascade."""
        entries, _ = self._segments()
        indptrs, indices = lists["paged_kv_indptr_arr"], lists["paged_kv_indices_arr"]
        last_page_len = lists["paged_kv_last_page_len"]
        for level in range(len(entries) - 1):
            used = last_page_len[level][entries[level]]
            if ((used > 0) & (used < page_size)).any():
                raise UsageError(
                    f"level {level} ends within a page of {page_size} tokens: the whole sequences "
                    "cannot be timed as one page table"
                )
        pages, last = [], []
        for segment in range(len(entries[0])):
            own = [
                (indices[i][indptrs[i][e] : indptrs[i][e + 1]], int(last_page_len[i][e]))
                for i, e in enumerate(entry[segment] for entry in entries)
            ]
            pages.append(np.concatenate([p for p, _ in own]))
            filled = [n for p, n in own if len(p)]
            last.append(filled[-1] if filled else 0)
        edges = np.unique(np.concatenate(lists["qo_indptr_arr"])).astype(np.int32)
        flat = BatchPrefillWithPagedKVCacheWrapper(kv_layout=self.kv_layout)
        tables = (
            edges, np.cumsum([0, *map(len, pages)]).astype(np.int32),
            np.concatenate([np.zeros(0, np.int32), *pages]), np.array(last, np.int32),
        )  # fmt: skip
        flat._plan_pages(tables, heads, page_size, {**options, "disable_page_sharing": True})
        return flat


def wide_output(q: Any, out: Any) -> Any:
    """Return `out` after its check if it is float32, else None."""
    if out is None:
        return None
    check_array("out", out, q.shape, q.dtype)
    return out if out.dtype == np.float32 else None
