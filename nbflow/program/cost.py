"""What a step of a program costs: bytes read, operations, and the bytes its rank sends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from nbflow.distributed.quantized_all_reduce import q8_packed_bytes
from nbflow.program.records import COMMUNICATION, Op, Program
from nbflow_kernels.kv_cache.formats import kv_formats

FLOAT32_BYTES = 4

Bits = Callable[[str], float]
"""Our tensor name -> the bits that one of its weights takes."""


@dataclass(frozen=True)
class StepShape:
    """The size of a step of equal sequences."""

    n_sequences: int
    """Sequences in the step."""
    n_new: int
    """New tokens of each."""
    context: int
    """Tokens of each, the new ones counted in."""
    n_logits: int
    """Rows whose logits are wanted."""
    memory: int = 0
    """Tokens of the encoder's that each sequence sees."""

    @property
    def n_tokens(self) -> int:
        """Tokens in the step."""
        return self.n_sequences * self.n_new

    def keys(self, window: int | None) -> int:
        """Return the keys that the attention of one layer reads."""
        seen = self.context if window is None else min(self.context, window + self.n_new - 1)
        return self.n_sequences * seen

    def pairs(self, window: int | None, causal: bool = True) -> int:
        """Return the pairs of a query and a key that it sees, in one layer."""
        if not causal:
            return self.n_sequences * self.n_new * self.context
        first, last = self.context - self.n_new + 1, self.context  # keys that each query sees
        whole = self.n_new if window is None else max(0, min(last, window) - first + 1)
        total = whole * (2 * first + whole - 1) // 2
        return self.n_sequences * (total + (self.n_new - whole) * (window or 0))


@dataclass(frozen=True)
class OpCost:
    """What one op costs."""

    weight_bytes: float = 0.0
    """Weights read."""
    weights: float = 0.0
    """How many weights these are."""
    kv_bytes: float = 0.0
    """Keys and values read and written."""
    buffer_bytes: float = 0.0
    """Activations read and written."""
    operations: float = 0.0
    """Multiplications and additions with weights, each counted as one."""
    attention_operations: float = 0.0
    """Those of queries with keys and of probabilities with values."""
    sent_bytes: int = 0
    """Payload sent; a message to each of k ranks counts k times."""


def op_cost(program: Program, op: Op, rank: int, step: StepShape, bits: Bits, kv: str) -> OpCost:
    """Return what an op of a rank's program costs in one step.

    Parameters
    ----------
    program : Program
        Program of the rank.
    op : Op
        One of its ops.
    rank : int
        The rank's number.
    step : StepShape
        The step.
    bits : callable
        Gives the bits per weight of a tensor.
    kv : str
        Element format of the key/value cache.
    """
    moved = sum(
        program.buffers[name].width * _rows(program, name, step)
        for name in (op.out, *op.inputs)
        if name in program.buffers
    )
    buffer_bytes = float(moved * FLOAT32_BYTES)
    if op.kind in COMMUNICATION:
        sent = op_bytes_sent(program, op, rank, step.n_tokens, step.n_logits)
        return OpCost(buffer_bytes=buffer_bytes, sent_bytes=sent)
    if op.kind == "embedding":  # one row per token
        width = program.buffers[op.out].width
        n = step.n_tokens * width
        read = sum(n * bits(w.name) / 8 for w in op.weights[:1])
        return OpCost(weight_bytes=read, buffer_bytes=buffer_bytes)
    if op.kind in ("append_kv", "attention", "cross_attention"):
        return _attention_cost(program, op, step, kv, buffer_bytes)
    n_bytes, n_weights, per_row = _weights_read(program, op, step, bits)
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
    """Return bytes and number of the weights an op reads, and how many a row is multiplied with."""
    spec = program.spec
    sizes = [(w.name, math.prod(w.shape(spec.shape_of(w.name)))) for w in op.weights]
    n_bytes = sum(n * bits(name) / 8 for name, n in sizes)
    n_weights = sum(n for _, n in sizes)
    if op.kind == "experts":
        assert spec.moe is not None
        chosen = spec.moe.top_k / spec.moe.n_experts
        read = 1.0 - (1.0 - chosen) ** step.n_tokens  # share of the experts that any token needs
        return n_bytes * read, n_weights * read, n_weights * chosen
    multiplied = op.kind in ("linear", "heads_linear")
    return n_bytes, float(n_weights), float(n_weights) if multiplied else 0.0


def kv_token_bytes(program: Program, kv: str) -> int:
    """Return the bytes that one layer of a rank keeps for one token."""
    spec = program.spec
    formats = kv_formats(kv)[: 2 if spec.latent is None else 1]
    return program.n_kv_heads * sum(f.row_bytes(spec.cached_dim) for f in formats)


def _attention_cost(
    program: Program, op: Op, step: StepShape, kv: str, buffer_bytes: float
) -> OpCost:
    """Return the cost of reading or writing keys and values."""
    token_bytes = kv_token_bytes(program, kv)
    if op.kind == "append_kv":
        return OpCost(kv_bytes=token_bytes * step.n_tokens, buffer_bytes=buffer_bytes)
    window = op.attrs.get("window")
    spec = program.spec
    causal = spec.causal
    if op.kind == "cross_attention":
        step, causal = dataclasses.replace(step, context=step.memory), False
    value_dim = spec.head_dim if spec.latent is None else spec.latent.kv_rank
    per_pair = 2 * program.n_heads * (spec.cached_dim + value_dim)  # q.k and p.v, times and plus
    return OpCost(
        kv_bytes=token_bytes * step.keys(window),
        buffer_bytes=buffer_bytes,
        attention_operations=float(per_pair * step.pairs(window, causal)),
    )


def held_bytes(program: Program, bits: Bits) -> int:
    """Return the bytes of a rank's weights; what two ops use (a tied head) counts once."""
    spec = program.spec
    operands = {w for op in program.ops for w in (*op.weights, *op.bias)}
    sizes = ((w.name, math.prod(w.shape(spec.shape_of(w.name)))) for w in operands)
    return math.ceil(sum(n * bits(name) / 8 for name, n in sizes))


def workspace_bytes(
    program: Program, n_tokens: int, n_logits: int, n_states: int | None = None
) -> int:
    """Return the bytes of the buffers of a step; without `n_states`, all of them have logits."""
    n_states = n_logits if n_states is None else n_states
    return FLOAT32_BYTES * sum(
        buffer.width * buffer.n_rows(n_tokens, n_states, n_logits)
        for buffer in program.buffers.values()
        if buffer.base is None
    )


def bytes_sent(program: Program, rank: int, n_tokens: int, n_logits: int) -> int:
    """Return the bytes that the program's rank sends in one step.

    Parameters
    ----------
    program : Program
        Program of the rank.
    rank : int
        The rank's number.
    n_tokens : int
        Tokens in the step.
    n_logits : int
        Rows whose logits are wanted.

    Returns
    -------
    int
        Payload bytes; a message to each of k ranks counts k times.
    """
    return sum(op_bytes_sent(program, op, rank, n_tokens, n_logits) for op in program.ops)


def is_rounded(op: Op) -> bool:
    """Return whether an exchange sends bytes instead of float32."""
    return bool(op.attrs.get("exchange") == "q8")


def op_bytes_sent(program: Program, op: Op, rank: int, n_tokens: int, n_logits: int) -> int:
    """Return the bytes that one op sends; 0 for those that do not."""
    if op.kind not in ("all_reduce", "all_gather", "send"):
        return 0
    source = program.buffers[op.inputs[0] if op.inputs else op.out]
    size = source.width * source.n_rows(n_tokens, n_logits, n_logits)
    payload = q8_packed_bytes(size) if is_rounded(op) else size * FLOAT32_BYTES
    peers = op.attrs["peers"] if op.kind == "send" else [r for r in op.attrs["ranks"] if r != rank]
    return payload * len(peers)
