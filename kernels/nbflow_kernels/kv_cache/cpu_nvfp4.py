"""Append to an NVFP4 cache on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cpu import jit
from nbflow_kernels.cpu.nvfp4 import encode_nvfp4_row
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.kv_cache.page_table import strides


def append(
    x: np.ndarray,
    rows: Any,
    slots: np.ndarray | None,
    codes: np.ndarray,
    scales: np.ndarray,
    kv_layout: str,
    global_scale: np.float32,
) -> None:
    """Encode rows (n, G, D) into slots of a cache of codes and one of scales.

    Without `slots`, `rows` has request, position, page numbers and offsets.
    """
    n, G, D = x.shape
    page_size = codes.shape[1 if kv_layout == "NHD" else 2]
    if slots is None:
        slots = slots_of(rows, page_size)
    parallel_for(
        _append, n, 8.0 * x.size, slots, len(codes) * page_size, page_size, address_of(x),
        x.strides[0], G, D, global_scale, address_of(codes), strides(codes, kv_layout),
        address_of(scales), strides(scales, kv_layout),
    )  # fmt: skip


def slots_of(rows: tuple[np.ndarray, ...], page_size: int) -> np.ndarray:
    """Return the slot ``page * page_size + token`` of each row, -1 for padding."""
    batch_indices, positions, kv_indices, kv_indptr = rows
    used = batch_indices >= 0
    slots = np.full(len(positions), -1, np.int64)
    pages = kv_indptr[batch_indices[used]].astype(np.int64) + positions[used] // page_size
    slots[used] = kv_indices[pages].astype(np.int64) * page_size + positions[used] % page_size
    return slots


@jit.kernel
def _append(
    slots, capacity, page_size, x, row_bytes, G, D, global_scale, codes, code_steps, scales,
    scale_steps, start, stop
):  # fmt: skip
    for row in range(start, stop):
        slot = np.int64(slots[row])
        if slot < 0 or slot >= capacity:
            continue
        page, token = slot // page_size, slot % page_size
        for g in range(G):
            encode_nvfp4_row(
                x + row * row_bytes + 4 * g * D, D, global_scale,
                codes + page * code_steps[0] + token * code_steps[1] + g * code_steps[2],
                scales + page * scale_steps[0] + token * scale_steps[1] + g * scale_steps[2],
            )  # fmt: skip
