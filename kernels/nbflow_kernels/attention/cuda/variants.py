"""CUDA kernel of attention variants, with the user's functions compiled into it by Numba CUDA.

One warp per query vector, one key at a time, in float64 where the CPU kernel uses it.  Keys and
values are first gathered to float32 rows (`gather` of `kv_cache/cuda_append_gather.cu`).  Compiling
takes a few seconds per variant and process.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.arrays import empty, on_device
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.flash_attention import LOG2_E
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.variants import (
    AttentionVariant,
    cannot_compile,
    no_mask,
    no_transform,
    with_position,
)
from nbflow_kernels.cuda import numba_cuda, nvrtc
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.cpu_codec import F32
from nbflow_kernels.kv_cache.cuda import WARPS, gather_kernel

_KERNELS: dict[Any, cuda.Kernel] = {}
_lock = threading.Lock()


def attend_variant(
    plan: AttentionPlan,
    variant: AttentionVariant,
    q: Any,
    k_cache: Any,
    v_cache: Any,
    kv_strides: Any,
    out: Any,
    lse: Any,
    kinds: tuple[int, int],
) -> None:
    """Attend with a variant; `kv_strides` are page, token and head strides in bytes."""
    H, _, _, D_vo = plan.heads
    if not plan.n_rows:
        return
    starts = np.zeros(len(plan.kv_lens) + 1, np.int32)
    np.cumsum(plan.kv_lens, out=starts[1:])
    k, v = _rows(plan, k_cache, v_cache, kv_strides, kinds, starts)
    wide = q.copy() if q.dtype == np.float32 else q.astype(np.float32)
    result = out if out.dtype == np.float32 else empty(q, out.shape)
    request = np.repeat(np.arange(len(plan.kv_lens), dtype=np.int32), np.diff(plan.qo_indptr))
    mask, mask_starts = _mask(plan)
    nothing = np.zeros(0, np.float32)
    factors = plan.table(at.OUT_FACTORS)
    sinks = plan.table(at.SINKS)
    tables = (
        request, np.ascontiguousarray(plan.qo_indptr), starts, mask, mask_starts,
        plan.table(at.SCORE_FACTORS), nothing if factors is None else factors,
        nothing if sinks is None else sinks,
    )  # fmt: skip
    sums = empty(q, (0, 0)) if lse is None else lse
    arrays = [wide, k, v, *(on_device(table, q) for table in tables), result, sums]
    params = _params(variant, q)
    scalars = (
        plan.window_left, plan.attention_chunk, int(plan.causal), int(plan.header[at.LSE_NATURAL])
    )  # fmt: skip
    kernel = _kernel(variant, params, arrays, scalars)
    flat = [word for value in (*params, *arrays, *scalars) for word in _words(value)]
    kernel((plan.n_rows, H), 32, tuple(flat), 8 * D_vo)
    if result is not out:
        out[...] = result


def _params(variant: AttentionVariant, q: Any) -> tuple[Any, ...]:
    """Return the parameters of a variant, arrays on the device of the queries."""
    params = tuple(
        on_device(np.ascontiguousarray(p), q) if isinstance(p, np.ndarray) else p
        for p in variant.params
    )
    for i, p in enumerate(params):
        if hasattr(p, "flags") and not p.flags.c_contiguous:
            raise UsageError(f"variant.params[{i}] must be contiguous on a device")
    return params


def _rows(
    plan: AttentionPlan, k_cache: Any, v_cache: Any, kv_strides: Any, kinds: Any, starts: np.ndarray
) -> tuple[Any, Any]:
    """Return the keys (N, G, D) and values of all requests as float32 rows."""
    _, G, D_qk, D_vo = plan.heads
    n = int(starts[-1])
    k, v = empty(k_cache, (n, G, D_qk)), empty(k_cache, (n, G, D_vo))
    if n:
        request = np.repeat(np.arange(len(plan.kv_lens), dtype=np.int32), plan.kv_lens)
        position = np.arange(n, dtype=np.int32) - starts[request]
        tables = [on_device(t, k) for t in (request, position, plan.kv_indices, plan.kv_indptr)]
        gather_kernel(kinds)(
            cuda.ceil_div(2 * n * G, WARPS), 32 * WARPS,
            (
                k, v, *tables[:2], k_cache, v_cache, *kv_strides[0], *kv_strides[1], *tables[2:],
                len(plan.kv_lens), 2**31 - 1, plan.page_size, n, G, D_qk, D_vo, F32,
            ),
        )  # fmt: skip
    return k, v


def _mask(plan: AttentionPlan) -> tuple[np.ndarray, np.ndarray]:
    """Return the custom mask as bytes, and the offset of each request; empty without a mask."""
    mask, starts = plan.table(at.MASK), plan.table(at.MASK_STARTS)
    if mask is None:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64)
    if plan.header[at.MASK_BITS]:
        return np.unpackbits(mask, bitorder="little"), starts
    return mask.view(np.uint8), starts


def _kernel(
    variant: AttentionVariant, params: tuple[Any, ...], arrays: list[Any], scalars: Any
) -> cuda.Kernel:
    """Return the kernel compiled with the variant's functions for these argument types."""
    types = importlib.import_module("numba.core.types")
    values = (*params, *arrays, *scalars)
    kinds = [_numba_type(types, value) for value in values]
    signature = (types.Tuple(kinds[: len(params)]), *kinds[len(params) :])
    key = (variant.functions, signature)
    with _lock:
        if key not in _KERNELS:
            declared = ", ".join(_declaration(f"a{i}", value) for i, value in enumerate(values))
            _KERNELS[key] = cuda.Kernel(
                "attend_variant", declared, _compiler(_make_kernel(*variant.functions), signature)
            )
        return _KERNELS[key]


def _compiler(function: Callable[..., Any], signature: Any) -> Any:
    def compile(arch: str, output: str) -> tuple[bytes, str]:
        made_for = nvrtc.target(arch, output)
        try:
            code = numba_cuda.compile_typed(function, signature, *made_for, "attend_variant")
        except cuda.CompileError as error:
            raise cannot_compile(error) from error
        return code, "attend_variant"

    return compile


def _numba_type(types, value):
    """Return the Numba type of an argument."""
    if hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != ():
        return types.Array(numba.from_dtype(value.dtype), value.ndim, "C")
    return numba.typeof(value)


def _declaration(name: str, value: Any) -> str:
    """Return the PTX parameters of an argument; see `_words`."""
    if hasattr(value, "dtype") and value.shape != ():
        extents = [f"i64 {name}_{part}{d}" for part in "nb" for d in range(value.ndim)]
        words = [f"u64 {name}_meminfo", f"u64 {name}_parent", f"i64 {name}_size"]
        return ", ".join([*words, f"i64 {name}_itemsize", f"any* {name}", *extents])
    names = {"float64": "f64", "float32": "f32", "bool": "u8"}
    kind = numba.typeof(value).name
    return f"{names.get(kind, kind.replace('uint', 'u').replace('int', 'i'))} {name}"


def _words(value: Any) -> tuple[Any, ...]:
    """Return the kernel arguments of a value: for an array, the fields of Numba's array struct."""
    if not hasattr(value, "dtype") or value.shape == ():
        return (value,)
    return (0, 0, value.size, value.itemsize, value, *value.shape, *value.strides)


def _make_kernel(transform: Any, mask_of: Any, output: Any, use_softmax: bool) -> Any:
    """Return the kernel: one warp, and so one thread block, per query vector."""
    device: Any = numba_cuda.module()

    def hook(name: str, function: Any) -> Any:
        compiled = device.jit(device=True)(function)
        full = with_position(name, compiled, function)
        return compiled if full is compiled else device.jit(device=True)(full)

    logits_transform = hook("logits_transform", transform or no_transform)
    logits_mask = hook("logits_mask", mask_of or no_mask)
    output_transform = hook("output_transform", output or no_transform)

    def attend(
        params, q, k, v, request_of, qo_indptr, starts, mask, mask_starts, factors, out_factors,
        sinks, out, lse, window, chunk, causal, natural
    ):  # fmt: skip
        acc = device.shared.array(0, numba.float64)
        row, h, lane = device.blockIdx.x, device.blockIdx.y, device.threadIdx.x
        D_qk, D_vo = q.shape[2], v.shape[2]
        g = h // (q.shape[1] // k.shape[1])
        request = request_of[row]
        first, kv_len = starts[request], starts[request + 1] - starts[request]
        qo_idx = row - qo_indptr[request]
        here = kv_len - (qo_indptr[request + 1] - qo_indptr[request]) + qo_idx
        low, high = 0, kv_len
        if window >= 0:
            low = max(0, here - window)
        if chunk > 0:
            begin = max(0, here) // chunk * chunk
            low, high = max(low, begin), min(high, begin + chunk)
        if causal != 0:
            high = min(high, here + 1)
        top, total = -math.inf, 0.0
        if sinks.size:
            top, total = numba.float64(sinks[h]), 1.0
        for d in range(lane, D_vo, 32):
            acc[d] = 0.0
        for j in range(low, high):
            if mask.size and not mask[mask_starts[request] + qo_idx * kv_len + j]:
                continue
            if not logits_mask(params, request, qo_idx, j, h, g, here):
                continue
            part = numba.float32(0)
            for d in range(lane, D_qk, 32):
                part += q[row, h, d] * factors[h] * k[first + j, g, d]
            for step in (16, 8, 4, 2, 1):
                part += device.shfl_xor_sync(0xFFFFFFFF, part, step)
            x = logits_transform(params, numba.float64(part), request, qo_idx, j, h, g, here)
            weight = numba.float64(x)
            shrink = 1.0
            if use_softmax:
                if weight == -math.inf:
                    continue
                if not weight <= top:
                    shrink = math.exp(top - weight)
                    total, top = total * shrink, weight
                weight = math.exp(weight - top)
            total += weight
            for d in range(lane, D_vo, 32):
                acc[d] = acc[d] * shrink + weight * v[first + j, g, d]
        factor = 1.0
        if use_softmax and total != 0.0:
            factor = 1.0 / total
        if out_factors.size:
            factor *= out_factors[h]
        for d in range(lane, D_vo, 32):
            out[row, h, d] = output_transform(params, acc[d] * factor, request, qo_idx, h, here)
        if lse.size and lane == 0:
            log = -math.inf
            if total != 0.0:
                log = top + math.log(total)
            lse[row, h] = log if natural != 0 else log * LOG2_E

    return attend
