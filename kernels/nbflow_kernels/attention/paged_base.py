"""Base class of the paged-cache wrappers: plan checks, the current plan, and running it."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.arrays import check_array, on_host
from nbflow_kernels.attention.cuda_graph import GraphPlan, Tables
from nbflow_kernels.attention.options import (
    Options,
    check_backend,
    check_dtype,
    check_indptr,
    check_workspace,
    refuse_int_workspace,
)
from nbflow_kernels.attention.plan import AttentionPlan, make_plan, plan_into
from nbflow_kernels.attention.run import AttentionCall, run_plan
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import kinds_of
from nbflow_kernels.kv_cache.page_table import (
    check_cache,
    check_page_numbers,
    check_page_table,
    count_tokens,
)


class PagedAttentionWrapper:
    """Base class of the paged-cache wrappers: holds the current plan and runs it."""

    def __init__(
        self,
        kv_layout: str,
        backend: str = "auto",
        workspace: Any = None,
        graph: GraphPlan | None = None,
    ) -> None:
        Options(kv_layout=kv_layout)  # checks the name
        check_backend(backend)
        self.kv_layout = kv_layout
        self.current: AttentionPlan | None = None
        self._workspace = check_workspace("float_workspace_buffer", workspace)
        self._graph = graph
        self._n_pages = -1
        self._dtypes: dict[str, Any] = {}
        self._kv_format: str | None = None
        self._variant: Any = None
        self._tensor_cores = False

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any = None, int_workspace_buffer: Any = None
    ) -> None:
        """Set the split-KV workspace for later plans; None to allocate per plan."""
        refuse_int_workspace(int_workspace_buffer)
        self._workspace = check_workspace("float_workspace_buffer", float_workspace_buffer)

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
        """Check the page table, then make and keep the plan."""
        qo_indptr, indptr, indices, last_page_len = map(
            on_host, (qo_indptr, indptr, indices, last_page_len)
        )
        check_page_table(indptr, indices, last_page_len, page_size)
        kv_lens = count_tokens(indptr, last_page_len, page_size)
        return self._plan_lens(
            qo_indptr, indptr, indices, kv_lens, heads, page_size, options,
            {**extras, "last_page_len": last_page_len},
        )  # fmt: skip

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
        """Make and keep the plan, with the dtypes, format and variant that `run` checks."""
        self.current, self._n_pages = None, -1
        self._variant = extras.get("variant")
        self._kv_format = extras.get("kv_format")
        self._dtypes = {name: extras.get(name) for name in ("q", "kv", "o")}
        masks = {name: extras.get(name) for name in ("custom_mask", "packed_custom_mask")}
        settings = self._settings(heads, page_size, options, extras)
        split_off = options.pop("disable_split_kv", False) or self._variant is not None
        sharing_off = options.pop("disable_page_sharing", False) or self._variant is not None
        chosen = Options(
            kv_layout=self.kv_layout, disable_split_kv=split_off,
            disable_page_sharing=sharing_off, **options,
        )  # fmt: skip
        non_blocking = bool(extras.get("non_blocking", True))

        def make(tables: Tables) -> AttentionPlan:
            plan = make_plan(
                *tables, heads, page_size, chosen, custom_mask=masks["custom_mask"],
                packed_custom_mask=masks["packed_custom_mask"], workspace=self._workspace,
            )  # fmt: skip
            plan.waits_for_copies = not non_blocking
            return plan

        tables = (qo_indptr, indptr, indices, kv_lens)
        if self._graph is None:
            self.current = make(tables)
            return self.current
        for name, value in {**masks, "variant": self._variant}.items():
            if value is not None:
                raise UsageError(
                    f"{name} is not supported with use_cuda_graph=True: it has no buffer"
                )
        check_indptr("qo_indptr", qo_indptr, len(indptr))
        self.current = self._graph.fill(
            tables, extras.get("last_page_len"), settings, chosen, make,
            rows_each=extras.get("rows_each"), n_keys=extras.get("n_keys"),
            workspace=self._workspace, non_blocking=non_blocking,
        )  # fmt: skip
        return self.current

    def _settings(
        self,
        heads: tuple[int, int, int, int],
        page_size: int,
        options: dict[str, Any],
        extras: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the parameters that must be the same in all plans of a graph."""
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo")
        found = dict(zip(names, heads, strict=True)) | {"page_size": page_size} | options
        found["fixed_split_size"] = found.pop("split_keys", None)
        found["q_len_per_req"] = extras.get("rows_each")
        found["kv_format"] = self._kv_format
        return found | {f"{name}_data_type": dtype for name, dtype in self._dtypes.items()}

    def _planned(self) -> AttentionPlan:
        """Return the current plan."""
        if self.current is None:
            raise UsageError("run needs a plan: call plan(...) first, once per step")
        return self.current

    def _run_pages(
        self, q: Any, paged_kv_cache: Any, window_left: int | None, call: AttentionCall
    ) -> Any:
        """Check a layer's arrays against the plan, and attend."""
        plan = self._planned()
        _, G, D_qk, D_vo = plan.heads
        k, v = check_cache(
            paged_kv_cache, plan.page_size, G, D_qk, self.kv_layout, self._kv_format, D_value=D_vo
        )
        rows = plan.n_query_rows
        check_array("q", q, (rows, plan.heads[0], D_qk), (np.float32, np.float16), rows=True)
        if self._graph is not None:
            self._graph.check_device(q)
        check_dtype("q", self._dtypes["q"], q.dtype)
        if self._kv_format is None:
            for array in (k, v):
                check_dtype("paged_kv_cache", self._dtypes["kv"], array.dtype)
        if self._n_pages != k.shape[0]:  # once per plan: all layers have the same number of pages
            check_page_numbers(plan.kv_indices[: plan.kv_indptr[-1]], k.shape[0])
            self._n_pages = k.shape[0]
        if window_left is not None and max(window_left, -1) != plan.window_left:
            Options(window_left=window_left)  # checks it
            if self._graph is not None:
                raise UsageError(
                    f"window_left must be the plan's ({plan.window_left}) with use_cuda_graph, got "
                    f"{window_left}; give it to plan(...)"
                )
            plan.set_window(window_left)
            plan_into(plan, plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens)
        kinds = kinds_of(k, v, self._kv_format)
        return run_plan(plan, q, k, v, kinds, call, self._variant)
