"""Attention under a block-sparse mask: only the stored blocks of keys are read.

Each block row is a request of the paged kernel, with its visible key blocks as pages.  Keys are not
copied, and the cost of a block does not depend on its position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nbflow_kernels.arrays import (
    check_array,
    check_indptr,
    check_range,
    empty,
    on_host,
    output,
)
from nbflow_kernels.attention.paged import BatchPrefillWithPagedKVCacheWrapper
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.errors import UsageError
from nbflow_kernels.masks import convert_bsr_mask_layout

FLOATS = (np.float32, np.float16)


class _BlockMaskWrapper:
    """Base class: the paged wrapper that runs a block mask."""

    def __init__(self, float_workspace_buffer: Any = None) -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD")
        self._sizes: tuple[int, int, int, int, int, int] | None = None

    @property
    def current(self) -> Any:
        """Return the plan of the paged kernel, inspectable as NumPy arrays."""
        return self._wrapper.current

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Set the split-KV workspace for later plans; None to allocate per plan."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _plan_blocks(
        self,
        tables: tuple[Any, Any, Any],
        heads: tuple[int, int, int],
        page: int,
        mask: np.ndarray | None,
        arguments: Mapping[str, Any],
    ) -> AttentionPlan:
        """Plan requests whose pages, given by (qo_indptr, kv_indptr, kv_indices), are all full.

        `mask` includes the causal one of the `arguments` of `plan`.
        """
        last = np.where(tables[1][1:] > tables[1][:-1], page, 0).astype(np.int32)
        arguments = {**arguments, "custom_mask": mask, "causal": False}
        return self._wrapper._plan_pages((*tables, last), (*heads, None), page, arguments)

    def _planned(self) -> tuple[int, int, int, int, int, int]:
        """Return M, N, the page size, H, G and D of the current plan."""
        if self._sizes is None:
            raise UsageError("run needs a plan: call plan(...) first, once per mask")
        return self._sizes


class BlockSparseAttentionWrapper(_BlockMaskWrapper):
    """Attention of M query rows to N keys under a mask in block compressed row form (BSR).

    Parameters
    ----------
    float_workspace_buffer : array, optional
        Split-KV workspace, as in `BatchPrefillWithPagedKVCacheWrapper`.

    Examples
    --------
    The mask ``[[0, 0, 1], [1, 0, 1], [0, 1, 1]]`` in blocks of 1 x 1:

    >>> import numpy as np
    >>> from nbflow_kernels import BlockSparseAttentionWrapper
    >>> ints = lambda *values: np.array(values, np.int32)
    >>> wrapper = BlockSparseAttentionWrapper()
    >>> _ = wrapper.plan(ints(0, 1, 3, 5), ints(2, 0, 2, 1, 2), 3, 3, 1, 1, 1, 1, 2)
    >>> k = v = np.float32([[[1, 0]], [[0, 1]], [[0, 0]]])
    >>> wrapper.run(np.zeros((3, 1, 2), np.float32), k, v)[:, 0]
    array([[0. , 0. ],
           [0.5, 0. ],
           [0. , 0.5]], dtype=float32)
    """

    def plan(
        self,
        indptr: Any,
        indices: Any,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Any = None,
        packed_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
    ) -> Any:
        """Schedule the work of a mask.

        Parameters
        ----------
        indptr : array of int32, shape (MB + 1,)
            The blocks of block row i are ``indices[indptr[i]:indptr[i + 1]]``; MB = ceil(M / R).
        indices : array of int32, shape (nnz,)
            Block columns, each in 0..N / C - 1 and at most once in a row, in any order.
        M, N : int
            Query rows and keys; N is a multiple of C.
        R, C : int
            Rows and columns of a block; C = 1 selects single keys.
        num_qo_heads, num_kv_heads, head_dim : int
            H, G and D; H must be a multiple of G.
        mask : array of bool, shape (nnz, R, C), optional
            Visible elements of the stored blocks; all by default.
        packed_mask : array of uint8, optional
            The mask packed into bits, ``segment_packbits(convert_bsr_mask_layout(mask, indptr),
            indptr * R * C, bitorder="little")[0]``; takes precedence over `mask`.
        causal : bool
            Additionally mask keys after m + N - M for row m.
        pos_encoding_mode : str
            Must be ``"NONE"``: the index of a key in the blocks is not its position.
        use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta
            As in `single_prefill_with_kv_cache`.
        q_data_type, kv_data_type, o_data_type, non_blocking
            As in `BatchPrefillWithPagedKVCacheWrapper.plan`.

        Returns
        -------
        AttentionPlan
            The plan of the paged kernel, one request per block row; also kept as `current`.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        refuse_positions(pos_encoding_mode)
        indptr, indices = on_host(indptr), on_host(indices)
        mask, packed_mask = on_host(mask), on_host(packed_mask)
        check_bsr(indptr, indices, M, N, R, C)
        qo_indptr = np.minimum(np.arange(len(indptr), dtype=np.int64) * R, M).astype(np.int32)
        seen = None
        if packed_mask is not None:
            seen = _unpack(packed_mask, indptr, qo_indptr, R, C)
        elif mask is not None:
            check_array("mask", mask, (len(indices), R, C), np.bool_)
            seen = convert_bsr_mask_layout(mask, indptr)[: int(_elements(indptr, qo_indptr, C)[-1])]
        if causal:
            first = np.repeat(indices.astype(np.int64) * C, C) + np.tile(np.arange(C), len(indices))
            seen = add_causal(seen, first, indptr.astype(np.int64) * C, qo_indptr, N - M)
        heads, tables = (num_qo_heads, num_kv_heads, head_dim), (qo_indptr, indptr, indices)
        plan = self._plan_blocks(tables, heads, C, seen, locals())
        self._sizes = (M, N, C, num_qo_heads, num_kv_heads, head_dim)
        return plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend with the current plan.

        Parameters
        ----------
        q : array of float32 or float16, shape (M, H, D)
            Query rows.
        k, v : array of float32 or float16, shape (N, G, D)
            Keys and values.
        out : array, shape (M, H, D), optional
            Output array.
        lse : array of float32, shape (M, H), optional
            Output array of the base-2 LSE.
        return_lse : bool
            Return the pair (out, lse).

        Returns
        -------
        array, shape (M, H, D), or a pair with the LSE
            In the queries' dtype unless `plan` got `o_data_type`.  A row without visible keys gives
            zeros and an LSE of -inf.

        Raises
        ------
        UsageError, TypeError
            As `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        M, N, C, H, G, D = self._planned()
        check_array("q", q, (M, H, D), FLOATS, rows=True)
        check_array("k", k, (N, G, D), FLOATS)
        check_array("v", v, (N, G, D), k.dtype)
        pages = tuple(a.reshape(N // C, C, G, D) for a in (k, v))
        return self._wrapper.run(q, pages, out=out, lse=lse, return_lse=return_lse)


class VariableBlockSparseAttentionWrapper(_BlockMaskWrapper):
    """Attention under a block mask with blocks of unequal sizes, one mask per KV head.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import VariableBlockSparseAttentionWrapper
    >>> blocks = np.array([[[0, 1], [1, 1]]], bool)  # one head, 2 x 2 blocks
    >>> sizes = np.array([[1, 2]], np.int32)  # rows and keys 0 | 1, 2
    >>> wrapper = VariableBlockSparseAttentionWrapper()
    >>> _ = wrapper.plan(blocks, sizes, sizes, 1, 1, 2)
    >>> k = v = np.float32([[[3, 0], [1, 0], [2, 0]]])
    >>> wrapper.run(np.zeros((1, 3, 2), np.float32), k, v)[0, :, 0]  # row 0 sees keys 1 and 2
    array([1.5, 2. , 2. ], dtype=float32)
    """

    def plan(
        self,
        block_mask_map: Any,
        block_row_sz: Any,
        block_col_sz: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Any = None,
        kv_data_type: Any = None,
    ) -> Any:
        """Schedule the work of a mask.

        Parameters
        ----------
        block_mask_map : array of bool, shape (G, MB, NB)
            Visible blocks per KV head.
        block_row_sz : array of int32, shape (G, MB)
            Rows of each block row; they sum to M for every head.
        block_col_sz : array of int32, shape (G, NB)
            Keys of each block column; they sum to N for every head.  Their greatest common divisor
            is the page size of the kernel: multiples of 16 are fast.
        num_qo_heads, num_kv_heads, head_dim, causal, pos_encoding_mode, use_fp16_qk_reduction
        logits_soft_cap, sm_scale, rope_scale, rope_theta, non_blocking, q_data_type, kv_data_type
            As in `BlockSparseAttentionWrapper.plan`.

        Returns
        -------
        AttentionPlan
            The plan of the paged kernel, one request per head and block row.
        """
        refuse_positions(pos_encoding_mode)
        G = num_kv_heads
        block_mask_map = on_host(block_mask_map)
        block_row_sz, block_col_sz = on_host(block_row_sz), on_host(block_col_sz)
        check_array("block_mask_map", block_mask_map, (G, None, None), np.bool_)
        _, MB, NB = block_mask_map.shape
        M = _sum_of_sizes("block_row_sz", block_row_sz, (G, MB))
        N = _sum_of_sizes("block_col_sz", block_col_sz, (G, NB))
        if G < 1 or num_qo_heads % G:
            raise UsageError(
                f"num_qo_heads must be a multiple of num_kv_heads, got {num_qo_heads} and {G}"
            )
        qo_indptr = np.zeros(G * MB + 1, np.int32)
        np.cumsum(block_row_sz.ravel(), out=qo_indptr[1:])
        page = max(int(np.gcd.reduce(block_col_sz, axis=None)), 1)
        kv_indptr, kv_indices = pages_of_blocks(block_mask_map, block_col_sz, page, N)
        seen = None
        if causal:
            keys = (kv_indices.astype(np.int64) * page % max(N, 1))[:, None] + np.arange(page)
            rows = qo_indptr[:-1].astype(np.int64) - np.repeat(np.arange(G) * M, MB)
            seen = add_causal(
                None, keys.ravel(), kv_indptr.astype(np.int64) * page, qo_indptr, N - M, rows
            )
        heads, tables = (num_qo_heads // G, 1, head_dim), (qo_indptr, kv_indptr, kv_indices)
        plan = self._plan_blocks(tables, heads, page, seen, locals())
        self._sizes = (M, N, page, num_qo_heads, G, head_dim)
        return plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend with the current plan.

        As for `BlockSparseAttentionWrapper.run`, but all arrays are ordered head by head: `q` and
        `out` are (H, M, D), `k` and `v` are (G, N, D), `lse` is (H, M).
        """
        M, N, page, H, G, D = self._planned()
        check_array("q", q, (H, M, D), FLOATS)
        check_array("k", k, (G, N, D), FLOATS)
        check_array("v", v, (G, N, D), k.dtype)
        if lse is not None:
            check_array("lse", lse, (H, M))
        out = output(q, (H, M, D), out, q.dtype)
        group = H // G
        rows = q.reshape(G, group, M, D).swapaxes(1, 2).copy()
        pages = tuple(a.reshape(-1, page, 1, D) for a in (k, v))
        found, found_lse = self._wrapper.run(rows.reshape(G * M, group, D), pages, return_lse=True)
        out.reshape(G, group, M, D)[:] = found.reshape(G, M, group, D).swapaxes(1, 2)
        if not return_lse and lse is None:
            return out
        if lse is None:
            lse = empty(q, (H, M))
        lse.reshape(G, group, M)[:] = found_lse.reshape(G, M, group).swapaxes(1, 2)
        return (out, lse) if return_lse else out


def refuse_positions(pos_encoding_mode: str) -> None:
    """Raise if a position encoding is requested: key indices are not positions here."""
    if pos_encoding_mode != "NONE":
        raise UsageError(
            f"pos_encoding_mode must be 'NONE' here, got {pos_encoding_mode!r}: the kernel would "
            "count positions in the selected keys; rotate q and k before, with apply_rope"
        )


def check_bsr(indptr: Any, indices: Any, M: int, N: int, R: int, C: int) -> None:
    """Raise unless the BSR matrix fits the sizes."""
    for name, value, least in (("M", M, 0), ("N", N, 0), ("R", R, 1), ("C", C, 1)):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
    if N % C:
        raise UsageError(f"N must be a multiple of C = {C}, got {N}")
    check_indptr("indptr", indptr)
    if len(indptr) != -(-M // R) + 1:
        raise UsageError(
            f"indptr must have ceil(M / R) + 1 = {-(-M // R) + 1} entries, got {len(indptr)}"
        )
    check_array("indices", indices, (None,), np.int32)
    if len(indices) != indptr[-1]:
        raise UsageError(f"indices must have indptr[-1] = {indptr[-1]} entries, got {len(indices)}")
    check_range("indices must be block columns {}", indices, N // C)
    rows = np.repeat(np.arange(len(indptr) - 1, dtype=np.int64), np.diff(indptr))
    places, counts = np.unique(rows * (N // C) + indices, return_counts=True)
    if (counts > 1).any():
        row, column = divmod(int(places[counts > 1][0]), N // C)
        raise UsageError(f"indices must name a block once, got column {column} twice in row {row}")


def _elements(indptr: np.ndarray, qo_indptr: np.ndarray, C: int) -> np.ndarray:
    """Return the offset of each block row in the flattened mask, int64 (MB + 1,)."""
    sizes = np.diff(qo_indptr).astype(np.int64) * np.diff(indptr) * C
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _unpack(packed: Any, indptr: np.ndarray, qo_indptr: np.ndarray, R: int, C: int) -> np.ndarray:
    """Return the flattened mask from packed bits, where each block row starts at a byte."""
    sizes = np.diff(indptr).astype(np.int64) * R * C
    check_array("packed_mask", packed, (int(((sizes + 7) // 8).sum()),), np.uint8)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum((sizes + 7) // 8)])
    counts = np.diff(_elements(indptr, qo_indptr, C))
    parts = [
        np.unpackbits(packed[a:b], bitorder="little")[:n]
        for a, b, n in zip(starts[:-1], starts[1:], counts, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.uint8), *parts]).astype(np.bool_)


def add_causal(
    seen: np.ndarray | None,
    keys: np.ndarray,
    key_indptr: np.ndarray,
    qo_indptr: np.ndarray,
    shift: int,
    rows: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the flattened mask with causal masking added; None if all keys are visible.

    `keys` are the key positions of all requests, `rows` the position of each request's first row
    (default: its offset in `qo_indptr`); a row sees keys up to its position plus `shift`.
    """
    first = qo_indptr[:-1].astype(np.int64) if rows is None else rows
    parts = []
    for b, row in enumerate(first):
        here = row + shift + np.arange(qo_indptr[b + 1] - qo_indptr[b])
        parts.append((keys[key_indptr[b] : key_indptr[b + 1]] <= here[:, None]).ravel())
    flat = np.concatenate([np.zeros(0, np.bool_), *parts])
    if seen is not None:
        flat &= seen
    return None if flat.all() else flat


def pages_of_blocks(
    blocks: np.ndarray, sizes: np.ndarray, page: int, N: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the page table of (head, block row) requests with pages of `page` keys."""
    G, MB, _ = blocks.shape
    starts = np.cumsum(sizes, axis=1, dtype=np.int64) - sizes + np.arange(G)[:, None] * N
    head, row, column = np.nonzero(blocks)
    counts = sizes[head, column].astype(np.int64) // page
    totals = np.bincount(head * MB + row, counts, minlength=G * MB).astype(np.int64)
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(totals)])
    before = np.cumsum(counts) - counts  # pages of earlier blocks
    inside = np.arange(int(counts.sum())) - np.repeat(before, counts)
    indices = np.repeat(starts[head, column] // page, counts) + inside
    return indptr.astype(np.int32), indices.astype(np.int32)


def _sum_of_sizes(name: str, sizes: Any, shape: tuple[int, int]) -> int:
    """Return the sum of the block sizes, checked to be equal for all heads."""
    check_array(name, sizes, shape, np.int32)
    if sizes.size and sizes.min() < 0:
        raise UsageError(f"{name} must not be negative, got {int(sizes.min())}")
    sums = sizes.sum(axis=1)
    if len(sums) and (sums != sums[0]).any():
        raise UsageError(f"{name} must have the same sum for every head, got {sums.tolist()}")
    return int(sums[0]) if len(sums) else 0
