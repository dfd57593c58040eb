"""Append and gather of the paged KV cache on CUDA devices: launches of `cuda_append_gather.cu`.

Kernels are compiled per pair of formats (`cuda_codec.cuh`).  Stored bytes are those of the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

from nbflow_kernels import cuda
from nbflow_kernels.arrays import all_on_device, empty, on_device
from nbflow_kernels.kv_cache.cpu_codec import F16, F32, LAYOUTS
from nbflow_kernels.kv_cache.page_table import strides

_CACHE = "any* k_cache, any* v_cache, " + ", ".join(
    f"i64 {which}_{step}" for which in "kv" for step in ("page", "token", "head")
)
_TABLE = "i32* kv_indices, i32* kv_indptr, i32 n_requests, i32 n_pages, i32 page_size"
WARPS = 4
"""Head vectors per thread block."""


def format_type(kind: int) -> str:
    """Return the C++ type `Format<...>` (`cuda_codec.cuh`) of a format."""
    return f"Format<{', '.join(map(str, (kind, *LAYOUTS[kind].tolist())))}>"


def format_types(kinds: tuple[int, int]) -> str:
    """Return the C++ format types of keys and of values."""
    return ", ".join(map(format_type, kinds))


@functools.cache
def append_kernel(kinds: tuple[int, int]) -> cuda.Kernel:
    """Return the append kernel for these formats."""
    return cuda.cpp_kernel(
        __file__, "cuda_append_gather.cu", f"append<{format_types(kinds)}>",
        "f32* key, f32* value, i64 key_stride, i64 value_stride, i32* batch_indices, "
        f"i32* positions, {_CACHE}, {_TABLE}, i32 n_rows, i32 G, i32 D, i32 D_value, "
        "f32*? cos_sin, i32 n_positions, i32 rotary_dim, i32 is_neox",
    )  # fmt: skip


@functools.cache
def gather_kernel(kinds: tuple[int, int]) -> cuda.Kernel:
    """Return the gather kernel for these formats."""
    return cuda.cpp_kernel(
        __file__, "cuda_append_gather.cu", f"gather<{format_types(kinds)}>",
        f"any* key, any* value, i32* batch_indices, i32* positions, {_CACHE}, {_TABLE}, "
        "i32 n_rows, i32 G, i32 D, i32 D_value, i32 out_kind",
    )  # fmt: skip


def append_paged_kv_cache(
    key: Any,
    value: Any,
    batch_indices: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_layout: str,
    kinds: tuple[int, int],
    *,
    cos_sin: Any = None,
    interleave: bool = False,
) -> None:
    """See `nbflow_kernels.append_paged_kv_cache`; index arrays may be on the host.

    Rows missing in the page table, or in `cos_sin`, are skipped.
    """
    T, G, D = key.shape
    if not T * G:
        return
    itemsize = key.itemsize
    n_positions, rotary_dim = (0, 0) if cos_sin is None else cos_sin.shape
    append_kernel(kinds)(
        cuda.ceil_div(2 * T * G, WARPS), 32 * WARPS,
        (
            key, value, key.strides[0] // itemsize, value.strides[0] // itemsize,
            on_device(batch_indices, key), on_device(positions, key), k_cache, v_cache,
            *strides(k_cache, kv_layout), *strides(v_cache, kv_layout),
            *_table(kv_indices, kv_indptr, key, k_cache, kv_layout), T, G, D, value.shape[2],
            cos_sin, n_positions, rotary_dim, int(not interleave),
        ),
    )  # fmt: skip


def gather_paged_kv_cache(
    k_cache: Any,
    v_cache: Any,
    batch_indices: Any,
    positions: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_layout: str,
    kinds: tuple[int, int],
    key: Any,
    value: Any,
) -> None:
    """See `nbflow_kernels.gather_paged_kv_cache`; the outputs are float32 or float16."""
    T, G, D = key.shape
    if not T * G:
        return
    gather_kernel(kinds)(
        cuda.ceil_div(2 * T * G, WARPS), 32 * WARPS,
        (
            key, value, on_device(batch_indices, key), on_device(positions, key), k_cache, v_cache,
            *strides(k_cache, kv_layout), *strides(v_cache, kv_layout),
            *_table(kv_indices, kv_indptr, key, k_cache, kv_layout), T, G, D, value.shape[2],
            F32 if key.itemsize == 4 else F16,
        ),
    )  # fmt: skip


_COPY = cuda.cpp_kernel(
    __file__, "cuda_append_gather.cu", "copy_rows",
    ", ".join(f"any* {at}, i64 {at}_page, i64 {at}_token, i64 {at}_head" for at in ("from", "to"))
    + ", i32* batch_indices, i32* positions, i32* from_indices, i32* from_indptr, i32 from_size, "
    "i32* to_indices, i32* to_indptr, i32 to_size, i32 n_rows, i32 G, i32 n_bytes",
)  # fmt: skip
CONVERTED_BYTES = 64 << 20
"""Bytes of decoded keys and values that a conversion to another format holds at a time."""


def convert_paged_kv_cache(
    caches: tuple[Any, Any, Any, Any],
    layouts: tuple[str, str],
    kinds: tuple[tuple[int, int], tuple[int, int]],
    tables: tuple[Any, Any, Any, Any],
    rows: tuple[Any, Any],
    sizes: tuple[int, int],
) -> None:
    """See `nbflow_kernels.kv_cache.cpu.convert_paged_kv_cache`.

    A cache in the same formats is copied; for other ones, rows are decoded and appended in parts.
    """
    like, T = caches[0], len(rows[0])
    G = caches[0].shape[2 if layouts[0] == "NHD" else 1]
    there = all_on_device((*rows, *tables), like)
    batch_indices, positions, indices, indptr, to_indices, to_indptr = there
    if T * G == 0:
        return
    if all(before == after for before, after in kinds):
        page_sizes = [
            cache.shape[1 if layout == "NHD" else 2]
            for cache, layout in zip(caches[::2], layouts, strict=True)
        ]
        for before, after in zip(caches[:2], caches[2:], strict=True):
            _COPY(
                cuda.ceil_div(T * G, WARPS), 32 * WARPS,
                (
                    before, *strides(before, layouts[0]), after, *strides(after, layouts[1]),
                    batch_indices, positions, indices, indptr, page_sizes[0], to_indices,
                    to_indptr, page_sizes[1], T, G, before.shape[3] * before.itemsize,
                ),
            )  # fmt: skip
        return
    step = max(CONVERTED_BYTES // (4 * G * sum(sizes)), 1)
    k, v, out_k, out_v = caches
    for start in range(0, T, step):
        part = slice(start, min(start + step, T))
        key, value = (empty(like, (part.stop - start, G, D)) for D in sizes)
        requests, places = batch_indices[part], positions[part]
        gather_paged_kv_cache(
            k, v, requests, places, indices, indptr, layouts[0], (kinds[0][0], kinds[1][0]), key,
            value,
        )  # fmt: skip
        append_paged_kv_cache(
            key, value, requests, places, out_k, out_v, to_indices, to_indptr, layouts[1],
            (kinds[0][1], kinds[1][1]),
        )  # fmt: skip


def _table(kv_indices: Any, kv_indptr: Any, like: Any, k_cache: Any, kv_layout: str) -> Any:
    """Return the page-table arguments of the kernels."""
    page_size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    return (
        on_device(kv_indices, like), on_device(kv_indptr, like), len(kv_indptr) - 1,
        k_cache.shape[0], page_size,
    )  # fmt: skip
