"""The MoE layer: gate, up, activation, down, weighted sum over experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation import cpu as activation_cpu
from nbflow_kernels.activation import cuda as activation_cuda
from nbflow_kernels.activation.swigluoai import swigluoai_numbers
from nbflow_kernels.arrays import check_array, check_together, empty, is_cuda, output_array
from nbflow_kernels.cpu.parallel_for import together
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.moe import cpu, cuda
from nbflow_kernels.moe.grouped_matmul import (
    check_activations,
    check_matrix,
    grouped_matmul,
    list_matrices,
)
from nbflow_kernels.moe.routing import moe_permute


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """An expert that all tokens use.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import SharedExpert
    >>> expert = SharedExpert(np.ones((4, 8), np.float32), np.ones((8, 2), np.float32))
    >>> expert.gate is None
    True
    """

    gate_up: Any
    """Array or QuantTensor (2F, H), the gate's rows first; with `up`, the gate (F, H); the up
    projection (F, H) of an expert without a gate."""
    down: Any
    """Array or QuantTensor (H, F)."""
    up: Any = None
    """Array or QuantTensor (F, H), if it is not part of `gate_up`."""
    gate: Any = None
    """Array of float32 (H,): the result is multiplied by ``sigmoid(gate @ token)`` (Qwen2-MoE)."""

    def to_device(self, like: Any = None) -> SharedExpert:
        """Return the expert on the device of an array, by default CuPy's current device."""
        from nbflow_kernels.cuda import to_device

        def moved(w: Any) -> Any:
            if isinstance(w, QuantTensor):
                return w.to_device(like)
            return w if w is None or is_cuda(w) else to_device(w, like)

        return SharedExpert(*map(moved, (self.gate_up, self.down, self.up, self.gate)))

    def to_host(self) -> SharedExpert:
        """Return the expert in NumPy arrays; the inverse of `to_device`."""
        from nbflow_kernels.cuda import to_host

        def moved(w: Any) -> Any:
            if isinstance(w, QuantTensor):
                return w.to_host()
            return None if w is None else to_host(w)

        return SharedExpert(*map(moved, (self.gate_up, self.down, self.up, self.gate)))


def moe_combine(
    y: NDArray[np.float32],
    weights: NDArray[np.float32],
    inverse: NDArray[np.int32],
    *,
    accumulate: bool = False,
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Weighted sum of the experts' results of each token.

    .. math:: o_t = \sum_j w_{tj} \, y_{\mathrm{inverse}_{tj}}

    Parameters
    ----------
    y : array of float32, shape (P, H)
        Results in order of experts.
    weights : array of float32, shape (T, k)
        Weights of each token's experts.
    inverse : array of int32, shape (T, k)
        Rows of `y`, as from `moe_permute`; -1 is skipped.
    accumulate : bool
        Add to what `out` holds instead of replacing it.
    out : array of float32, shape (T, H), optional
        Where to write the result.

    Returns
    -------
    array of float32, shape (T, H)
        `out` if given, else a new array.

    Raises
    ------
    UsageError
        If a shape or an index does not fit, or `accumulate` is given without `out`.  On a CUDA
        device an index out of range is skipped.
    TypeError
        If an array has another dtype.

    Notes
    -----
    A token's results are added one after the other, in order of j, in float32.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import moe_combine
    >>> y = np.array([[1, 2], [10, 20], [100, 200]], np.float32)
    >>> weights = np.array([[0.5, 0.25], [1, 0]], np.float32)
    >>> moe_combine(y, weights, np.array([[2, 0], [1, -1]], np.int32))
    array([[ 50.25, 100.5 ],
           [ 10.  ,  20.  ]], dtype=float32)
    """
    check_together(y=y, weights=weights, inverse=inverse, out=out)
    check_array("y", y, (None, None))
    check_array("weights", weights, (None, None))
    check_array("inverse", inverse, weights.shape, np.int32)
    if not is_cuda(y) and inverse.size and (inverse.min() < -1 or inverse.max() >= len(y)):
        raise UsageError(f"inverse must lie in -1..{len(y) - 1}, the rows of y")
    if out is not None:
        check_array("out", out, (len(weights), y.shape[1]))
    else:
        out = output_array(y, (len(weights), y.shape[1]), None, accumulate)
    (cuda if is_cuda(y) else cpu).combine(y, weights, inverse, bool(accumulate), out)
    return out


def fused_moe(
    x: NDArray[np.float32],
    gate_up: Any,
    down: Any,
    topk_weights: NDArray[np.float32],
    topk_ids: NDArray[np.int32],
    *,
    up: Any = None,
    activation: str = "silu",
    gated: bool = True,
    gate_first: bool = True,
    shared: SharedExpert | None = None,
    weigh_inputs: bool = False,
    gate_up_bias: NDArray[np.float32] | None = None,
    up_bias: NDArray[np.float32] | None = None,
    down_bias: NDArray[np.float32] | None = None,
    activations: str = "f32",
    out: NDArray[np.float32] | None = None,
) -> Any:
    r"""Run a feed-forward layer of experts.

    .. math:: o_t = \sum_j w_{tj} D_e \bigl(a(G_e x_t) \odot U_e x_t\bigr), \quad e = e_{tj}

    and, with biases, :math:`G_e x_t + b_e` for :math:`G_e x_t`, for the other products alike.  With
    `weigh_inputs`, the weight :math:`w_{tj}` multiplies :math:`x_t` instead.  Experts that are not
    `gated` compute :math:`D_e a(U_e x_t)`.

    Parameters
    ----------
    x : array of float32, shape (T, H)
        Tokens.
    gate_up : array, QuantTensor or sequence of them
        Gate and up projection of each expert, (E, 2F, H) with the gate's rows first (see
        `gate_first`), in any form that `grouped_matmul` takes; the gate alone, (E, F, H), if `up`
        is given; the up projection, (E, F, H), of experts that are not `gated`.
    down : array, QuantTensor or sequence of them
        Down projection of each expert, (E, H, F).
    topk_weights : array of float32, shape (T, k)
        Weights of each token's experts, as from `moe_routing`.
    topk_ids : array of int32, shape (T, k)
        Experts of each token; -1 is skipped.
    up : array, QuantTensor or sequence of them, optional
        Up projection of each expert, (E, F, H), if it is stored by itself.
    activation : str
        As in the ops ``..._and_mul``: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"``, ...;
        ``"swigluoai"`` with the numbers of gpt-oss, gate and up not interleaved, or
        ``"swigluoai:4.5:1.5"`` with another limit and alpha.  Without gates one of ``"silu"``,
        ..., ``"relu2"``.
    gated : bool
        False for experts, the shared one included, without a gate (Nemotron 3): `gate_up` is then
        the up projection, and `up` must be absent.
    gate_first : bool
        The gate's rows of `gate_up` and its bias come first; False if those of the up projection
        do, as in FlashInfer's and TensorRT-LLM's ``w3_w1``.
    shared : SharedExpert, optional
        An expert of all tokens, gate first; its result is added.
    weigh_inputs : bool
        Multiply the experts' inputs by `topk_weights`, not their outputs (Llama 4).
    gate_up_bias : array of float32, shape (E, 2F), optional
        Biases of `gate_up`; (E, F) if `up` is given, or without gates.
    up_bias : array of float32, shape (E, F), optional
        Biases of `up`.
    down_bias : array of float32, shape (E, H), optional
        Biases of the down projections.
    activations : {"f32", "bf16", "int8"}
        Arithmetic of quantized experts, as of `grouped_matmul`; the shared expert has float32's.
    out : array of float32, shape (T, H), optional
        Where to write the result; it must not overlap `x`.

    Returns
    -------
    array of float32, shape (T, H)
        `out` if given, else a new array.

    Raises
    ------
    UsageError
        If shapes do not fit, an id is out of range, or `activations` is unknown.
    TypeError
        If an array has another dtype.

    See Also
    --------
    nbflow_kernels.moe_routing : Computes weights and ids.
    nbflow_kernels.grouped_matmul : The grouped GEMM.

    Notes
    -----
    A token's result does not depend on the other tokens, bit for bit: products are batch-invariant,
    and its experts are added in the order of `topk_ids`, after the shared one.

    Examples
    --------
    Two experts with one hidden unit: both gates are relu(x0), the first doubles x1, the second
    triples it.

    >>> import numpy as np
    >>> from nbflow_kernels import fused_moe
    >>> gate_up = np.array([[[1, 0], [0, 2]], [[1, 0], [0, 3]]], np.float32)  # (2, 2 * 1, 2)
    >>> down = np.ones((2, 2, 1), np.float32)
    >>> x = np.array([[1.0, 1.0]], np.float32)
    >>> weights, ids = np.array([[0.5, 0.5]], np.float32), np.array([[0, 1]], np.int32)
    >>> fused_moe(x, gate_up, down, weights, ids, activation="relu")
    array([[2.5, 2.5]], dtype=float32)
    """
    check_array("x", x, (None, None))
    check_activations(activations)
    check_together(x=x, topk_weights=topk_weights, topk_ids=topk_ids, out=out)
    T, H = x.shape
    check_array("topk_weights", topk_weights, (T, None))
    check_array("topk_ids", topk_ids, topk_weights.shape, np.int32)
    _check_order(up, gated, gate_first, shared)
    act = _activation(activation, x, gated, gate_first)
    gates, ups, downs, F = _list_experts(gate_up, up, down, H, gated)
    if up_bias is not None and up is None:
        raise UsageError("up_bias goes with up; without it gate_up_bias has the biases of both")
    check_together(x=x, gate_up_bias=gate_up_bias, up_bias=up_bias, down_bias=down_bias)
    widths = {"gate_up_bias": gates[0].shape[0], "up_bias": F, "down_bias": H}
    given = (gate_up_bias, up_bias, down_bias)
    for (name, width), bias in zip(widths.items(), given, strict=True):
        if bias is not None:
            check_array(name, bias, (len(gates), width))
    out = output_array(x, (T, H), out)
    routed, ids = x, topk_ids
    if weigh_inputs:  # each pair of token and expert has an input of its own
        routed, ids = _weighed(x, topk_weights), topk_ids.reshape(-1, 1)
        topk_weights = _filled(topk_weights, 1.0)
    rows, indptr, inverse = moe_permute(ids, len(gates))
    inverse = inverse.reshape(topk_ids.shape)
    hidden = empty(x, (len(rows), F))
    biases = gate_up_bias, up_bias
    if is_cuda(x):
        act(_projections_cuda(routed, gate_up, up, indptr, rows, biases, activations), hidden)
        y = grouped_matmul(hidden, down, indptr, bias=down_bias, activations=activations)
    else:  # with the lists, which are checked
        act(_projections(routed[rows], gates, ups, indptr, biases, activations), hidden)
        y = np.empty((len(rows), H), np.float32)
        cpu.grouped(hidden, downs, indptr, down_bias, y, activations)
    if shared is not None:
        _run_shared(x, shared, _activation(activation, x, gated, True), gated, out)
    _device(x).combine(y, topk_weights, inverse, shared is not None, out)
    return out


def _list_experts(
    gate_up: Any, up: Any, down: Any, H: int, gated: bool
) -> tuple[Any, Any, Any, int]:
    """Return the checked matrices of each expert (gate, up, down), and their hidden size."""
    gates = list_matrices("gate_up", gate_up, H)[0]
    ups = None if up is None else list_matrices("up", up, H)[0]
    F = gates[0].shape[0]
    F = F if up is not None or not gated else _half("gate_up", F)
    downs, n_out = list_matrices("down", down, F)
    counts = {len(gates), len(downs), len(gates if ups is None else ups)}
    if len(counts) > 1 or n_out != H or (ups is not None and ups[0].shape[0] != F):
        raise UsageError(
            f"gate_up, up and down must be of the same experts, down (E, {H}, {F}); got "
            f"{sorted(counts)} experts and a down projection to {n_out} columns"
        )
    return gates, ups, downs, F


def _check_order(up: Any, gated: bool, gate_first: bool, shared: SharedExpert | None) -> None:
    """Raise for an order of gate and up projection that experts do not have."""
    if up is not None and not gate_first:
        raise UsageError("gate_first=False is the order within gate_up; up is given by itself")
    if not gated and not gate_first:
        raise UsageError("gate_first=False needs gated experts, got gated=False")
    if not gated and (up is not None or (shared is not None and shared.up is not None)):
        raise UsageError(
            "experts without a gate (gated=False) have their up projection as gate_up; leave up out"
        )


def _weighed(x: Any, weights: Any) -> Any:
    """Return the tokens times each of their weights, (T * k, H)."""
    T, k = weights.shape
    out = empty(x, (T * k, x.shape[1]))
    tokens: Any = np.repeat(np.arange(T, dtype=np.int32), k)[:, None]
    if is_cuda(x):
        from nbflow_kernels.cuda import to_device

        tokens = to_device(tokens, x)
    _device(x).combine(x, weights.reshape(-1, 1), tokens, False, out)
    return out


def _filled(like: Any, value: float) -> Any:
    """Return an array of the same shape and device that holds one value."""
    out = empty(like, like.shape)
    out[...] = value
    return out


def _device(x):
    """Return the module for the device of an array."""
    return cuda if is_cuda(x) else cpu


def _projections(
    x: Any, gates: Any, ups: Any, indptr: Any, biases: tuple[Any, Any], activations: str
) -> Any:
    """Return gate and up projections concatenated, (P, 2F), of rows in order of experts."""
    outs = []
    with together():
        for matrices, bias in zip((gates, ups), biases, strict=True):
            if matrices is not None:
                outs.append(np.empty((len(x), matrices[0].shape[0]), np.float32))
                cpu.grouped(x, matrices, indptr, bias, outs[-1], activations)
    return outs[0] if ups is None else np.concatenate(outs, axis=1)


def _projections_cuda(
    x: Any, gates: Any, ups: Any, indptr: Any, rows: Any, biases: tuple[Any, Any], activations: str
) -> Any:
    """Return gate and up projections concatenated, (P, 2F), or those of `gates` alone."""
    of_gate, of_up = biases
    if ups is None:
        return grouped_matmul(x, gates, indptr, rows=rows, bias=of_gate, activations=activations)
    F = list_matrices("gate_up", gates, x.shape[1])[1]
    both = empty(x, (len(rows), 2 * F))
    cuda.grouped(x, gates, indptr, of_gate, both[:, :F], rows, activations)
    cuda.grouped(x, ups, indptr, of_up, both[:, F:], rows, activations)
    return both


def _run_shared(x: Any, shared: SharedExpert, act: Any, gated: bool, out: Any) -> None:
    """Write the result of the shared expert to `out`."""
    T, H = x.shape
    check_matrix("shared.gate_up", shared.gate_up, None, H)
    F = shared.gate_up.shape[0]
    F = F if shared.up is not None or not gated else _half("shared.gate_up", F)
    check_matrix("shared.down", shared.down, H, F)
    if shared.up is not None:
        check_matrix("shared.up", shared.up, F, H)
    hidden = empty(x, (T, F))
    act(_shared_projections(x, shared, F, gated), hidden)
    _device(x).matmul(hidden, shared.down, None, out)
    if shared.gate is not None:
        check_array("shared.gate", shared.gate, (H,))
        _device(x).scale_rows(x, shared.gate, out)


def _shared_projections(x: Any, shared: SharedExpert, F: int, gated: bool) -> Any:
    """Return gate and up projections of the shared expert concatenated, (T, 2F) or (T, F)."""
    both = empty(x, (len(x), 2 * F if gated else F))
    if shared.up is None:
        _device(x).matmul(x, shared.gate_up, None, both)
        return both
    halves = [empty(x, (len(x), F)) for _ in range(2)]
    for w, half, column in zip((shared.gate_up, shared.up), halves, (0, F), strict=True):
        _device(x).matmul(x, w, None, half)
        both[:, column : column + F] = half
    return both


def _activation(name: str, x: Any, gated: bool, gate_first: bool) -> Any:
    """Return the launcher of an activation, of gate and up projection or of the latter alone."""
    kernels = activation_cuda if is_cuda(x) else activation_cpu
    if not gated:
        if name not in activation_cpu.ACTIVATIONS:
            raise unknown_name("activation", name, activation_cpu.ACTIVATIONS)
        return lambda up, hidden: kernels.elementwise(up, name, hidden)
    if name not in activation_cpu.GATED and swigluoai_numbers(name) is None:
        raise unknown_name("activation", name, activation_cpu.GATED)
    return lambda both, hidden: kernels.glu(both, name, gate_first, hidden)


def _half(name: str, n: int) -> int:
    """Return half of the rows of a matrix of gate and up."""
    if n % 2:
        raise UsageError(f"{name} must have an even number of rows, gate and up, got {n}")
    return n // 2
