"""User-defined variants on the CPU: their functions as hooks of `flash_attention`.

The kernel calls a hook for the scores of a query vector and a chunk of 64 keys, between the dot
products and the softmax, and another for each result.  A hook is a loop around the user's function,
which LLVM inlines and, where the function allows it, vectorizes.  `exp` and `tanh` of the `math`
module and of NumPy are those of `vectorizable_math`, because calls of the C library are made one by
one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba.core import types
from numba.core.errors import NumbaError
from numba.core.extending import intrinsic
from numba.core.imputils import impl_ret_borrowed

from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.attention import plan_layout as at
from nbflow_kernels.attention.cpu.online_softmax import MASKED
from nbflow_kernels.attention.cpu.vectorizable_math import with_vectorizable_math
from nbflow_kernels.attention.plan import AttentionPlan
from nbflow_kernels.attention.variants import (
    AttentionVariant,
    cannot_compile,
    no_mask,
    no_transform,
    with_position,
)
from nbflow_kernels.cpu import interpreter, llvm
from nbflow_kernels.cpu.interpreter.atomics import Hook
from nbflow_kernels.cpu.jit import FAST_MATH
from nbflow_kernels.cpu.simd_memory import (
    address_of,
    read_f32,
    read_i32,
    read_i64,
    write_f32,
    write_i64,
)
from nbflow_kernels.errors import UsageError

_SIGNATURE: Any = types.void(types.int64, types.CPointer(types.float32), *[types.int64] * 7)
"""A hook's parameters: address of its memory (see `_PARAMS`); numbers to change in place and the
range [first, last) of them; key of number 0; request, query row in it, query head, KV head."""
_RANGE_SIGNATURE: Any = types.void(*[types.int64] * 9)
"""Parameters of a mask hook: those of `_SIGNATURE`, with the address of two int64 (the range of
visible keys) in place of the numbers."""
_PARAMS = 32
"""Offset of the parameters in the memory of a hook: the plan's header, and the numbers of the first
query head and of the first KV head, precede them."""
_LENGTH = 1 << 30
"""Bound of array views in hooks; their loops have bounds of their own."""


@dataclass(frozen=True)
class Hooks:
    """Compiled functions of a variant for parameters of some types."""

    scores: Any
    """Hook of the scores, or None: they stay; `output` likewise."""
    output: Any
    visible: Any
    """Hook that finds the first and the last visible key, which saves products with the others."""
    store: Any
    """Function of (params, address) that writes the parameters to memory."""


_HOOKS: dict[tuple[Any, ...], Hooks] = {}


def set_variant(
    plan: AttentionPlan,
    variant: AttentionVariant | None,
    first_heads: tuple[int, int] = (0, 0),
) -> None:
    """Let the kernel use a variant's functions in the plan's next runs, or none.

    `first_heads` are the numbers of the first query head and the first KV head of the arrays, where
    they are a shard of a model's.
    """
    if variant is None:
        if plan.hooks is not None:
            plan.set_hooks(None, (0, 0, 0, 0), no_softmax=False)
        return
    if interpreter.is_on():
        python = _interpreted(plan, variant, first_heads)
        places = [ctypes.cast(hook, ctypes.c_void_p).value or 0 for hook in python]
        plan.set_hooks(python, (*places, 0, 0), no_softmax=not variant.use_softmax)
        return
    for i, value in enumerate(variant.params):
        if is_cuda(value):
            raise UsageError(f"variant.params[{i}] is on a CUDA device, and q in host memory")
    try:
        params = tuple(variant.params)
        kind = numba.typeof(params)
        key = (variant.functions, kind)
        if key not in _HOOKS:
            _HOOKS[key] = _compile(variant, kind)
        hooks = _HOOKS[key]
        # LLVM's structure of a tuple: a few words for a number, and more for an array
        memory = np.zeros(12 + sum(8 + 2 * np.ndim(value) for value in params), np.int64)
        memory[:3] = address_of(plan.header), *first_heads
        if params:
            hooks.store(params, address_of(memory) + _PARAMS)
    except (NumbaError, ValueError) as error:
        raise cannot_compile(error) from error
    made = (hooks.scores, hooks.output, hooks.visible)
    addresses = [0 if hook is None else hook.address for hook in made]
    addresses.append(address_of(memory))
    plan.set_hooks((variant, hooks, memory), addresses, no_softmax=not variant.use_softmax)


def _compile(variant: AttentionVariant, kind: Any) -> Hooks:
    """Compile the hooks of a variant for parameters of a Numba type."""
    options: Any = {"nogil": True, "error_model": "numpy", "boundscheck": False}

    def inner(function: Any) -> Any:
        return numba.njit(forceinline=True, **options)(with_vectorizable_math(function))

    def hook(name: str, default: Any) -> Any:
        function = getattr(variant, name) or default
        compiled = inner(function)
        full = with_position(name, compiled, function)
        return compiled if full is compiled else numba.njit(forceinline=True, **options)(full)

    load, store = _params_in_memory(kind)
    transform = hook("logits_transform", no_transform)
    mask = hook("logits_mask", no_mask)
    output = hook("output_transform", no_transform)
    position_of = numba.njit(forceinline=True, **options)(_position)

    def change_scores(head_at, numbers, first, last, key, request, row, qo_head, kv_head):
        params, position = load(head_at + _PARAMS), position_of(head_at, request, row)
        qo_head, kv_head = qo_head + read_i64(head_at + 8), kv_head + read_i64(head_at + 16)
        scores = numba.carray(numbers, (_LENGTH,))
        for j in range(first, last):
            x = MASKED
            if mask(params, request, row, key + j, qo_head, kv_head, position):
                logit, n = np.float64(scores[j]), key + j
                x = np.float32(
                    transform(params, logit, request, row, n, qo_head, kv_head, position)
                )
            scores[j] = MASKED if x < MASKED else x

    def change_output(head_at, numbers, first, last, key, request, row, qo_head, kv_head):
        params, position = load(head_at + _PARAMS), position_of(head_at, request, row)
        qo_head = qo_head + read_i64(head_at + 8)
        results = numba.carray(numbers, (_LENGTH,))
        for d in range(first, last):
            results[d] = output(params, np.float64(results[d]), request, row, qo_head, position)

    def narrow_range(head_at, ends, first, last, key, request, row, qo_head, kv_head):
        params, position = load(head_at + _PARAMS), position_of(head_at, request, row)
        qo_head, kv_head = qo_head + read_i64(head_at + 8), kv_head + read_i64(head_at + 16)
        low, high = last, first
        for j in range(first, last):
            if mask(params, request, row, key + j, qo_head, kv_head, position):
                low, high = min(low, j), max(high, j + 1)
        write_i64(ends, low)
        write_i64(ends + 8, max(low, high))

    compiled: Any = numba.cfunc(_SIGNATURE, fastmath=FAST_MATH, **options)
    changes_scores = variant.logits_transform is not None or variant.logits_mask is not None
    visible = None
    if variant.logits_mask is not None:
        visible = numba.cfunc(_RANGE_SIGNATURE, **options)(narrow_range)
    return Hooks(
        compiled(change_scores) if changes_scores else None,
        compiled(change_output) if variant.output_transform is not None else None,
        visible,
        store,
    )


def _position(head_at, request, row):
    """Return the position of a query: the index of its own key among the request's keys."""
    header = read_i64(head_at)
    kv_len = read_i32(read_i64(header + 8 * at.KV_LENS) + 4 * request)
    rows = read_i64(header + 8 * at.QO_INDPTR) + 4 * request
    return np.int64(kv_len) - (read_i32(rows + 4) - read_i32(rows)) + row


def _params_in_memory(kind: Any) -> tuple[Any, Any]:
    """Return functions that load the parameters from an address, and that store them there."""
    if not len(kind):
        return numba.njit(_no_params), None

    @intrinsic
    def load(typing_context, address):
        def codegen(context, builder, signature, args):
            value = llvm.load(builder, args[0], context.get_value_type(kind))
            return impl_ret_borrowed(context, builder, kind, value)

        return kind(types.int64), codegen

    @intrinsic
    def write(typing_context, params, address):
        def codegen(context, builder, signature, args):
            llvm.store(builder, args[0], args[1])
            return context.get_dummy_value()

        return types.none(kind, types.int64), codegen

    @numba.njit(types.none(kind, types.int64))
    def store(params, address):
        write(params, address)

    return load, store


def _no_params(address):
    return ()


def _interpreted(
    plan: AttentionPlan, variant: AttentionVariant, first_heads: tuple[int, int]
) -> tuple[Any, Any]:
    """Return the hooks as C functions that call Python."""
    params, (first_q, first_kv) = variant.params, first_heads

    def hook(name: str, default: Any) -> Any:
        function = getattr(variant, name) or default
        return with_position(name, function, function)

    transform, mask = hook("logits_transform", no_transform), hook("logits_mask", no_mask)
    result = hook("output_transform", no_transform)

    def position_of(request, row):
        rows = plan.qo_indptr[request : request + 2]
        return int(plan.kv_lens[request] - (rows[1] - rows[0])) + row

    def change_scores(_, numbers, first, last, key, request, row, qo_head, kv_head):
        for j in range(first, last):
            place, x = numbers + 4 * j, MASKED
            where = request, row, key + j, first_q + qo_head, first_kv + kv_head
            where += (position_of(request, row),)
            if mask(params, *where):
                x = transform(params, float(read_f32(place)), *where)
            write_f32(place, MASKED if x < MASKED else x)

    def change_output(_, numbers, first, last, key, request, row, qo_head, kv_head):
        for d in range(first, last):
            place = numbers + 4 * d
            where = request, row, first_q + qo_head, position_of(request, row)
            write_f32(place, result(params, float(read_f32(place)), *where))

    output = None if variant.output_transform is None else Hook(change_output)
    return Hook(change_scores), output
