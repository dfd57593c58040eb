"""Base classes of the wrappers: plan checks, the current plan, and running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nbflow_kernels.arrays import array_shapes, check_array, check_range, on_host
from nbflow_kernels.attention.cuda_graph import GraphPlan
from nbflow_kernels.attention.multi_item import Items
from nbflow_kernels.attention.options import (
    Options,
    PlanInputs,
    check_backend,
    check_dtype,
    check_workspace,
    dtype_name,
    from_arguments,
)
from nbflow_kernels.attention.plan import AttentionPlan, Tables, make_plan, plan_into
from nbflow_kernels.attention.run import AttentionCall, PlannedRun, run_plan
from nbflow_kernels.errors import UsageError
from nbflow_kernels.formats.float8 import FLOAT8_NAMES
from nbflow_kernels.kv_cache.formats import kinds_of
from nbflow_kernels.kv_cache.nvfp4 import nvfp4_cache
from nbflow_kernels.kv_cache.page_table import (
    PAGE_NUMBERS,
    check_cache,
    check_page_table,
    count_tokens,
    one_token_pages,
    split_cache,
)


class PlannedWrapper:
    """Base class of all wrappers: the current plan and the split-KV workspace."""

    # second names of methods, `op_registry.METHOD_ALIASES`
    begin_forward: Callable[..., Any]
    forward: Callable[..., Any]
    forward_return_lse: Callable[..., Any]

    def __init__(self, workspace: Any = None) -> None:
        self.current: AttentionPlan | None = None
        self._workspace = check_workspace(workspace)
        self._n_pages = -1

    def _planned(self) -> AttentionPlan:
        """Return the current plan."""
        if self.current is None:
            raise UsageError("run needs a plan: call plan(...) first, once per step")
        return self.current

    def _check_page_numbers(self, plan: AttentionPlan, n_pages: int) -> None:
        """Check the page table once per plan: all layers have the same number of pages."""
        if self._n_pages != n_pages:
            check_range(PAGE_NUMBERS, plan.kv_indices[: plan.kv_indptr[-1]], n_pages)
            self._n_pages = n_pages


class PagedAttentionWrapper(PlannedWrapper):
    """Base class of the batch wrappers: makes the current plan and runs it."""

    def __init__(
        self,
        kv_layout: str,
        backend: str = "auto",
        workspace: Any = None,
        graph: GraphPlan | None = None,
    ) -> None:
        Options(kv_layout=kv_layout)  # checks the name
        check_backend(backend)
        super().__init__(workspace)
        self.kv_layout = kv_layout
        self._graph = graph
        self._dtypes: dict[str, Any] = {}
        self._checked: dict[Any, tuple[int, int]] = {}
        """KINDS of the cache by `array_shapes` that the current plan was checked with."""
        self._kv_format: str | None = None
        self._variant: Any = None
        self._tensor_cores = False
        self.position_mode = "NONE"
        """`pos_encoding_mode` of the current plan."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any = None, int_workspace_buffer: Any = None
    ) -> None:
        """Set the split-KV workspace for later plans; None to allocate per plan."""
        if int_workspace_buffer is not None:
            raise UsageError("int_workspace_buffer must be None: plans allocate their own tables")
        self._workspace = check_workspace(float_workspace_buffer)

    def _plan_pages(
        self,
        tables: tuple[Any, Any, Any, Any],
        heads: tuple[int, int, int, int | None],
        page_size: int,
        arguments: Mapping[str, Any],
    ) -> AttentionPlan:
        """Check the page table (`tables` ends with the last page lengths), then make the plan."""
        qo_indptr, indptr, indices, last_page_len = map(on_host, tables)
        check_page_table(indptr, indices, last_page_len, page_size)
        kv_lens = count_tokens(indptr, last_page_len, page_size)
        split_pages = arguments.get("fixed_split_size")
        return self._plan_lens(
            (qo_indptr, indptr, indices, kv_lens), heads, page_size, arguments,
            split_keys=split_pages and split_pages * page_size, last_page_len=last_page_len,
        )  # fmt: skip

    def _plan_lens(
        self,
        tables: Tables,
        heads: tuple[int, int, int, int | None],
        page_size: int,
        arguments: Mapping[str, Any],
        *,
        split_keys: int | None = None,
        last_page_len: Any = None,
    ) -> AttentionPlan:
        """Make and keep the plan, with the dtypes, format and variant that `run` checks.

        `arguments` are those of the wrapper's `plan`, of which `Options`, `PlanInputs` and `Items`
        have fields.
        """
        self.current, self._n_pages = None, -1
        self._checked.clear()
        options = from_arguments(
            Options, arguments, kv_layout=self.kv_layout, split_keys=split_keys
        )
        inputs = from_arguments(PlanInputs, arguments)
        mask = from_arguments(Items, arguments).mask(tables[0], tables[3], options.causal)
        if mask is not None:
            if inputs.masked:
                raise UsageError("prefix_len_ptr makes a custom_mask; pass one of them")
            inputs = replace(inputs, custom_mask=mask)
        self.position_mode, self._variant = options.pos_encoding_mode, inputs.variant
        self._dtypes = {name: getattr(inputs, f"{name}_data_type") for name in ("q", "kv", "o")}
        self._kv_format = inputs.kv_format
        if self._kv_format is None and inputs.kv_data_type is not None:
            self._kv_format = FLOAT8_NAMES.get(dtype_name(inputs.kv_data_type))
        all_heads = (*heads[:3], heads[2] if heads[3] is None else heads[3])
        arguments_of_plan = (tables, all_heads, page_size, options, inputs, self._workspace)
        if self._graph is None:
            self.current = make_plan(*arguments_of_plan)
        else:
            self.current = self._graph.fill(*arguments_of_plan, last_page_len)
        return self.current

    def _check_arrays(self, plan: AttentionPlan, q: Any, *caches: tuple[str, Any]) -> None:
        """Check a layer's queries against the plan, and the dtypes of its (named) caches."""
        shape = (plan.n_query_rows, plan.heads[0], plan.heads[2])
        check_array("q", q, shape, (np.float32, np.float16), rows=True)
        if self._graph is not None:
            self._graph.check_device(q)
        check_dtype("q", self._dtypes["q"], q.dtype)
        if self._kv_format is None:
            for name, array in caches:
                check_dtype(name, self._dtypes["kv"], array.dtype)

    def _run_pages(
        self,
        q: Any,
        paged_kv_cache: Any,
        window_left: int | None,
        call: AttentionCall,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Check a layer's arrays against the plan, and attend."""
        return run_plan(self._pages_run(q, paged_kv_cache, window_left, call, kv_cache_sf))

    def _pages_run(
        self,
        q: Any,
        paged_kv_cache: Any,
        window_left: int | None,
        call: AttentionCall,
        kv_cache_sf: Any = None,
    ) -> PlannedRun:
        """Return the run of the current plan on a layer's arrays, checked."""
        plan = self._planned()
        scales: tuple[Any, Any] | None = None
        if kv_cache_sf is None:
            k, v, kinds = self._checked_pages(plan, q, paged_kv_cache)
        else:
            k, v, kinds, scales = nvfp4_cache(
                paged_kv_cache, kv_cache_sf, plan.page_size, plan.heads, self.kv_layout,
                self._kv_format,
            )  # fmt: skip
            self._check_arrays(plan, q, ("paged_kv_cache", k), ("paged_kv_cache", v))
        self._check_page_numbers(plan, k.shape[0])
        if window_left is not None and max(window_left, -1) != plan.window_left:
            Options(window_left=window_left)  # checks it
            if self._graph is not None:
                raise UsageError(
                    f"window_left must be the plan's ({plan.window_left}) with use_cuda_graph, got "
                    f"{window_left}; give it to plan(...)"
                )
            plan.set_window(window_left)
            plan_into(plan, plan.qo_indptr, plan.kv_indptr, plan.kv_indices, plan.kv_lens)
        return PlannedRun(plan, q, k, v, kinds, call, self._variant, scales=scales)

    def _checked_pages(
        self, plan: AttentionPlan, q: Any, paged_kv_cache: Any
    ) -> tuple[Any, Any, tuple[int, int]]:
        """Return keys, values and their KINDS, checked against the plan once for each shape."""
        k, v = split_cache(paged_kv_cache)
        if isinstance(paged_kv_cache, tuple) and plan.page_size == 1:
            k, v = (one_token_pages(array, self.kv_layout) for array in (k, v))
        shapes = array_shapes(q, k, v)
        kinds = self._checked.get(shapes)
        if kinds is None:
            _, G, D_qk, D_vo = plan.heads
            check_cache(
                (k, v), plan.page_size, G, D_qk, self.kv_layout, self._kv_format, D_value=D_vo
            )
            self._check_arrays(plan, q, ("paged_kv_cache", k), ("paged_kv_cache", v))
            kinds = self._checked[shapes] = kinds_of(k, v, self._kv_format)
        return k, v, kinds
