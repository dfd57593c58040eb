"""Mixture of experts in NumPy float64, token by token."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from nbflow_kernels.activation import reference as activation_reference
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.quantized_matmul import reference as quant_reference


def moe_routing(
    logits: np.ndarray,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: np.ndarray | None = None,
    n_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "max",
    routed_scaling_factor: float = 1.0,
    min_score: float = 0.0,
    mixer_margin: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """See `nbflow_kernels.moe_routing`."""
    T, E = logits.shape
    weights, ids = np.zeros((T, top_k)), np.full((T, top_k), -1, np.int32)
    for t, row in enumerate(logits.astype(np.float64)):
        exps = np.exp(row - row.max())
        scores = 1 / (1 + np.exp(-row)) if scoring == "sigmoid" else exps / exps.sum()
        choice = np.where(row > -np.inf, scores, -np.inf)
        if correction_bias is not None:
            choice = choice + correction_bias
        if n_groups > 1:
            groups = np.sort(choice.reshape(n_groups, -1), axis=1)[:, ::-1]
            values = groups[:, :2].sum(axis=1) if group_score == "top2_sum" else groups[:, 0]
            best = np.argsort(-values, kind="stable")[:top_k_groups]
            kept = np.isin(np.arange(E) // (E // n_groups), best)
            choice = np.where(kept, choice, -np.inf)
        order = np.argsort(-choice, kind="stable")[:top_k]
        if mixer_margin > 0:
            left = choice > -np.inf
            for e in order:
                near = left & (row[e] - row <= mixer_margin * np.maximum(np.abs(row), row[e]))
                scores[e] = 1 / np.exp(row[near] - row[e]).sum() if left[e] else 0.0
                left[e] = False
        good = (choice[order] > -np.inf) & (scores[order] >= min_score)
        ids[t, good] = order[good]
        weights[t, good] = scores[order[good]]
        if renormalize and weights[t].sum() > 0:
            weights[t] /= weights[t].sum()
    return weights * routed_scaling_factor, ids


def moe_permute(ids: np.ndarray, n_experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """See `nbflow_kernels.moe_permute`."""
    flat = ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, n_experts, flat), kind="stable")
    indptr = np.array([0, *np.cumsum([(flat == e).sum() for e in range(n_experts)])], np.int32)
    inverse = np.empty(ids.size, np.int32)
    inverse[order] = np.arange(ids.size)
    inverse[flat < 0] = -1
    rows = (order // max(ids.shape[1], 1)).astype(np.int32)
    return rows, indptr, inverse.reshape(ids.shape)


def _dense(w: Any) -> np.ndarray:
    """Return weights of any kind as float64."""
    if isinstance(w, QuantTensor):
        return quant_reference.weights(w).reshape(w.shape)
    if w.dtype == np.uint16:  # bfloat16 is the upper half of a float32
        w = (w.astype(np.uint32) << 16).view(np.float32)
    dense: np.ndarray = w.astype(np.float64)
    return dense


def _matrices(weights: Any) -> list[np.ndarray]:
    if isinstance(weights, list | tuple):
        return [_dense(w) for w in weights]
    return list(_dense(weights))


def _rounded(x: np.ndarray, weights: Any, e: int, activations: str) -> np.ndarray:
    """Return activations as expert `e` of quantized weights reads them."""
    w = weights if isinstance(weights, QuantTensor) else weights[e]
    if isinstance(w, QuantTensor) and activations == "bf16":
        return quant_reference.to_bf16(x)
    if isinstance(w, QuantTensor) and activations == "int8" and w.format.takes_int8:
        return quant_reference.int8_values(x.astype(np.float32))
    return x


def _experts(weights: Any, activations: str) -> list[np.ndarray]:
    """Return the matrices; "bf16" rounds quantized ones."""
    matrices = _matrices(weights)
    if activations != "bf16":
        return matrices
    stored = [weights] * len(matrices) if isinstance(weights, QuantTensor) else weights
    return [
        quant_reference.to_bf16(dense) if isinstance(w, QuantTensor) else dense
        for w, dense in zip(stored, matrices, strict=True)
    ]


def grouped_matmul(
    x: np.ndarray,
    weights: Any,
    indptr: np.ndarray,
    *,
    rows: Any = None,
    bias: Any = None,
    activations: str = "f32",
) -> np.ndarray:
    """See `nbflow_kernels.grouped_matmul`."""
    x = x if rows is None else x[rows]
    matrices = _experts(weights, activations)
    y = np.zeros((len(x), matrices[0].shape[0]))
    for e, w in enumerate(matrices):
        part = slice(indptr[e], indptr[e + 1])
        y[part] = _rounded(x[part], weights, e, activations) @ w.T + (
            0.0 if bias is None else bias[e]
        )
    return y


def moe_combine(
    y: np.ndarray,
    weights: np.ndarray,
    inverse: np.ndarray,
    *,
    accumulate: bool = False,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """See `nbflow_kernels.moe_combine`."""
    sums = np.zeros((len(weights), y.shape[1]))
    for t, rows in enumerate(inverse):
        for j, row in enumerate(rows):
            if row >= 0:
                sums[t] += weights[t, j] * y[row]
    if out is None:
        return sums
    out[...] = sums + out if accumulate else sums
    return out


def _expert(x: np.ndarray, gate_up: Any, down: Any, up: Any, activate: Any) -> np.ndarray:
    """Return the result of the shared expert for some tokens."""
    both = gate_up if up is None else np.concatenate([gate_up, up])
    result: np.ndarray = activate(x @ both.T) @ down.T
    return result


def _swapped(columns: np.ndarray) -> np.ndarray:
    """Exchange the halves of the columns."""
    return np.roll(columns, columns.shape[-1] // 2, axis=-1)


def fused_moe(
    x: np.ndarray,
    gate_up: Any,
    down: Any,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    *,
    up: Any = None,
    activation: str = "silu",
    gated: bool = True,
    gate_first: bool = True,
    shared: Any = None,
    weigh_inputs: bool = False,
    gate_up_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    down_bias: np.ndarray | None = None,
    activations: str = "f32",
) -> np.ndarray:
    """See `nbflow_kernels.fused_moe`; gate and up have one kind of weights."""
    gates, downs = _experts(gate_up, activations), _experts(down, activations)
    if not gate_first:
        gates = [_swapped(gate.T).T for gate in gates]
        gate_up_bias = None if gate_up_bias is None else _swapped(gate_up_bias)
    ups = [None] * len(gates) if up is None else _experts(up, activations)
    activate: Any = getattr(activation_reference, activation, None)
    if gated:
        activate = partial(activation_reference.glu, activation=activation, gate_first=True)
    out = np.zeros(x.shape)
    if shared is not None:
        up_too = None if shared.up is None else _dense(shared.up)
        out += _expert(x, _dense(shared.gate_up), _dense(shared.down), up_too, activate)
        if shared.gate is not None:
            out *= np.array([[1 / (1 + math.exp(-v))] for v in x @ _dense(shared.gate)])
    for t, (weights, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            if e >= 0:
                first, second, last = (
                    0.0 if b is None else b[e] for b in (gate_up_bias, up_bias, down_bias)
                )
                both = first
                if up is not None:
                    both = np.concatenate(
                        [np.broadcast_to(b, len(gates[e])) for b in (first, second)]
                    )
                biases = both, last
                before, behind = (weight, 1.0) if weigh_inputs else (1.0, weight)
                token = _rounded(before * x[t : t + 1], gate_up, e, activations)
                both_weights = gates[e] if up is None else np.concatenate([gates[e], ups[e]])
                hidden = activate(token @ both_weights.T + biases[0])
                found = _rounded(hidden, down, e, activations)[0] @ downs[e].T + biases[1]
                out[t] += behind * found
    return out
