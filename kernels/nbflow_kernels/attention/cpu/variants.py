"""CPU kernel of attention variants, with the user's functions compiled into it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.errors import NumbaError

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.flash_attention import LOG2_E, load_queries
from nbflow_kernels.attention.cpu.head_rows import copy_row
from nbflow_kernels.attention.cpu.online_softmax import mask_bit
from nbflow_kernels.attention.variants import (
    AttentionVariant,
    cannot_compile,
    no_mask,
    no_transform,
)
from nbflow_kernels.cpu import simd
from nbflow_kernels.cpu.simd_memory import read_f32, read_i32, read_i64, read_word, write_f32
from nbflow_kernels.kv_cache.cpu_codec import F32, copy_floats

_KERNELS: dict[tuple[Any, ...], Any] = {}


def run_variant(variant: AttentionVariant, kernel_args: tuple[Any, ...]) -> Callable[..., None]:
    """Return the kernel of a variant, compiled for these arguments."""
    key = variant.functions
    if key not in _KERNELS:
        _KERNELS[key] = _make_kernel(*key)
    kernel: Callable[..., None] = _KERNELS[key]
    try:
        kernel(*kernel_args, 0, 0)  # compiles; the range of shares is empty
    except NumbaError as error:
        raise cannot_compile(error) from error
    return kernel


def _make_kernel(transform: Any, mask: Any, output: Any, use_softmax: bool) -> Any:
    """Return a kernel of work items with the functions inlined; the plan must not be split."""
    compile_one = numba.njit(nogil=True, error_model="numpy")
    logits_transform = compile_one(transform or no_transform)
    logits_mask = compile_one(mask or no_mask)
    output_transform = compile_one(output or no_transform)

    @compile_one
    def add_key(q, key, n):
        row_sum = simd.splat(0.0)
        for d in range(0, 4 * n, 64):
            row_sum = simd.fma(simd.load_f32(q + d), simd.load_f32(key + d), row_sum)
        return simd.sum(row_sum)

    @compile_one
    def attend_one(
        header, params, source, kinds, k, v, strides, request, qo_idx, low, high, h, q, row, acc
    ):
        """Attend from one query vector; return the maximal score and the sum of weights."""
        g = h // (read_word(header, at.QO_HEADS) // read_word(header, at.KV_HEADS))
        page_size, index = read_word(header, at.PAGE_SIZE), np.int64(0)
        pages = read_i32(read_word(header, at.KV_INDPTR) + 4 * request)
        pages = read_word(header, at.KV_INDICES) + 4 * pages
        kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
        D_qk, D_vo = read_word(header, at.DIM_QK), read_word(header, at.DIM_VO)
        wide = (D_qk + 15) // 16 * 16
        if read_word(header, at.MASK) != 0:
            index = read_i64(read_word(header, at.MASK_STARTS) + 8 * request) + qo_idx * kv_len
        row_max, row_sum = -np.inf, 0.0
        acc[:] = 0.0
        for j in range(low, high):
            if read_word(header, at.MASK) != 0 and not mask_bit(
                read_word(header, at.MASK), read_word(header, at.MASK_BITS) != 0, index + j
            ):
                continue
            if not logits_mask(params, request, qo_idx, j, h, g):
                continue
            page = read_i32(pages + 4 * (j // page_size))
            key = k + page * strides[0] + (j % page_size) * strides[1] + g * strides[2]
            value = v + page * strides[4] + (j % page_size) * strides[5] + g * strides[6]
            copy_row(source, kinds[0], key, D_qk, simd.address(row), wide)
            logit = np.float64(add_key(q, simd.address(row), wide))
            x = np.float64(logits_transform(params, logit, request, qo_idx, j, h, g))
            weight = x
            if use_softmax:
                if x == -np.inf:
                    continue
                if not x <= row_max:
                    rescale = math.exp(row_max - x)
                    for d in range(D_vo):
                        acc[d] *= rescale
                    row_sum, row_max = row_sum * rescale, x
                weight = math.exp(x - row_max)
            row_sum += weight
            copy_row(source, kinds[1], value, D_vo, simd.address(row), (D_vo + 15) // 16 * 16)
            for d in range(D_vo):
                acc[d] += weight * row[d]
        return row_max, row_sum

    @compile_one
    def kernel(plan, params, source, kinds, q, q_row_bytes, k, v, strides, out, lse, start, stop):
        header = simd.address(plan)
        H = read_word(header, at.QO_HEADS)
        group, D_vo = H // read_word(header, at.KV_HEADS), read_word(header, at.DIM_VO)
        wide = (read_word(header, at.DIM_QK) + 15) // 16 * 16
        vectors = np.empty((read_word(header, at.MAX_VECTORS), wide), np.float32)
        row = np.empty(max(wide, (D_vo + 15) // 16 * 16), np.float32)
        acc = np.empty(D_vo, np.float64)
        done = np.empty(D_vo, np.float32)
        first_item = read_i64(read_word(header, at.SHARES) + 8 * start)
        for item in range(first_item, read_i64(read_word(header, at.SHARES) + 8 * stop)):
            fields = read_word(header, at.ITEMS) + at.ITEM_BYTES * item
            request, first_row = read_word(fields, at.ITEM_REQUEST), read_word(fields, at.ITEM_ROW)
            n_rows, g = read_word(fields, at.ITEM_N_ROWS), read_word(fields, at.ITEM_HEAD)
            position, M = read_word(fields, at.ITEM_POSITION), n_rows * group
            kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
            load_queries(header, source, q, q_row_bytes, M, group, first_row, g, position,
                         simd.address(vectors), wide)  # fmt: skip
            for m in range(M):
                here, h = position + m // group, g * group + m % group
                low, high = 0, kv_len
                if read_word(header, at.WINDOW) >= 0:
                    low = max(0, here - read_word(header, at.WINDOW))
                if read_word(header, at.CAUSAL) != 0:
                    high = min(kv_len, here + 1)
                qo_start = read_i32(read_word(header, at.QO_INDPTR) + 4 * request)
                qo_idx = first_row + m // group - qo_start
                row_max, row_sum = attend_one(
                    header, params, source, kinds, k, v, strides, request, qo_idx, low, high, h,
                    simd.address(vectors[m]), row, acc,
                )  # fmt: skip
                factor = 1.0 / row_sum if use_softmax and row_sum != 0.0 else 1.0
                if read_word(header, at.OUT_FACTORS) != 0:
                    factor *= read_f32(read_word(header, at.OUT_FACTORS) + 4 * h)
                for d in range(D_vo):
                    done[d] = output_transform(params, acc[d] * factor, request, qo_idx, h)
                place = (first_row + m // group) * H + h
                copy_floats(F32, simd.address(done), D_vo, 1.0, out + 4 * D_vo * place, D_vo)
                if lse != 0:
                    log = row_max + math.log(row_sum) if row_sum != 0.0 else -np.inf
                    base = 1.0 if read_word(header, at.LSE_NATURAL) != 0 else LOG2_E
                    write_f32(lse + 4 * place, log * base)

    return kernel
