"""Cost model of a step: bytes read, operations, and bytes sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from nbflow.distributed.quantized_all_reduce import q8_packed_bytes
from nbflow.program.records import Mask, Op, Program, mask_of, state_of
from nbflow.spec.kv_formats import parse_kv

FLOAT32_BYTES = 4

Bits = Callable[[str], float]
"""Tensor name -> bits per weight."""


@dataclass(frozen=True)
class StepShape:
    """Size of a step of equal sequences."""

    n_sequences: int
    n_new: int
    """New tokens of each."""
    context: int
    """Tokens of each, new ones included."""
    n_logits: int
    encoder_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens in the step."""
        return self.n_sequences * self.n_new

    def keys(self, mask: Mask) -> int:
        """Return the keys that attention of one layer reads."""
        (window, chunk), first = mask, self.context - self.n_new
        visible = self.context if window is None else min(self.context, window + self.n_new - 1)
        if chunk is not None:
            visible = min(visible, self.context - first // chunk * chunk)
        return self.n_sequences * visible

    def pairs(self, mask: Mask, causal: bool = True) -> int:
        """Return the query-key pairs of one layer; those of a chunk, if there is one."""
        window, chunk = mask
        if not causal:
            return self.n_sequences * self.n_new * self.context
        if chunk is not None:
            ends = (self.context, self.context - self.n_new)
            of_all, of_old = (
                n // chunk * chunk * (chunk + 1) // 2 + n % chunk * (n % chunk + 1) // 2
                for n in ends
            )
            return self.n_sequences * (of_all - of_old)
        first, last = self.context - self.n_new + 1, self.context  # visible keys of each query
        whole = self.n_new if window is None else max(0, min(last, window) - first + 1)
        total = whole * (2 * first + whole - 1) // 2
        return self.n_sequences * (total + (self.n_new - whole) * (window or 0))


@dataclass(frozen=True)
class OpCost:
    """Cost of one op."""

    weight_bytes: float = 0.0
    weights: float = 0.0
    kv_bytes: float = 0.0
    """Bytes of keys and values, and of recurrent states, read and written."""
    buffer_bytes: float = 0.0
    """Bytes of activations read and written."""
    operations: float = 0.0
    """Operations with weights; a multiply-add counts as two."""
    attention_operations: float = 0.0
    """Operations of QK and PV products, and of recurrences."""


def op_cost(program: Program, op: Op, step: StepShape, bits: Bits, kv: str) -> OpCost:
    """Return the cost of one op in one step."""
    moved = sum(
        program.buffers[name].width * _rows(program, name, step)
        for name in (op.out, *op.inputs)
        if name in program.buffers
    )
    buffer_bytes = float(moved * FLOAT32_BYTES)
    if op.kind == "embedding":  # reads one row per token
        width = program.buffers[op.out].width
        n = step.n_tokens * width
        read = sum(n * bits(w.name) / 8 for w in op.weights[:1])
        return OpCost(weight_bytes=read, buffer_bytes=buffer_bytes)
    if op.kind == "select_keys":
        return _selection_cost(program, step, buffer_bytes)
    if op.kind in ("append_kv", "attention", "sparse_attention", "cross_attention"):
        return _attention_cost(program, op, step, kv, buffer_bytes)
    n_bytes, n_weights, per_row = _weights_read(program, op, step, bits)
    if "state" in op.attrs:
        size = math.prod(op.attrs["state"])
        # a delta rule decays its state, multiplies it by key and query, and adds a product;
        # Mamba multiplies it by one vector
        scans = {
            "lightning": 5 * size,
            "delta_rule": 7 * size,
            "mamba1": 5 * size,
            "mamba2": 5 * size,
        }
        per_token = scans.get(op.kind, 2 * n_weights)
        moved_states = 2.0 * step.n_sequences * state_of(op, program.spec).n_bytes
        return OpCost(
            n_bytes, n_weights, moved_states, buffer_bytes, 0.0, per_token * step.n_tokens
        )
    rows = _rows(program, op.out, step)
    return OpCost(n_bytes, n_weights, 0.0, buffer_bytes, 2.0 * per_row * rows)


def _rows(program: Program, name: str, step: StepShape) -> int:
    buffer = program.buffers.get(name)
    if buffer is None:
        return step.n_tokens
    return buffer.n_rows(step.n_tokens, step.n_logits, step.n_logits)


def _weights_read(
    program: Program, op: Op, step: StepShape, bits: Bits
) -> tuple[float, float, float]:
    """Return bytes and number of the weights that an op reads, and weights per row multiplied."""
    spec = program.spec
    sizes = [(w.name, math.prod(w.shape(spec.shape_of(w.name)))) for w in op.weights]
    n_bytes = sum(n * bits(name) / 8 for name, n in sizes)
    n_weights = sum(n for _, n in sizes)
    if op.kind == "experts":
        assert spec.moe is not None
        chosen = spec.moe.top_k / spec.moe.n_experts
        read = 1.0 - (1.0 - chosen) ** step.n_tokens  # expected share of active experts
        return n_bytes * read, n_weights * read, n_weights * chosen
    if op.kind == "retrieve":  # two rows for each of the chosen experts
        chosen = min(1.0, op.attrs["top_k"] / max(1, spec.retrieved_experts))
        read = 1.0 - (1.0 - chosen) ** step.n_tokens
        return n_weights * read * FLOAT32_BYTES, n_weights * read, n_weights * chosen
    multiplied = op.kind in ("linear", "heads_linear")
    return n_bytes, float(n_weights), float(n_weights) if multiplied else 0.0


def kv_layer_bytes(program: Program, kv: str, layer: int) -> int:
    """Return the KV cache bytes per token of one layer of a rank."""
    spec, heads = program.spec, program.heads_of(layer)
    keys, values = parse_kv(kv).of(layer, spec.n_layers)
    of_head = keys.row_bytes(heads.key_dim)
    of_head += values.row_bytes(heads.value_dim) if spec.latent is None else 0
    index = 0 if spec.indexer is None else FLOAT32_BYTES * spec.indexer.dim
    return heads.n_kv_heads * of_head + index


def kv_token_bytes(program: Program, kv: str) -> int:
    """Return the KV cache bytes per token of all layers of a rank."""
    parse_kv(kv).check(program.spec.n_layers)
    return sum(kv_layer_bytes(program, kv, layer) for layer in program.kv_layers)


def state_row_bytes(program: Program) -> int:
    """Return the bytes of a rank's recurrent states of one sequence."""
    return sum(state.n_bytes for state in program.states.values())


def _attention_cost(
    program: Program, op: Op, step: StepShape, kv: str, buffer_bytes: float
) -> OpCost:
    """Return the cost of reading or writing keys and values."""
    token_bytes = kv_layer_bytes(program, kv, op.layer or 0)
    if op.kind == "append_kv":
        return OpCost(kv_bytes=token_bytes * step.n_tokens, buffer_bytes=buffer_bytes)
    spec = program.spec
    if op.kind == "sparse_attention":
        assert spec.indexer is not None
        assert spec.latent is not None
        n = step.n_tokens * min(step.context, spec.indexer.top_k)
        latent = token_bytes - FLOAT32_BYTES * spec.indexer.dim
        per_key = 2 * program.n_heads * (spec.cached_dim + spec.latent.kv_rank)
        return OpCost(
            kv_bytes=latent * n, buffer_bytes=buffer_bytes, attention_operations=float(per_key * n)
        )
    mask = mask_of(op)
    causal = spec.causal
    if op.kind == "cross_attention":
        step, causal = dataclasses.replace(step, context=step.encoder_tokens), False
    heads = program.heads_of(op.layer or 0)
    per_pair = (
        2 * program.n_heads * (heads.key_dim + heads.value_dim)
    )  # QK and PV, multiply and add
    return OpCost(
        kv_bytes=token_bytes * step.keys(mask),
        buffer_bytes=buffer_bytes,
        attention_operations=float(per_pair * step.pairs(mask, causal)),
    )


def _selection_cost(program: Program, step: StepShape, buffer_bytes: float) -> OpCost:
    """Return the cost of the index scores of all keys."""
    indexer = program.spec.indexer
    assert indexer is not None
    everything = (None, None)
    return OpCost(
        kv_bytes=FLOAT32_BYTES * indexer.dim * step.keys(everything),
        buffer_bytes=buffer_bytes,
        attention_operations=2.0 * indexer.heads * indexer.dim * step.pairs(everything),
    )


def workspace_bytes(
    program: Program, n_tokens: int, n_logits: int, n_states: int | None = None
) -> int:
    """Return the bytes of the buffers of a step; `n_states` is `n_logits` by default."""
    n_states = n_logits if n_states is None else n_states
    return FLOAT32_BYTES * sum(
        buffer.width * buffer.n_rows(n_tokens, n_states, n_logits)
        for buffer in program.buffers.values()
        if buffer.base is None
    )


def bytes_sent(program: Program, rank: int, n_tokens: int, n_logits: int) -> int:
    """Return the payload bytes that a rank sends in a step; a message to k ranks counts k times."""
    return sum(op_bytes_sent(program, op, rank, n_tokens, n_logits) for op in program.ops)


def sends_q8(op: Op) -> bool:
    """Return True for communication that quantizes its payload to q8."""
    return bool(op.attrs.get("all_reduce") == "q8")


def op_bytes_sent(program: Program, op: Op, rank: int, n_tokens: int, n_logits: int) -> int:
    """Return the payload bytes that one op sends."""
    if op.kind not in ("all_reduce", "all_gather", "send"):
        return 0
    source = program.buffers[op.inputs[0] if op.inputs else op.out]
    size = source.width * source.n_rows(n_tokens, n_logits, n_logits)
    payload = q8_packed_bytes(size) if sends_q8(op) else size * FLOAT32_BYTES
    peers = op.attrs["peers"] if op.kind == "send" else [r for r in op.attrs["ranks"] if r != rank]
    return payload * len(peers)
