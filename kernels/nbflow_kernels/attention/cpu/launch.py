"""Launches of `flash_attention.py`, one kernel for prefill and decode.

The kernel is compiled for each pair of key and value readers: float16, bfloat16 or float32 in
place; float32 rows converted from floats (head sizes that are not multiples of 16, fused RoPE, keys
stored before RoPE); float32 rows decoded from block formats; and, for few query vectors, blocks of
int8 in place, of keys, of values or of both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.flash_attention import flash_attention
from nbflow_kernels.attention.cpu.int8_scores import MAX_DIM
from nbflow_kernels.attention.cpu.merge import merge_splits
from nbflow_kernels.attention.cpu.variants import set_variant
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.variants import AttentionVariant
from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.cpu.register_tiles import BLOCK_BYTES, has_wide_registers
from nbflow_kernels.cpu.register_tiles_columns import has_byte_products
from nbflow_kernels.cpu.simd_memory import address_of
from nbflow_kernels.kv_cache import cpu_codec as codec
from nbflow_kernels.kv_cache.cpu_codec import BF16, F16, F32, FIRST_BLOCK_KIND
from nbflow_kernels.kv_cache.page_table import strides

__all__ = ["attend", "attend_variant", "latent_attention", "merge_splits"]

# Scalars whose types select the compiled kernel; int16 is float16, uint16 is bfloat16.
_FLOAT32: Any = np.float32(0)
_BLOCKS: Any = np.uint8(0)
_TILES: dict[int, Any] = {F32: _FLOAT32, F16: np.int16(0), BF16: np.uint16(0)}
_INT8_BLOCKS: Any = np.int8(0)
_INT8_PRODUCTS: Any = np.uint32(0)
_INT8_KINDS = {
    kind
    for kind, layout in enumerate(codec.LAYOUTS)
    if layout[codec.MODE] == codec.SIGNED and layout[codec.BLOCK_BYTES] == BLOCK_BYTES
}
"""Formats whose blocks register tiles read in place: a float16 scale and 32 int8."""
# From this many query vectors on, float32 rows that cross cache lines are copied to aligned rows.
PACK_FROM = 8
# Up to this many, blocks of int8 are read in place: more share a chunk of decoded rows.
BLOCKS_UP_TO = 8


def attend(
    plan: AttentionPlan,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    kinds: tuple[int, int] | None = None,
    extras: bool = False,
    int8_scores: bool = False,
) -> None:
    """Process all work items: final results go to `out` and `lse`, partial ones to the plan.

    Arguments are not checked.  `q` (nnz, H, D) is float32 with any row stride; `k_cache` and
    `v_cache` have the plan's `kv_layout` and a contiguous last axis; `kinds` are their formats
    (`nbflow_kernels.kv_cache.cpu_codec.KINDS`), from their dtypes by default; `out` (nnz, H, D) and
    `lse` (nnz, H) are contiguous.  `extras` takes the general kernel for what a later call sets in
    the plan's header, e.g. sinks.  `int8_scores` multiplies int8 queries and keys of formats with a
    float16 scale and 32 int8 per block (`int8_scores.py`); elsewhere, and where `has_int8_scores`
    says no, it changes nothing.
    """
    if kinds is None:
        kinds = _float_kind(k_cache), _float_kind(v_cache)
    cache = _cache_addresses(plan, k_cache, v_cache)
    readers = _readers(plan, kinds, *cache)
    if int8_scores and has_int8_scores(plan, kinds[0]):
        readers[0] = (_INT8_BLOCKS, _INT8_PRODUCTS, kinds[0], None)
    _launch(plan, readers, q, cache, out, lse, extras)


def _launch(
    plan: AttentionPlan, readers: list[Any], q: np.ndarray, cache: Any, out: np.ndarray, lse: Any,
    extras: bool = False,
) -> None:  # fmt: skip
    cap = plan.logits_soft_cap if extras or has_extras(plan) else None
    parallel_for(
        flash_attention, plan.n_shares, plan.work, plan.header, cap, *readers, address_of(q),
        q.strides[0], *cache, address_of(out), 0 if lse is None else address_of(lse),
    )  # fmt: skip


def has_extras(plan: AttentionPlan) -> bool:
    """Return whether a plan has what only the general kernel does.

    Custom masks, biases, a soft cap, sinks, factors of results, functions of a variant.
    """
    tables = at.MASK, at.SLOPES, at.BIAS, at.SINKS, at.OUT_FACTORS
    has_tables = any(plan.table(field) is not None for field in tables)
    return has_tables or plan.hooks is not None or plan.logits_soft_cap != 0.0


def _float_kind(cache: np.ndarray) -> int:
    return F32 if cache.itemsize == 4 else F16 if cache.dtype == np.float16 else BF16


def _readers(
    plan: AttentionPlan, kinds: tuple[int, int], k: int, v: int, steps: tuple[int, ...]
) -> list[tuple[Any, ...]]:
    """Return the readers of keys and of values, (source, like, kind, pack) each."""
    _, _, D_qk, D_vo = plan.heads
    packed = bool(D_qk % 16 or D_vo % 16) or plan.table(at.ROPE) is not None
    # the block decoder also converts floats, which saves a kernel for mixed formats
    copied = _FLOAT32 if max(kinds) < FIRST_BLOCK_KIND else _BLOCKS
    readers = list[tuple[Any, ...]]()
    changed = plan.table(at.KEY_ROPE) is not None, False  # keys need float32 copies
    few = bool(plan.header[at.MAX_VECTORS] <= BLOCKS_UP_TO) and has_wide_registers()
    blocks_in_place = few and not packed and not changed[0]
    starts = zip(kinds, (k, v), (D_qk, D_vo), (steps[:4], steps[4:]), changed, strict=True)
    for kind, start, dim, each, is_changed in starts:
        if blocks_in_place and kind in _INT8_KINDS and dim % 32 == 0:
            readers.append((_INT8_BLOCKS, _INT8_BLOCKS, kind, None))
            continue
        if packed or is_changed or kind not in _TILES:
            readers.append((copied, _FLOAT32, kind, True))
            continue
        crosses_lines = any(at_byte % 64 for at_byte in (start, *each))
        pack = kind == F32 and plan.header[at.MAX_VECTORS] >= PACK_FROM and crosses_lines
        # only float32 rows are copied as they are: without the code to copy, less is compiled
        readers.append((_TILES[kind], _TILES[kind], kind, bool(pack) if kind == F32 else None))
    return readers


def has_int8_scores(plan: AttentionPlan, kind: int) -> bool:
    """Return whether keys of a format can be multiplied as int8 in a plan.

    Head sizes are multiples of 32 up to 256, keys are not changed as they are read, and the
    processor multiplies bytes (AVX-512 VNNI).
    """
    changed = any(plan.table(field) is not None for field in (at.ROPE, at.KEY_ROPE))
    dim = plan.heads[2]
    fits = kind in _INT8_KINDS and dim % 32 == 0 and dim <= MAX_DIM
    return fits and not changed and has_byte_products()


def attend_variant(
    plan: AttentionPlan,
    variant: AttentionVariant | None,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    kinds: tuple[int, int],
) -> None:
    """Attend with the functions of an `AttentionVariant`, if any; its plan must not be split."""
    set_variant(plan, variant)
    attend(plan, q, k_cache, v_cache, out, lse, kinds)


def _cache_addresses(
    plan: AttentionPlan, k_cache: np.ndarray, v_cache: np.ndarray
) -> tuple[int, int, tuple[int, ...]]:
    """Return the addresses of keys and values, and bytes per page, token, head and row of each."""
    return address_of(k_cache), address_of(v_cache), (
        *strides(k_cache, plan.kv_layout), k_cache.itemsize * k_cache.shape[3],
        *strides(v_cache, plan.kv_layout), v_cache.itemsize * v_cache.shape[3],
    )  # fmt: skip


def latent_attention(
    plan: AttentionPlan,
    q: np.ndarray,
    ckv_cache: np.ndarray,
    kpe_cache: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    kind: int,
) -> None:
    """Latent attention (MLA): one KV head with key (ckv, kpe) and value ckv.

    Arguments are not checked.  The caches are (pages, page_size, row) with any page and token
    strides; `q` is (nnz, H, D_ckv + D_kpe); the rest as in `attend`.
    """
    plan.header[at.LATENT] = 1
    cache = _cache_addresses(plan, ckv_cache[:, :, None], kpe_cache[:, :, None])
    reader = (_FLOAT32 if kind in _TILES else _BLOCKS, _FLOAT32, kind, True)
    _launch(plan, [reader, reader], q, cache, out, lse)
    if plan.n_merges:
        merge_splits(plan, out, lse)
