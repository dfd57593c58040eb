"""Run a program op by op in NumPy float64: slow, plain, and easy to step through.

Keys and values of each layer are growing arrays instead of pages.  The `trace` hook is called after
every op with the op and its result, for debuggers, notebooks and tests.  Programs of one rank only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.executor.expert_bias import expert_biases, moe_arguments
from nbflow.executor.weight_loader import WeightLoader
from nbflow.program.records import (
    COMMUNICATION,
    Op,
    Program,
    StateKey,
    kv_layer,
    mask_of,
    state_key,
)
from nbflow.spec.plugin_ops import OPS
from nbflow_kernels.activation import reference as activation
from nbflow_kernels.activation.xielu import xielu_numbers
from nbflow_kernels.attention import reference as attention
from nbflow_kernels.attention.variants import find_variant
from nbflow_kernels.convolution import reference as convolution
from nbflow_kernels.delta_rule import reference as delta_rule
from nbflow_kernels.formats import QuantTensor
from nbflow_kernels.gating import reference as gating
from nbflow_kernels.hadamard import reference as hadamard
from nbflow_kernels.linear_attention import reference as linear_attention
from nbflow_kernels.logits import reference as logits
from nbflow_kernels.moe import reference as moe
from nbflow_kernels.norm import reference as norm
from nbflow_kernels.position import reference as position
from nbflow_kernels.product_keys import reference as product_keys
from nbflow_kernels.row_statistics import reference as row_statistics
from nbflow_kernels.state_space import reference as state_space

Cache = dict[int, tuple[np.ndarray, np.ndarray]]
"""Keys and values of each layer, (tokens, heads, head_dim)."""


class ReferenceExecutor:
    """Executor of a whole model for one sequence; an op of kind "linear" is run by `_linear`.

    Parameters
    ----------
    program : Program
        Program of one rank, fused or not.
    weights : WeightLoader
        Its weights.
    trace : callable, optional
        Called as ``trace(op, array)`` after every op.
    cross_kv : dict, optional
        Keys and values of the encoder's hidden states by layer, from `encode_cross_kv`.
    cached : callable, optional
        ``cached(rows, side, first)`` returns what the cache holds of new keys (`side` 0) or values
        (1), shape (T, G, D), the first of which is token `first` of the sequence.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightLoader,
        trace: Callable[[Op, np.ndarray], None] | None = None,
        cross_kv: Cache | None = None,
        cached: Callable[[np.ndarray, int, int], np.ndarray] | None = None,
    ) -> None:
        self._program = program
        self._cached = cached
        self._trace = trace
        self._bias = weights.bias
        self._operands = [tuple(map(_as_float64, group)) for group in weights.operands]
        self._cache: Cache = {}
        self._cross_kv = cross_kv or {}
        self._external_rows = np.zeros((0, 0))
        self._index_keys: dict[int, np.ndarray] = {}
        self._states: dict[StateKey, np.ndarray] = {}  # (1, *state)
        self._length = 0
        self._ids = np.zeros(0, np.int64)
        self._types = np.zeros(0, np.int64)

    def logits(self, ids: np.ndarray, token_types: np.ndarray | None = None) -> np.ndarray:
        """Return the logits after each of the next tokens of the sequence.

        Parameters
        ----------
        ids : array of int, shape (T,)
            The tokens that follow those of earlier calls.
        token_types : array of int, shape (T,), optional
            Types of the tokens, 0 by default; for models that have an embedding for them.

        Returns
        -------
        array of float64, shape (T, V)
            The hidden states (T, E) if the model has no head.
        """
        self._types = np.zeros(len(ids), np.int64) if token_types is None else token_types
        values = self._run(ids)
        return values["logits" if "logits" in values else "y"]

    def encode_cross_kv(self, states: np.ndarray) -> Cache:
        """Run the program of `nbflow.program.build_cross_kv` on the encoder's last hidden states.

        Return keys and values for the decoder's executor (`cross_kv`).
        """
        self._external_rows = states
        self._run(np.zeros(len(states), np.int64))
        return self._cache

    def _run(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Run the next tokens; rerun earlier ones if the length changes the rotary angles."""
        before, self._ids = self._ids, np.concatenate([self._ids, ids])
        is_long = self._program.spec.is_long
        if len(before) and is_long(len(self._ids)) and not is_long(len(before)):
            self._length, self._cache, self._states = 0, {}, {}
            self._index_keys = {}
            self._run_ops(before)
        return self._run_ops(ids)

    def _run_ops(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Run all ops and return the buffers."""
        values: dict[str, np.ndarray] = {}
        for index, op in enumerate(self._program.ops):
            if op.kind in COMMUNICATION:
                raise ValueError("the reference executor runs programs of one rank only")
            result = getattr(self, f"_{op.kind}")(op, index, values, ids)
            if result is not None:
                self._write(values, op.out, result)
            if self._trace is not None:
                self._trace(op, values.get(op.out, np.empty(0)))
        self._length += len(ids)
        return values

    def _write(self, values: dict[str, np.ndarray], name: str, result: np.ndarray) -> None:
        """Store a result, and the buffers that are columns of it or of which it is columns."""
        values[name] = result
        own = self._program.buffers.get(name)
        if own is not None and own.base is not None:
            shape = len(result), self._program.buffers[own.base].width
            found = values.get(own.base, np.zeros(shape))
            values[own.base] = whole = found.copy()  # a trace may hold the old one
            whole[:, own.offset : own.offset + own.width] = result
        for part, buffer in self._program.buffers.items():
            if buffer.base == name:
                values[part] = result[:, buffer.offset : buffer.offset + buffer.width]

    def _heads(self, x: np.ndarray, head_dim: int | None = None) -> np.ndarray:
        return x.reshape(len(x), -1, head_dim or self._program.spec.cached_dim)

    def _sequence(self, op: Op, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return state, indptr and row of the state of a step of one sequence."""
        state = self._states.setdefault(state_key(op), np.zeros((1, *op.attrs["state"])))
        return state, np.array([0, len(ids)]), np.zeros(1, np.int64)

    def _embedding(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        table = self._operands[index][0]
        every = {"ids": ids, "positions": self._positions(ids), "types": self._types}
        rows = every[op.attrs.get("index", "ids")]
        result: np.ndarray = table[np.where(rows < op.attrs.get("rows", len(table)), rows, 0)]
        return result * float(op.attrs.get("scale", 1.0))

    def _norm(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x, eps = values[op.inputs[0]], op.attrs["eps"]
        n = op.attrs.get("columns", x.shape[1])
        x, rest = x[:, :n], x[:, n:]
        weights = self._operands[index] or (None,)
        rows = self._heads(x, op.attrs.get("head")) if op.attrs.get("per_head") else x
        if op.attrs["norm"] == "rms":
            offset = op.attrs.get("offset", 0.0)
            result = norm.rmsnorm(rows, weights[0], eps=eps, offset=offset)
        else:
            result = norm.layernorm(rows, *weights, eps=eps)
        return np.concatenate([result.reshape(x.shape), rest], axis=1)

    def _heads_linear(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x = values[op.inputs[0]].reshape(len(ids), -1, op.attrs["head"])
        weights = self._operands[index]
        out = self._heads_of_out(op, values, len(ids), len(weights))
        for h, weight in enumerate(weights):
            out[:, h, : len(weight)] = x[:, h, : weight.shape[1]] @ weight.T
        return out.reshape(len(ids), -1)

    def _heads_of_out(self, op: Op, values: Any, n_tokens: int, n_heads: int) -> np.ndarray:
        """Return a copy of a buffer by heads, for an op that writes some of their columns."""
        shape = n_tokens, n_heads, self._program.buffers[op.out].width // n_heads
        found = values.get(op.out)
        return np.zeros(shape) if found is None else found.reshape(shape).copy()

    def _copy_heads(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x = values[op.inputs[0]].reshape(len(ids), -1, op.attrs["head"])
        out = self._heads_of_out(op, values, *x.shape[:2])
        n = op.attrs["columns"]
        out[..., -n:] = x[..., -n:]
        return out.reshape(len(ids), -1)

    def _linear(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        result = values[op.inputs[0]] @ np.concatenate(self._operands[index]).T
        if self._bias[index] is not None:
            result += self._bias[index]
        if op.attrs.get("accumulate"):
            result += values[op.out]
        return result  # type: ignore[no-any-return]

    def _positions(self, ids: np.ndarray) -> np.ndarray:
        return np.arange(self._length, self._length + len(ids))

    def _rope(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        rope, first = op.attrs["rope"], op.attrs.get("first", 0)
        heads = [self._heads(values[name], op.attrs.get("head")) for name in op.inputs]
        q, *keys = (x[..., first:] for x in heads)
        k = keys[0] if keys else q[:, :0]
        table = position.rope_cos_sin_cache(
            self._length + len(ids),
            rope.dim,
            theta=rope.theta,
            scaling=rope.scaling,
            seq_len=len(self._ids),
        )
        q, k = position.apply_rope_with_cos_sin_cache(
            self._positions(ids), q, k, cos_sin_cache=table, is_neox=rope.style == "half"
        )
        for name, x, rotated in zip(op.inputs, heads, (q, k), strict=False):
            values[name] = np.concatenate([x[..., :first], rotated], axis=2).reshape(len(ids), -1)

    def _clip(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        for name in op.inputs:
            values[name] = gating.clip(values[name], op.attrs["limit"])

    def _hadamard(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        for name in op.inputs:
            values[name] = hadamard.hadamard_transform(values[name], op.attrs["block"])

    def _extend_keys(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        (rate,), (keys, numbers) = self._operands[index], (values[name] for name in op.inputs)
        logs = gating.log_decay(numbers, rate, np.zeros(len(rate)))
        heads = keys.reshape(len(ids), len(rate), -1)
        wide = gating.extend_heads(heads, logs, op.attrs["columns"], exponential=True)
        return wide.reshape(len(ids), -1)

    def _extend_queries(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        queries = self._heads(values[op.inputs[0]])
        numbers = np.full(queries.shape[:2], op.attrs["number"])
        wide = gating.extend_heads(queries, numbers, op.attrs["columns"])
        return wide.reshape(len(ids), -1)

    def _temperature(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        head = self._program.heads_of(op.layer or 0).key_dim
        queries = self._heads(values[op.out], head).copy()
        position.apply_attention_temperature_inplace(self._positions(ids), queries, **op.attrs)
        values[op.out] = queries.reshape(len(ids), -1)

    def _append_kv(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        heads = self._program.heads_of(op.layer or 0)
        dims = heads.key_dim, heads.value_dim
        new = [self._heads(values[n], dim) for n, dim in zip(op.inputs, dims, strict=False)]
        if self._program.spec.latent is not None:
            new.append(new[0][..., : self._program.spec.latent.kv_rank])
        if self._cached is not None:
            new = [self._cached(rows, side, self._length) for side, rows in enumerate(new)]
        old = self._cache.get(op.layer or 0, (new[0][:0], new[1][:0]))
        self._cache[op.layer or 0] = (
            np.concatenate([old[0], new[0]]),
            np.concatenate([old[1], new[1]]),
        )

    def _attention(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        spec = self._program.spec
        k, v = self._cache[kv_layer(op)]
        q = self._heads(values[op.inputs[0]], k.shape[-1])
        if spec.position == "alibi":
            q, k = self._with_slopes(q), _with_positions(k)
        (window, chunk), bias = mask_of(op), None
        if spec.position == "relative":
            by_distance = self._operands[index][0]  # (H, 2 * context - 1)
            query = self._positions(ids)[:, None]
            bias = by_distance[:, np.arange(len(k)) - query + spec.max_context - 1]
        result: np.ndarray = attention.single_prefill_with_kv_cache(
            q,
            k,
            v,
            causal=spec.causal,
            sm_scale=spec.sm_scale,
            window_left=-1 if window is None else window - 1,
            attention_chunk=chunk or 0,
            logits_soft_cap=spec.logits_soft_cap,
            bias=bias,
            sinks=self._bias[index],
            variant=None if spec.attention is None else find_variant(spec.attention, spec.name),
            **self._key_form(op, index, len(k)),
        )
        return result.reshape(len(ids), -1)

    def _key_form(self, op: Op, index: int, n_keys: int) -> dict[str, Any]:
        """Return the arguments of attention over keys that are cached before RoPE."""
        rope = op.attrs.get("key_rope")
        if rope is None:
            return {}
        table = position.rope_cos_sin_cache(
            n_keys, rope.dim, theta=rope.theta, scaling=rope.scaling, seq_len=n_keys
        )
        bias = None
        if op.attrs["key_bias"]:
            D = self._program.heads_of(op.layer or 0).key_dim
            bias = self._operands[index][0][:, :D]
        return {"key_cos_sin": table, "key_interleave": rope.style != "half", "key_bias": bias}

    def _append_index(self, op: Op, index: int, values: Any, ids: np.ndarray) -> None:
        new = values[op.inputs[0]]
        old = self._index_keys.get(op.layer or 0, new[:0])
        self._index_keys[op.layer or 0] = np.concatenate([old, new])

    def _select_keys(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        keys, zeros = self._index_keys[op.layer or 0][None], np.zeros(len(ids), np.int32)
        q, weights = (values[name] for name in op.inputs)
        return attention.select_top_keys(
            self._heads(q, keys.shape[2]), weights, keys, zeros, self._positions(ids),
            np.zeros(1, np.int32), np.array([0, 1]), top_k=self._program.buffers[op.out].width,
        )  # fmt: skip

    def _sparse_attention(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        (k, v), selected = self._cache[op.layer or 0], values[op.inputs[1]]
        visible = (selected[:, :, None] == np.arange(len(k))).any(axis=1)
        result: np.ndarray = attention.single_prefill_with_kv_cache(
            self._heads(values[op.inputs[0]]), k, v, custom_mask=visible,
            sm_scale=self._program.spec.sm_scale,
        )  # fmt: skip
        return result.reshape(len(ids), -1)

    def _cross_attention(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        q = self._heads(values[op.inputs[0]])
        scale = self._program.spec.sm_scale
        result: np.ndarray = attention.single_prefill_with_kv_cache(
            q, *self._cross_kv[op.layer or 0], causal=False, sm_scale=scale
        )
        return result.reshape(len(ids), -1)

    def _input(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return self._external_rows.astype(np.float64)

    def _with_slopes(self, q: np.ndarray) -> np.ndarray:
        """Append the ALiBi slope of each head as a column of the queries.

        The product with keys that end in their position then includes the ALiBi bias.
        """
        spec = self._program.spec
        slopes = position.alibi_slopes(spec.n_heads)
        if not spec.alibi_scaled:
            slopes = slopes / spec.sm_scale
        column = np.broadcast_to(slopes[:, None], (*q.shape[:2], 1))
        return np.concatenate([q, column], axis=2)

    def _activation(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        if op.attrs["activation"] == "xielu":
            alpha_p, alpha_n, beta, eps = xielu_numbers(*self._operands[index])
            return activation.xielu(values[op.inputs[0]], alpha_p, alpha_n, beta=beta, eps=eps)
        function = getattr(activation, op.attrs["activation"])
        return function(values[op.inputs[0]])  # type: ignore[no-any-return]

    def _gate(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        inputs = [values[name] for name in op.inputs]
        if op.out in op.inputs:
            return gating.gated_product(inputs[0], inputs[1], op.attrs["activation"])
        both = np.concatenate(inputs, axis=1)
        return activation.glu(both, op.attrs["activation"], gate_first=True)

    def _conv(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        (weight,), x = self._operands[index], values[op.inputs[0]]
        sequence, activation = self._sequence(op, ids), op.attrs["activation"]
        return convolution.causal_conv1d(x, weight, self._bias[index], *sequence, activation)

    def _sigmoid(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return activation.sigmoid(values[op.inputs[0]]) * float(op.attrs["scale"])

    def _log_decay(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return gating.log_decay(values[op.inputs[0]], *self._operands[index])

    def _delta_rule(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        head = op.attrs["head"]
        q, k = (self._heads(values[name], head) for name in op.inputs[:2])
        v = self._heads(values[op.inputs[2]], op.attrs["state"][-1])
        decay, beta = (values[name] for name in op.inputs[3:])
        if op.attrs["decay"] == "channel":
            decay = self._heads(decay, head)
        sequence = self._sequence(op, ids)
        out = delta_rule.gated_delta_rule(q, k, v, decay, beta, *sequence, normalize_qk=True)
        return out.reshape(len(ids), -1)

    def _lightning(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        q, k, v = (self._heads(values[name], op.attrs["state"][-1]) for name in op.inputs)
        sequence = self._sequence(op, ids)
        out = linear_attention.lightning_attention(q, k, v, op.attrs["slopes"], *sequence)
        return out.reshape(len(ids), -1)

    def _mamba1(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        rate, dt_bias, skip = self._operands[index]
        x, dt, b, c = (values[name] for name in op.inputs)
        sequence = self._sequence(op, ids)
        return state_space.mamba1_scan(x, dt, rate, b, c, *sequence, d=skip, dt_bias=dt_bias)

    def _mamba2(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        rate, dt_bias, skip = self._operands[index]
        _, width, n = op.attrs["state"]
        x, b, c = (values[op.inputs[i]] for i in (0, 2, 3))
        x, b, c = self._heads(x, width), self._heads(b, n), self._heads(c, n)
        dt, sequence = values[op.inputs[1]], self._sequence(op, ids)
        out = state_space.mamba2_scan(
            x, dt, rate, b, c, *sequence, d=skip, dt_bias=dt_bias,
            dt_limits=op.attrs["dt_limits"],
        )  # fmt: skip
        return out.reshape(len(ids), -1)

    def _gated_norm(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x, gate = (values[name] for name in op.inputs)
        return norm.gated_rmsnorm(x, gate, *self._operands[index], **op.attrs)

    def _plugin(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        found, x = OPS[op.attrs["op"]], values[op.inputs[0]]
        weights = dict(zip(found.weights, self._operands[index], strict=True))
        sequence = () if found.state is None else self._sequence(op, ids)
        return np.asarray(found.reference(x, weights, *sequence), np.float64)

    def _experts(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        spec = self._program.spec.moe
        assert spec is not None
        x, router = (values[name] for name in op.inputs)
        bias = expert_biases(op, self._program.spec, self._bias[index])
        weights, chosen = moe.moe_routing(router, correction_bias=bias.choice, **spec.routing)
        if bias.scale is not None:
            weights = weights * bias.scale[chosen]
        arguments = moe_arguments(op, self._operands[index], bias)
        return moe.fused_moe(x, topk_weights=weights, topk_ids=chosen, **arguments)

    def _retrieve(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        (x, scores), (down, up) = (values[name] for name in op.inputs), self._operands[index]
        first, end = op.attrs["experts"]
        weights, chosen = product_keys.product_key_routing(
            scores, op.attrs["top_k"], first=first, n_experts=end - first
        )
        dots = product_keys.gathered_dot(x, down, chosen)
        factors = weights * getattr(activation, op.attrs["activation"])(dots) * (chosen >= 0)
        return np.asarray(np.einsum("tr,tre->te", factors, up[chosen].astype(np.float64)))

    def _scale_rows(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        gate = values[op.inputs[0]] @ self._operands[index][0].reshape(-1)
        return values[op.out] * activation.sigmoid(gate)[:, None]  # type: ignore[no-any-return]

    def _add(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        scale = op.attrs.get("scale", 1.0)
        return values[op.out] + values[op.inputs[0]] * scale  # type: ignore[no-any-return]

    def _scale(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return values[op.inputs[0]] * op.attrs["scale"]  # type: ignore[no-any-return]

    def _scale_columns(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return values[op.inputs[0]] * self._operands[index][0]  # type: ignore[no-any-return]

    def _match_rms(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x, like = (values[name] for name in op.inputs)
        return row_statistics.match_rms(x, like, op.attrs["least"])

    def _mix(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        source, weights = (values[name] for name in op.inputs)
        streams = source.reshape(len(ids), -1, op.attrs["width"])
        factors = weights.reshape(len(ids), -1, streams.shape[1]) + op.attrs.get("offset", 0.0)
        return values[op.out] + (factors @ streams).reshape(len(ids), -1)  # type: ignore[no-any-return]

    def _row_moments(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return row_statistics.row_moments(values[op.inputs[0]])

    def _gaussian_topk(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        x, moments = (values[name] for name in op.inputs)
        return row_statistics.gaussian_topk(x, moments=moments, **op.attrs)

    def _soft_cap(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return logits.soft_cap(values[op.inputs[0]], op.attrs["cap"])

    def _take_rows(self, op: Op, index: int, values: Any, ids: np.ndarray) -> np.ndarray:
        return values[op.inputs[0]]  # type: ignore[no-any-return]


def _with_positions(k: np.ndarray) -> np.ndarray:
    """Append the position of each key as a column."""
    column = np.broadcast_to(np.arange(len(k))[:, None, None], (*k.shape[:2], 1))
    return np.concatenate([k, column], axis=2)


def _as_float64(operand: Any) -> np.ndarray:
    if isinstance(operand, QuantTensor):
        return nk.dequantize(operand).astype(np.float64)
    if operand.dtype == np.uint16:  # bfloat16: the upper half of a float32
        wide: np.ndarray = operand.astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return np.asarray(operand, np.float64)
