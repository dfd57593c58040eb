"""Merge of partial attention results on the CPU: attention states, and splits of a plan.

A state is the attention output over some keys and its base-2 LSE.  States are merged in float64,
with one rounding for any number of them; splits in float32, as `flash_attention` merges its own.
"""

from __future__ import annotations

import math

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.flash_attention import write_result
from nbflow_kernels.attention.cpu.online_softmax import merge_partial
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, read_f32, read_word

_ALL = np.zeros(0, np.bool_)


def merge_state(
    v_a: np.ndarray,
    s_a: np.ndarray,
    v_b: np.ndarray,
    s_b: np.ndarray,
    v_out: np.ndarray,
    s_out: np.ndarray,
    mask: np.ndarray | None = None,
) -> None:
    """See `nbflow_kernels.merge_state`; rows where `mask` is False are skipped."""
    T, H, D = v_a.shape
    rows = [a.reshape(T * H, D) for a in (v_a, v_b, v_out)]
    sums = [a.reshape(T * H) for a in (s_a, s_b, s_out)]
    parallel_for(
        _merge_two, T * H, 4.0 * T * H * D, *rows, *sums, _ALL if mask is None else mask, H
    )


def merge_states(v: np.ndarray, s: np.ndarray, v_out: np.ndarray, s_out: np.ndarray) -> None:
    """See `nbflow_kernels.merge_states`."""
    parallel_for(_merge_many, v.shape[0], 2.0 * v.size, v, s, v_out, s_out)


def merge_splits(plan: AttentionPlan, out: np.ndarray, lse: np.ndarray | None) -> None:
    """Split-KV merge of the partial results of `attend`; needed where ``plan.n_merges > 0``."""
    H, G, _, D = plan.heads
    parallel_for(
        _merge_splits, plan.n_merges, float(plan.n_merges * (H // G) * D * 16), plan.header,
        address_of(out), 0 if lse is None else address_of(lse),
    )  # fmt: skip


@jit.kernel
def _merge_two(v_a, v_b, v_out, s_a, s_b, s_out, mask, H, start, stop):
    for row in range(start, stop):
        if len(mask) and not mask[row // H]:
            continue
        a, b = np.float64(s_a[row]), np.float64(s_b[row])
        max_lse = max(a, b)
        if max_lse == -np.inf:
            v_out[row, :] = 0.0
            s_out[row] = -np.inf
            continue
        weight_a, weight_b = 2.0 ** (a - max_lse), 2.0 ** (b - max_lse)
        weight_sum = weight_a + weight_b
        s_out[row] = max_lse + math.log2(weight_sum)
        for d in range(v_a.shape[1]):
            mixed = weight_a * v_a[row, d] + weight_b * v_b[row, d]
            v_out[row, d] = mixed / weight_sum


@jit.kernel
def _merge_many(v, s, v_out, s_out, start, stop):
    _, n_states, H, D = v.shape
    mixed = np.empty(D, np.float64)
    for row in range(start, stop):
        for h in range(H):
            max_lse = -np.inf
            for i in range(n_states):
                x = np.float64(s[row, i, h])
                if x > max_lse or x != x:
                    max_lse = x
            mixed[:] = 0.0
            weight_sum = 0.0
            if max_lse == -np.inf:
                max_lse, weight_sum = 0.0, 0.0
            else:
                for i in range(n_states):
                    weight = 2.0 ** (np.float64(s[row, i, h]) - max_lse)
                    weight_sum += weight
                    for d in range(D):
                        mixed[d] += weight * v[row, i, h, d]
            inverse = 1.0 / weight_sum if weight_sum != 0.0 else 0.0
            for d in range(D):
                v_out[row, h, d] = mixed[d] * inverse
            s_out[row, h] = max_lse + math.log2(weight_sum) if weight_sum != 0.0 else -np.inf


@jit.kernel
def _merge_splits(plan, out, lse, start, stop):
    """Merge the splits of tiles [start, stop) in order."""
    header = simd.address(plan)
    group = read_word(header, at.QO_HEADS) // read_word(header, at.KV_HEADS)
    n = (read_word(header, at.DIM_VO) + 15) // 16 * 16
    bytes_each = 4 * (n + at.PARTIAL_TAIL)
    for merge in range(start, min(stop, read_word(header, at.N_MERGES))):
        fields = read_word(header, at.MERGES) + at.MERGE_BYTES * merge
        row, M = read_word(fields, at.MERGE_ROW), read_word(fields, at.MERGE_N_ROWS) * group
        head, partial = read_word(fields, at.MERGE_HEAD), read_word(fields, at.MERGE_PARTIAL)
        n_splits = read_word(fields, at.MERGE_N_SPLITS)
        for m in range(M):
            acc = read_word(header, at.PARTIALS) + (partial + m) * bytes_each
            row_max, row_sum = read_f32(acc + 4 * n), read_f32(acc + 4 * n + 4)
            for i in range(1, n_splits):
                new = acc + i * M * bytes_each
                row_max, row_sum = merge_partial(
                    acc, row_max, row_sum, new, read_f32(new + 4 * n), read_f32(new + 4 * n + 4), n
                )
            write_result(
                header, True, acc, row_max, row_sum, row + m // group, head * group + m % group,
                out, lse,
            )  # fmt: skip
