"""`CallShape`: the facts of an attention call that select its kernel, as a key of caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cuda.plan import is_plain
from nbflow_kernels.attention.cuda.scheduler import DECODE_VECTORS, split_keys
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cuda import KernelDevice, address


class CallShape(NamedTuple):
    """Sizes, formats, strides and alignments of a call; layers and steps share it.

    Selecting a kernel takes longer than a launch, so its results are cached by this key.
    """

    heads: tuple[int, int, int, int]
    """H, G, D_qk, D_vo."""
    page_size: int
    split_keys: int
    rotates: bool
    """RoPE in the kernel, of queries or keys."""
    plain: bool
    """See `is_plain`."""
    f32_queries: bool
    """Queries are float32, not float16."""
    kinds: tuple[int, int]
    """Formats of keys and of values, as the following fields."""
    kv_strides: tuple[tuple[int, int, int], tuple[int, int, int]]
    """Page, token and head strides in bytes."""
    offsets: tuple[int, int]
    """Addresses modulo 16."""
    one_cache: bool
    """Keys and values start at one address."""
    max_shared_bytes: int
    """Shared memory of a thread block."""

    @classmethod
    def of(
        cls, plan: AttentionPlan, device: KernelDevice, q: Any, k_cache: Any, v_cache: Any,
        kv_strides: Any, kinds: tuple[int, int],
    ) -> CallShape:  # fmt: skip
        """Return the shape of a call."""
        k, v = address(k_cache), address(v_cache)
        rotates = at.ROPE in plan.tables or at.KEY_ROPE in plan.tables
        return cls(
            plan.heads, plan.page_size, split_keys(plan), rotates, is_plain(plan),
            q.dtype.type is np.float32, kinds, kv_strides, (k % 16, v % 16), k == v,
            device.max_shared_bytes,
        )  # fmt: skip


def is_short(plan: AttentionPlan) -> bool:
    """Return whether all rows fit one tile of the decode kernel, without tables of positions."""
    H, G, _, _ = plan.heads
    return plan.n_rows * (H // G) <= DECODE_VECTORS and at.ROPE not in plan.tables
