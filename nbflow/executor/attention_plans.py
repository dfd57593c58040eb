"""Attention plans of a step, one per mask, kind, heads and RoPE of cached keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow.executor.executor import Executor
from nbflow.executor.step_buffers import StepArrays
from nbflow.kv_cache.storage import LAYOUT
from nbflow.program.records import Mask, Op, mask_of
from nbflow.spec.layer_specs import HeadShape, RopeSpec
from nbflow_kernels.attention.cpu.scheduler import schedule
from nbflow_kernels.attention.cpu.variants import set_variant
from nbflow_kernels.attention.plan import AttentionPlan, plan_into
from nbflow_kernels.attention.plan_layout import SLOPES, SPLIT
from nbflow_kernels.attention.variants import find_variant
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.graph import GraphNode
from nbflow_kernels.cpu.parallel_for import get_num_threads
from nbflow_kernels.position import alibi_slopes

ATTENTIONS = ("attention", "cross_attention")


class LayerAttention:
    """Attention plan of a step, shared by all layers that see the same keys.

    With `cross` the keys are the encoder's.
    """

    def __init__(self, executor: Executor, arrays: StepArrays, op: Op) -> None:
        cross, (window, chunk) = op.kind == "cross_attention", mask_of(op)
        self.cross = cross
        program, spec = executor.program, executor.program.spec
        storage = executor.cross_storage if cross else executor.storage
        assert storage is not None
        self.storage = storage
        kv = (arrays.kv_indptr, arrays.kv_indices, arrays.kv_lens)
        cross_kv = (arrays.cross_indptr, arrays.cross_indices, arrays.cross_lens)
        self._step = (arrays.qo_indptr, *(cross_kv if cross else kv))
        heads = program.heads_of(op.layer or 0)
        self.plan = AttentionPlan(
            (program.n_heads, heads.n_kv_heads, heads.key_dim, heads.value_dim),
            storage.page_size,
            kv_layout=LAYOUT,
            causal=spec.causal and not cross,
            window_left=-1 if window is None else window - 1,
            attention_chunk=chunk or 0,
            logits_soft_cap=spec.logits_soft_cap or 0.0,
            sm_scale=spec.sm_scale,
            disable_split_kv=spec.attention is not None and not cross,
        )
        if not cross:
            self._set_tables(executor, op)
        max_keys = len(self._step[2]) * storage.page_size  # capacity of the page arrays
        self.merges = max_keys > SPLIT
        """True where keys may be split (split-KV), so that partial states must be merged."""
        self.n_shares, self.n_merges = np.zeros(1, np.int64), np.zeros(1, np.int64)
        if len(arrays.ids) == len(arrays.kv_lens):  # compiled code plans further decode steps
            n_sequences = len(arrays.kv_lens)
            n_items = heads.n_kv_heads * (2 * n_sequences + max_keys // SPLIT)
            group = program.n_heads // max(1, heads.n_kv_heads)
            self.plan.reserve(n_items, n_items, n_items * group)
        self.fill()

    def _set_tables(self, executor: Executor, op: Op) -> None:
        """Set the variant, the biases of positions and the RoPE of stored keys in the plan."""
        program, spec = executor.program, executor.program.spec
        first = program.first_head
        if spec.attention is not None:
            variant = find_variant(str(spec.attention), f"{spec.name}: attention")
            set_variant(self.plan, variant, (first, first * spec.n_kv_heads // spec.n_heads))
        if spec.position == "alibi":
            slopes = alibi_slopes(spec.n_heads)[first : first + program.n_heads]
            self.plan.set_table(SLOPES, slopes * (spec.sm_scale if spec.alibi_scaled else 1.0))
        if spec.position == "relative":
            first_op = [op.kind for op in program.ops].index("attention")
            (bias,) = executor.weights.operands[first_op]  # shared by all layers
            self.plan.set_bias(bias, spec.max_context)
        rope = op.attrs.get("key_rope")
        if rope is not None:
            self.plan.set_key_rope(executor.rope_table(rope), rope.style != "half")

    def fill(self) -> None:
        """Plan the step that is in the arrays."""
        plan_into(self.plan, *self._step)
        self.n_shares[0], self.n_merges[0] = self.plan.n_shares, self.plan.n_merges

    def next_step_calls(self) -> list[GraphNode]:
        """Return the call that plans the next decode step; none for the encoder's fixed keys."""
        if self.cross:
            return []
        args = (self.plan.header, *self._step, get_num_threads(), self.n_shares, self.n_merges)
        return [GraphNode(_plan_step, args, 1, 1.0)]


class AttentionPlanGroup:
    """Attention plans of a step, one per mask, kind and heads of attention."""

    def __init__(self, executor: Executor, arrays: StepArrays) -> None:
        self._program = executor.program
        ops = {self._kind(op): op for op in executor.program.ops if op.kind in ATTENTIONS}
        self._plans = {kind: LayerAttention(executor, arrays, op) for kind, op in ops.items()}

    @property
    def kinds(self) -> tuple[LayerAttention, ...]:
        """All plans."""
        return tuple(self._plans.values())

    def _kind(self, op: Op) -> tuple[str, Mask, HeadShape, RopeSpec | None]:
        heads = self._program.heads_of(op.layer or 0)
        return op.kind, mask_of(op), heads, op.attrs.get("key_rope")

    def of(self, op: Op) -> LayerAttention:
        """Return the plan of an attention op."""
        return self._plans[self._kind(op)]

    def fill(self) -> None:
        """Plan the step that is in the arrays."""
        for attention in self._plans.values():
            attention.fill()

    def next_step_calls(self) -> list[GraphNode]:
        """Return calls that plan the next decode step, one token per sequence."""
        return [call for attention in self._plans.values() for call in attention.next_step_calls()]


@jit.kernel
def _plan_step(
    header: Any, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_lens: Any, n_threads: Any,
    n_shares: Any, n_merges: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    """Plan a step into preallocated tables."""
    _, merged, shared, _, _ = schedule(
        simd.address(header), simd.address(qo_indptr), simd.address(kv_indptr),
        simd.address(kv_indices), simd.address(kv_lens), len(kv_lens), n_threads,
    )  # fmt: skip
    n_shares[0], n_merges[0] = shared, merged
