"""Sparse attention: index keys, their selection, and attention to the selected keys.

Attention runs with a plan in which each token of a step is a request of its own and the tokens that
it selects are pages of one token, which are rows of the layer's pages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from nbflow.kv_cache.storage import LAYOUT
from nbflow.program.records import Op
from nbflow_kernels import op_registry
from nbflow_kernels.attention.cpu import launch
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.cuda import to_host
from nbflow_kernels.kv_cache.formats import kv_format

Launch = tuple[Any, ...]
"""A launcher and its arguments."""


def append_index(binder: Any, op: Op) -> Launch:
    """Return the launch that appends index keys to the layer's pages."""
    keys, arrays = binder.executor.storage.index_keys[op.layer or 0], binder.arrays
    k, kind = _heads(binder, op.inputs[0], keys.shape[-1]), kv_format("f32").kind
    return (
        op_registry.load("kv_cache", binder.variant).append_paged_kv_cache, k, k[..., :0],
        arrays.batch_indices, arrays.positions, keys, keys[..., :0], arrays.kv_indices,
        arrays.kv_indptr, LAYOUT, (kind, kind),
    )  # fmt: skip


def select_keys(binder: Any, op: Op) -> Launch:
    """Return the launch that selects the keys of each token."""
    kernels = importlib.import_module(f"nbflow_kernels.attention.{binder.variant}.select_keys")
    keys, arrays = binder.executor.storage.index_keys[op.layer or 0][:, 0], binder.arrays
    return (
        kernels.select_top_keys, _heads(binder, op.inputs[0], keys.shape[-1]),
        binder.view(op.inputs[1]), keys, arrays.batch_indices, arrays.positions,
        arrays.kv_indices, arrays.kv_indptr, binder.view(op.out).view(np.int32),
    )  # fmt: skip


def _heads(binder: Any, name: str, width: int) -> Any:
    view = binder.view(name)
    return view.reshape(len(view), -1, width)


class SparseAttention:
    """Plan, cache and rows of one `sparse_attention` op.

    Parameters
    ----------
    binder : Binder
        Binder of the step.
    arrays : StepArrays
        Index arrays of the step, in host memory.
    op : Op
        The op.
    """

    def __init__(self, binder: Any, arrays: Any, op: Op) -> None:
        program, storage = binder.executor.program, binder.executor.storage
        spec = program.spec
        width = spec.latent.kv_rank
        self._arrays, self._page_size, self._kinds = (
            arrays,
            storage.page_size,
            storage.kinds_of(op.layer),
        )
        keys, values = storage.layers[op.layer or 0]
        tokens = keys.reshape(-1, 1, 1, keys.shape[-1])
        self._pages = tokens, tokens[..., : values.shape[-1]]
        self._q = _heads(binder, op.inputs[0], spec.cached_dim)
        self._out = _heads(binder, op.out, width)
        self._selected = binder.view(op.inputs[1]).view(np.int32)
        self._plan = AttentionPlan(
            (program.n_heads, 1, spec.cached_dim, width), 1, kv_layout=LAYOUT, causal=False,
            sm_scale=spec.sm_scale, logits_soft_cap=spec.logits_soft_cap or 0.0,
        )  # fmt: skip

    def run_on_cpu(self) -> None:
        """Attend to the keys that have been selected."""
        self._fill(self._selected)
        launch.attend(self._plan, self._q, *self._pages, self._out, None, self._kinds)
        if self._plan.n_merges:
            launch.merge_splits(self._plan, self._out, None)

    def run_on_device(self) -> None:
        """Attend on a device; the host plans, and waits for the selection."""
        self._fill(to_host(self._selected))
        attend: Callable[..., None] = op_registry.load("attention", "cuda").attend
        attend(self._plan, self._q, *self._pages, self._out, None, self._kinds)

    def _fill(self, selected: np.ndarray) -> None:
        """Plan the step; `selected`, int32 (T, top_k), are positions, then -1."""
        arrays, n, chosen = self._arrays, len(selected), selected >= 0
        page, slot = np.divmod(np.where(chosen, selected, 0), self._page_size)
        first = arrays.kv_indptr[arrays.batch_indices[:n]][:, None]
        rows = arrays.kv_indices[np.where(chosen, first + page, 0)]
        tokens = (rows * self._page_size + slot)[chosen].astype(np.int32)
        indptr = np.zeros(n + 1, np.int32)
        lens = chosen.sum(axis=1, dtype=np.int32)
        np.cumsum(lens, out=indptr[1:])
        plan_into(self._plan, np.arange(n + 1, dtype=np.int32), indptr, tokens, lens)
