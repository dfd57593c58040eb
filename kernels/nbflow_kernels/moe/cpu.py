"""Mixture of experts on the CPU.

The grouped GEMM collects the calls of `matmul` and `qmatmul` for all experts that have rows and
runs them in one parallel region, so the load is balanced however the rows are distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.parallel_for import in_order, not_capturable, parallel_for, together
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cpu as float_cpu
from nbflow_kernels.quantized_matmul import cpu as quant_cpu
from nbflow_kernels.quantized_matmul.int8_activations import ROWS, Int8Rows

_NO_BIAS = np.zeros(0, np.float32)

Matrix = NDArray[Any] | QuantTensor


def routing(
    logits: NDArray[np.float32], bias: NDArray[np.float32] | None, sigmoid: bool,
    renormalize: bool, n_groups: int, top_k_groups: int, top2_sum: bool, scale: float,
    min_score: float, mixer_margin: float, weights: NDArray[np.float32], ids: NDArray[np.int32],
) -> None:  # fmt: skip
    """See `nbflow_kernels.moe_routing`; the weights of an invalid row are NaN."""
    T, E = logits.shape
    parallel_for(
        _routing, T, 10.0 * T * E * (1 + weights.shape[1] / 10),
        logits, _NO_BIAS if bias is None else bias, sigmoid, renormalize, n_groups, top_k_groups,
        top2_sum, scale, min_score, mixer_margin, weights, ids,
    )  # fmt: skip


def permute(
    ids: NDArray[np.int32],
    rows: NDArray[np.int32],
    indptr: NDArray[np.int32],
    inverse: NDArray[np.int32],
) -> None:
    """See `nbflow_kernels.moe_permute`."""
    parallel_for(_permute, 1, 0.0, ids, rows, indptr, inverse)


def multiply(
    x: NDArray[np.float32], rows: Int8Rows | None, w: Matrix, bias: NDArray[np.float32] | None,
    activations: str, out: NDArray[np.float32],
) -> None:  # fmt: skip
    """Launch the product with an expert's matrix; `rows` is `x` in int8, or None."""
    if rows is not None and is_block_quantized(w):
        quant_cpu.matmul_int8(rows, w, bias, False, out)
    else:
        matmul(x, w, bias, out, bf16=activations == "bf16")


def grouped(
    x: NDArray[np.float32],
    matrices: Sequence[Matrix],
    indptr: NDArray[np.int32],
    bias: NDArray[np.float32] | None,
    out: NDArray[np.float32],
    activations: str = "f32",
) -> None:
    """See `nbflow_kernels.grouped_matmul`; `matrices` has one for each segment of `indptr`."""
    not_capturable()  # the calls depend on the values of `indptr`
    edges = indptr.tolist()
    used = [i for i in range(len(matrices)) if edges[i] < edges[i + 1]]
    rows = None
    if activations == "int8" and any(is_block_quantized(matrices[i]) for i in used):
        rows = Int8Rows.empty(len(x) + ROWS, x.shape[1])  # see `Int8Rows.part`
        with in_order():
            quant_cpu.quantize_activations(x, rows)
    with together():
        for i in used:
            part, w = slice(edges[i], edges[i + 1]), matrices[i]
            added = None if bias is None else bias[i]
            if isinstance(w, QuantTensor) and w.column_order is not None:
                with in_order():  # each expert gathers the columns of its own order
                    quant_cpu.qmatmul(x[part], w, added, False, activations, out[part])
            else:
                some = None if rows is None else rows.part(part.start, part.stop)
                multiply(x[part], some, w, added, activations, out[part])
    out[edges[-1] :] = 0.0


def is_block_quantized(w: Matrix) -> TypeGuard[QuantTensor]:
    """Return True for weights that int8 activations can multiply."""
    return isinstance(w, QuantTensor) and w.format.takes_int8


def matmul(
    x: NDArray[np.float32],
    w: Matrix,
    bias: NDArray[np.float32] | None,
    out: NDArray[np.float32],
    *,
    bf16: bool = False,
) -> None:
    """Multiply by a float or quantized matrix; the second rounded to bfloat16 if `bf16`."""
    if isinstance(w, QuantTensor):
        quant_cpu.matmul(x, w, bias, False, out, bf16=bf16)
    else:
        float_cpu.matmul(x, w, bias, False, out)


def combine(
    y: NDArray[np.float32],
    weights: NDArray[np.float32],
    inverse: NDArray[np.int32],
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.moe_combine`."""
    work = float(weights.size * y.shape[1])
    parallel_for(_combine, len(out), work, y, weights, inverse, accumulate, out)


def scale_rows(x: NDArray[np.float32], gate: NDArray[np.float32], y: NDArray[np.float32]) -> None:
    """Multiply row t of `y` by ``sigmoid(x[t] @ gate)``."""
    parallel_for(_scale_rows, len(x), float(x.size + y.size), x, gate, y)


@jit.device_function
def _argmax(values, first, stop):
    """Return the index of the largest value above -inf, the first among equals, or -1."""
    index, largest = -1, -np.inf
    for i in range(first, stop):
        if values[i] > largest:
            index, largest = i, values[i]
    return index


@jit.device_function
def _score(logits, sigmoid, scores):
    """Write the scores of a row; return False if it has a NaN, +inf, or only -inf."""
    top, total = -np.inf, 0.0
    for e in range(len(logits)):
        if logits[e] != logits[e] or logits[e] == np.inf:
            return False
        top = max(top, np.float64(logits[e]))
    if top == -np.inf:
        return False
    for e in range(len(logits)):
        if sigmoid:
            scores[e] = 1.0 / (1.0 + np.exp(-np.float64(logits[e])))
        else:
            scores[e] = np.exp(np.float64(logits[e]) - top)
            total += scores[e]
    if not sigmoid:
        for e in range(len(logits)):
            scores[e] /= total
    return True


@jit.device_function
def _mask_groups(choice, n_groups, top_k_groups, top2_sum, groups):
    """Set the choice scores of experts outside the best groups to -inf."""
    size = len(choice) // n_groups
    for g in range(n_groups):
        best = _argmax(choice, g * size, (g + 1) * size)
        groups[g] = choice[best] if best >= 0 else -np.inf
        if top2_sum and best >= 0:
            groups[g] += max(_max(choice, g * size, best), _max(choice, best + 1, (g + 1) * size))
    for _ in range(top_k_groups):
        g = _argmax(groups, 0, n_groups)
        if g >= 0:
            groups[g] = np.nan  # chosen: NaN compares false
    for e in range(len(choice)):
        if groups[e // size] == groups[e // size]:
            choice[e] = -np.inf


@jit.device_function
def _max(values, first, stop):
    """Return the largest of some values, -inf if there are none."""
    largest = -np.inf
    for i in range(first, stop):
        largest = max(largest, values[i])
    return largest


@jit.device_function
def _mixed_score(logits, choice, e, margin):
    """Return the softmax of expert e among those left whose logits are near its own."""
    largest, total = np.float64(logits[e]), 0.0
    for i in range(len(logits)):
        logit = np.float64(logits[i])
        if choice[i] > -np.inf and largest - logit <= margin * max(abs(logit), largest):
            total += np.exp(logit - largest)
    return 1.0 / total


@jit.kernel
def _routing(
    logits, bias, sigmoid, renormalize, n_groups, top_k_groups, top2_sum, scale, min_score,
    mixer_margin, weights, ids, start, stop
):  # fmt: skip
    E, k = logits.shape[1], weights.shape[1]
    scores, choice, groups = np.empty(E), np.empty(E), np.empty(n_groups)
    for t in range(start, stop):
        if not _score(logits[t], sigmoid, scores):
            weights[t, 0] = np.nan
            continue
        for e in range(E):
            # an expert with logit -inf is excluded, also with a bias
            choice[e] = scores[e] + bias[e] if len(bias) else scores[e]
            if logits[t, e] == -np.inf:
                choice[e] = -np.inf
        if n_groups > 1:
            _mask_groups(choice, n_groups, top_k_groups, top2_sum, groups)
        total = 0.0
        for j in range(k):
            e = _argmax(choice, 0, E)
            ids[t, j], weights[t, j] = -1, 0.0
            if e >= 0:
                if mixer_margin > 0.0:
                    scores[e] = _mixed_score(logits[t], choice, e, mixer_margin)
                choice[e] = -np.inf
                if scores[e] >= min_score:
                    ids[t, j] = e
                    total += scores[e]
        factor = scale / total if renormalize and total > 0.0 else scale
        for j in range(k):
            if ids[t, j] >= 0:
                weights[t, j] = scores[ids[t, j]] * factor


@jit.kernel
def _permute(ids, rows, indptr, inverse, start, stop):
    T, k = ids.shape
    E = len(indptr) - 1
    for e in range(E + 1):
        indptr[e] = 0
    for t in range(T):
        for j in range(k):
            if ids[t, j] >= 0:
                indptr[ids[t, j] + 1] += 1
    for e in range(E):
        indptr[e + 1] += indptr[e]
    unrouted = indptr[E]
    for t in range(T):
        for j in range(k):
            e = ids[t, j]
            if e >= 0:
                # here indptr[e] is the next free row of expert e; shifted back below
                inverse[t, j] = indptr[e]
                rows[indptr[e]] = t
                indptr[e] += 1
            else:
                inverse[t, j] = -1
                rows[unrouted] = t
                unrouted += 1
    for e in range(E, 0, -1):
        indptr[e] = indptr[e - 1]
    indptr[0] = 0


@jit.kernel
def _combine(y, weights, inverse, accumulate, out, start, stop):
    H, y_bytes = y.shape[1], y.strides[0]  # rows may be columns of wider ones
    for t in range(start, stop):
        dst = simd.address(out) + out.strides[0] * t
        for d in range(0, H - 15, 16):
            total = simd.load_f32(dst + 4 * d) if accumulate else simd.splat(0.0)
            for j in range(inverse.shape[1]):
                row = np.int64(inverse[t, j])
                if row >= 0:
                    values = simd.load_f32(simd.address(y) + y_bytes * row + 4 * d)
                    total = simd.fma(simd.splat(weights[t, j]), values, total)
            simd.store_f32(dst + 4 * d, total)
        for d in range(H // 16 * 16, H):
            total_d = out[t, d] if accumulate else np.float32(0.0)
            for j in range(inverse.shape[1]):
                if inverse[t, j] >= 0:
                    total_d += weights[t, j] * y[inverse[t, j], d]
            out[t, d] = total_d


@jit.kernel
def _scale_rows(x, gate, y, start, stop):
    for t in range(start, stop):
        total = 0.0
        for d in range(x.shape[1]):
            total += np.float64(x[t, d]) * np.float64(gate[d])
        factor = np.float32(1.0 / (1.0 + np.exp(-total)))
        for d in range(y.shape[1]):
            y[t, d] *= factor
