"""Attention variants written by the user: plain Python functions inside a compiled kernel.

A variant is any object or class with some of the attributes of `AttentionVariant`.  Its functions
are compiled by Numba together with a kernel that works on one query vector and one key at a time:
ten to twenty times slower than the built-in attention, and a few seconds to compile per process
(not cached on disk: nobody can tell when a user's function changes).  The functions of
`nbflow_kernels.attention.reference` call the same ones from NumPy, to step through them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba.core.errors import NumbaError

from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.flash_attention import copy_row, load_queries
from nbflow_kernels.attention.cpu.online_softmax import F32, copy_floats, sees
from nbflow_kernels.cpu import simd
from nbflow_kernels.cpu.simd_memory import read_f32, read_i32, read_i64, read_word, write_f32
from nbflow_kernels.errors import UsageError

HOOKS = {
    "logits_transform": ("params", "logit", "batch", "qo_idx", "kv_idx", "qo_head", "kv_head"),
    "logits_mask": ("params", "batch", "qo_idx", "kv_idx", "qo_head", "kv_head"),
    "output_transform": ("params", "output", "batch", "qo_idx", "qo_head"),
}
"""The functions of a variant and their parameters."""

LOG2_E = 1.4426950408889634
_KERNELS: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True)
class AttentionVariant:
    """Functions that change what attention computes.

    `batch` is the number of the request, `qo_idx` the number of the row among its query rows,
    `kv_idx` that of the key; `qo_head` and `kv_head` are the heads.  The functions must be such
    that Numba can compile them (numbers, `math`, NumPy arrays).

    Raises
    ------
    UsageError
        When it is used, if a function takes other parameters or cannot be compiled.

    Examples
    --------
    Sigmoid attention: no softmax, each key has a weight of its own.

    >>> import math
    >>> import numpy as np
    >>> from nbflow_kernels import AttentionVariant, single_prefill_with_kv_cache
    >>> def sigmoid(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head):
    ...     return 1.0 / (1.0 + math.exp(-(logit + params[0])))
    >>> variant = AttentionVariant(logits_transform=sigmoid, params=(0.0,), use_softmax=False)
    >>> q, kv = np.zeros((1, 1, 2), np.float32), np.ones((3, 1, 2), np.float32)
    >>> single_prefill_with_kv_cache(q, kv, kv, variant=variant)  # three weights of 1 / 2
    array([[[1.5, 1.5]]], dtype=float32)
    """

    logits_transform: Callable[..., Any] | None = None
    """``(params, logit, batch, qo_idx, kv_idx, qo_head, kv_head) -> float``: the score to use
    instead of `logit`, which is the dot product times `sm_scale`."""
    logits_mask: Callable[..., Any] | None = None
    """``(params, batch, qo_idx, kv_idx, qo_head, kv_head) -> bool``: whether the row sees the key,
    in addition to `causal`, `window_left` and `custom_mask`."""
    output_transform: Callable[..., Any] | None = None
    """``(params, output, batch, qo_idx, qo_head) -> float``: applied to each element of the
    result."""
    params: tuple[Any, ...] = ()
    """Numbers and NumPy arrays for the functions."""
    use_softmax: bool = True
    """Whether scores become weights by softmax; otherwise they are the weights."""


def read_variant(variant: Any) -> AttentionVariant:
    """Return the functions and parameters of any object or class, checked."""
    known = (*HOOKS, "params", "use_softmax")
    found = {name: _attribute(variant, name) for name in known if hasattr(variant, name)}
    if not found:
        raise UsageError(
            f"variant must have one of the attributes {', '.join(known)}, got {variant!r}"
        )
    for name, wanted in HOOKS.items():
        function = found.get(name)
        if function is None:
            continue
        if not inspect.isfunction(function):
            raise UsageError(f"variant.{name} must be a Python function, got {function!r}")
        parameters = tuple(inspect.signature(function).parameters)
        if len(parameters) != len(wanted):
            raise UsageError(
                f"variant.{name} must take ({', '.join(wanted)}), got ({', '.join(parameters)})"
            )
    params = tuple(found.get("params", ()))
    for i, value in enumerate(params):
        if not isinstance(value, int | float | np.number | np.ndarray):
            raise UsageError(
                f"variant.params[{i}] must be a number or a NumPy array, got {type(value).__name__}"
            )
    return AttentionVariant(**{**found, "params": params})


def _attribute(variant: Any, name: str) -> Any:
    """Return an attribute; functions as they were written, not bound to the object."""
    raw = inspect.getattr_static(variant, name)
    if isinstance(raw, staticmethod):
        return raw.__func__
    return raw if inspect.isfunction(raw) else getattr(variant, name)


def run_variant(variant: AttentionVariant, kernel_args: tuple[Any, ...]) -> Callable[..., None]:
    """Return the variant's kernel, compiled for these arguments."""
    key = (
        variant.logits_transform, variant.logits_mask, variant.output_transform,
        variant.use_softmax,
    )  # fmt: skip
    if key not in _KERNELS:
        _KERNELS[key] = _make_kernel(*key)
    kernel: Callable[..., None] = _KERNELS[key]
    try:
        kernel(*kernel_args, 0, 0)  # compiles, and works on nothing
    except NumbaError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UsageError(
            "variant cannot be compiled; its functions may use numbers, math and NumPy arrays: "
            + " ".join(lines[:6])
        ) from error
    return kernel


def _same(params, x, *where):
    return x


def _sees_all(params, batch, qo_idx, kv_idx, qo_head, kv_head):
    return True


def _make_kernel(transform: Any, mask: Any, output: Any, use_softmax: bool) -> Any:
    """Return a kernel over a plan's items with the functions inside; plans must not be split."""
    compile_one = numba.njit(nogil=True, error_model="numpy")
    logits_transform, logits_mask = compile_one(transform or _same), compile_one(mask or _sees_all)
    output_transform = compile_one(output or _same)

    @compile_one
    def add_key(q, key, n):
        total = simd.splat(0.0)
        for d in range(0, 4 * n, 64):
            total = simd.fma(simd.load_f32(q + d), simd.load_f32(key + d), total)
        return simd.sum(total)

    @compile_one
    def attend_one(
        header, params, source, kinds, k, v, strides, request, qo_idx, low, high, h, q, row, acc
    ):
        """Attend from one query vector; return the top score and the sum of weights."""
        g, page_size = (
            h // (read_word(header, at.QO_HEADS) // read_word(header, at.KV_HEADS)),
            read_word(header, at.PAGE_SIZE),
        )
        pages = read_word(header, at.KV_INDICES) + 4 * read_i32(
            read_word(header, at.KV_INDPTR) + 4 * request
        )
        kv_len = read_i32(read_word(header, at.KV_LENS) + 4 * request)
        D_qk, D_vo, index = (
            read_word(header, at.DIM_QK),
            read_word(header, at.DIM_VO),
            np.int64(0),
        )
        wide = (D_qk + 15) // 16 * 16
        if read_word(header, at.MASK) != 0:
            index = read_i64(read_word(header, at.MASK_STARTS) + 8 * request) + qo_idx * kv_len
        top, total = -np.inf, 0.0
        acc[:] = 0.0
        for j in range(low, high):
            if read_word(header, at.MASK) != 0 and not sees(
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
                if not x <= top:
                    shrink = math.exp(top - x)
                    for d in range(D_vo):
                        acc[d] *= shrink
                    total, top = total * shrink, x
                weight = math.exp(x - top)
            total += weight
            copy_row(source, kinds[1], value, D_vo, simd.address(row), (D_vo + 15) // 16 * 16)
            for d in range(D_vo):
                acc[d] += weight * row[d]
        return top, total

    @compile_one
    def kernel(plan, params, source, kinds, q, q_row_bytes, k, v, strides, out, lse, start, stop):
        header = simd.address(plan)
        H = read_word(header, at.QO_HEADS)
        group, D_vo = H // read_word(header, at.KV_HEADS), read_word(header, at.DIM_VO)
        wide = (read_word(header, at.DIM_QK) + 15) // 16 * 16
        vectors = np.empty((read_word(header, at.MOST), wide), np.float32)
        row = np.empty(max(wide, (D_vo + 15) // 16 * 16), np.float32)
        acc = np.empty(D_vo, np.float64)
        done = np.empty(D_vo, np.float32)
        first_item = read_i64(read_word(header, at.SHARES) + 8 * start)
        for item in range(first_item, read_i64(read_word(header, at.SHARES) + 8 * stop)):
            fields = read_word(header, at.ITEMS) + at.ITEM_BYTES * item
            request, first_row = read_i64(fields), read_i64(fields + 8)
            n_rows, g = read_i64(fields + 16), read_i64(fields + 24)
            position, M = read_i64(fields + 32), n_rows * group
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
                qo_idx = (
                    first_row + m // group - read_i32(read_word(header, at.QO_INDPTR) + 4 * request)
                )
                top, total = attend_one(
                    header, params, source, kinds, k, v, strides, request, qo_idx, low, high, h,
                    simd.address(vectors[m]), row, acc,
                )  # fmt: skip
                factor = 1.0 / total if use_softmax and total != 0.0 else 1.0
                if read_word(header, at.OUT_FACTORS) != 0:
                    factor *= read_f32(read_word(header, at.OUT_FACTORS) + 4 * h)
                for d in range(D_vo):
                    done[d] = output_transform(params, acc[d] * factor, request, qo_idx, h)
                place = (first_row + m // group) * H + h
                copy_floats(F32, simd.address(done), D_vo, 1.0, out + 4 * D_vo * place, D_vo)
                if lse != 0:
                    log = top + math.log(total) if total != 0.0 else -np.inf
                    write_f32(
                        lse + 4 * place,
                        log if read_word(header, at.LSE_NATURAL) != 0 else log * LOG2_E,
                    )

    return kernel
