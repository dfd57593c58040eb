"""Op records: the instruction set of programs.

Ops work on named float32 buffers with a row per token; after the layers, with a row per token whose
hidden state or logits are needed.  An op reads as many rows as it writes.  Token ids, positions and
block table come from the step (`nbflow.executor.step`).

Kinds of op:

============  ===============================================================================
embedding     out = table[ids]; attr ``index``: ids, positions or types; attr ``scale``; without a
              table the sinusoidal one; attr ``first_row``: the table is a shard that begins with
              that row, and rows of other shards are zeros; ``rows``: rows of the whole table, of
              which further ids take the first
norm          out = norm(input); attrs ``norm`` (rms, layer), ``eps``, ``offset``, ``per_head``,
              ``head`` (columns of a head, if not those of keys), ``own_weights`` (a weight for each
              head), ``columns`` (of the first columns only); with a second input, the rows are
              shards of rows of attr ``width``, whose sums of squares are its column ``column``
sum_squares   out = sums of squares of the rows of each input, a column for each; attr ``counts``:
              False for inputs that count as zero
linear        out = input @ W.T + bias, W the concatenated rows of all `weights`;
              with attr ``accumulate``: out += ...; ``normalize_rows``: W's rows scaled to length 1
rope          rotate the inputs (q, k), or q alone, in place, attr ``rope``; attrs ``first``: first
              column of each head that is rotated, ``head``: columns of a head, if not those of keys
clip          limit the magnitude of the inputs in place, attr ``limit``
hadamard      rotate blocks of columns of the inputs in place; attr ``block``: columns of a block
extend_keys   out = heads of the first input, then exp(rate * softplus(number)), then zeros, attr
              ``columns`` in all; the number of a head is a column of the second input from attr
              ``first`` on; the weight is the rate of each head
extend_queries
              out = heads of the input, then attr ``number``, then zeros, attr ``columns`` in all
temperature   queries of out *= 1 + scale * ln(1 + (position + offset) // floor);
              attrs ``scale``, ``floor``, ``offset``
copy_heads    last columns of each head of out = those of the input, attrs ``columns`` (number of
              columns) and ``head`` (columns of an input's head)
heads_linear  per head: first columns of out = first columns of the input @ W.T, with a weight per
              head
append_kv     write inputs (k, v), or a latent vector alone, into the layer's pages
append_index  write the index keys into the layer's pages
select_keys   out = positions of the keys with the largest index scores, int32, then -1; inputs:
              index queries, weights of their heads
sparse_attention
              out = attention(q) over the selected keys of the layer's pages; inputs (q, selection)
attention     out = attention(q) over the layer's pages, attrs ``window`` and ``chunk``; the weight
              is the relative position bias by bucket, the bias the attention sinks; attr
              ``kv_layer``: over the pages of that layer; ``key_rope``: the pages hold keys before
              this rotary embedding; ``key_bias``: and before the bias of their projection, which is
              the weight
cross_attention
              out = attention(q) over all cached states of the encoder
input         out = external rows, one per token
activation    out = act(input), attr ``activation``; xielu has weights: the numbers of the layer
gate          out = act(gate) * up; inputs (gate, up), or one fused buffer; out may be up
conv          out = causal convolution of each channel of the input over its last tokens, those of
              earlier steps from the state; attr ``activation``: None or silu
sigmoid       out = attr ``scale`` * sigmoid(input)
log_decay     out = rate * softplus(input + bias); weights: the logarithms of the negative rates
              (A_log), each for as many columns as needed, and the bias
delta_rule    out = gated delta rule; inputs q, k, v, logarithm of the decay, write strength; attrs
              ``head``: columns of a key; ``decay``: one per head, or per channel of these columns
lightning     out = linear attention with constant decays; inputs q, k, v; attr ``slopes``: decay of
              each head
mamba1        out = selective scan; inputs values, time steps, input and output vectors; weights
              as of mamba2
mamba2        out = state-space recurrence; inputs values, time steps, input and output vectors;
              weights: logarithms of the negative rates, what is added to the time steps, and the
              weight of the skip connection; attr ``dt_limits``: least and largest time step
gated_norm    out = norm of groups of columns of the first input, with the second input as gate;
              attrs ``eps``, ``group_size``, ``gate_first``, ``activation``
experts       out = weighted sum of the experts that the router chooses; inputs (x, router); weights
              are gate, up and down matrices of the experts in attr ``experts`` (`expert_parts`);
              the bias is that of the choice; with attr ``biased`` biases of gates, ups and downs
              follow; with attr ``weigh_inputs`` the router's weights multiply the inputs of the
              experts; attr ``gated``: False for experts without gate matrices; attr ``scaled``: the
              bias is instead a factor of each expert's weight
retrieve      out = weighted sum of the rows of experts that the sums of two keys' scores choose,
              act(input . down) * up; inputs (x, scores); weights: down, up; attrs ``top_k``,
              ``activation``, ``experts``: those whose rows the weights are
plugin        out = op of a plugin of the input, attr ``op``: its name (`nbflow.spec.plugin_ops`);
              attr ``columns``: columns of the input that the rank's shard reads
scale_rows    out *= sigmoid(input @ w) for each row
add           out += input; attr ``scale``: a factor of the input
scale         out = input * attr ``scale``
scale_columns out = input * weight, a number for each column or one for all
match_rms     out = the first input with rows of the root mean square of the second's; attr
              ``least``: least mean square of a row of the first
mix           out += weighted sum of streams, blocks of ``width`` columns: for each stream of out
              the second input has a weight, plus attr ``offset``, for each stream of the first
row_moments   out = sum and sum of squares of each row of the input
gaussian_topk
              out = max(0, input - mean - ``deviations`` * deviation), attrs ``width``: columns of
              whole rows; inputs (rows, their moments)
soft_cap      out = cap * tanh(input / cap), attr ``cap``
take_rows     out = rows of the input whose hidden states are needed, those with logits first
all_reduce    sum `out` over the tensor parallel group, attrs ``ranks`` and ``all_reduce`` (f32, or
              q8: quantized payload)
all_gather    out = columns of all ranks of the group, attrs ``ranks`` and ``widths``
send, recv    send a buffer to / receive it from another pipeline stage, attr ``peers`` / ``peer``
============  ===============================================================================

Recurrent ops have an attr ``state``, the shape of the state of one sequence, which the op updates
in place (`Program.states`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nbflow.spec.layer_specs import HeadShape
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.state_format import state_bytes

Kind = Literal[
    "embedding", "norm", "sum_squares", "linear", "clip", "rope", "hadamard", "extend_keys",
    "extend_queries", "temperature",
    "copy_heads", "heads_linear", "append_kv", "append_index", "select_keys", "sparse_attention",
    "attention", "cross_attention", "input", "activation", "gate", "conv", "sigmoid", "log_decay",
    "delta_rule", "lightning", "mamba1", "mamba2", "gated_norm", "experts", "retrieve", "plugin",
    "scale_rows", "add", "scale", "scale_columns", "match_rms", "mix", "row_moments",
    "gaussian_topk", "soft_cap", "take_rows", "all_reduce", "all_gather", "send", "recv",
]  # fmt: skip
_MAX_SHOWN = 4
COMMUNICATION = frozenset({"all_reduce", "all_gather", "send", "recv"})


@dataclass(frozen=True)
class Operand:
    """Tensor of the model, or a rank's shard of it."""

    name: str
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the operand, given that of the whole tensor."""
        cuts = itertools.chain((self.rows, self.columns), itertools.repeat(None))
        return tuple(
            size if cut is None else cut[1] - cut[0] for size, cut in zip(full, cuts, strict=False)
        )

    def __str__(self) -> str:
        if self.rows is None and self.columns is None:
            return self.name
        cut = ["" if c is None else f"{c[0]}:{c[1]}" for c in (self.rows, self.columns)]
        return f"{self.name}[{', '.join(c or ':' for c in cut)}]"


@dataclass(frozen=True)
class Buffer:
    """float32 matrix that lives for one step, or some columns of another buffer."""

    width: int
    rows: Literal["tokens", "states", "logits"] = "tokens"
    """A row per token of the step, per token whose final hidden state is needed, or per token whose
    logits are needed."""
    base: str | None = None
    """Buffer that this one is some columns of."""
    offset: int = 0
    """First column within `base`."""

    def n_rows(self, n_tokens: int, n_states: int, n_logits: int) -> int:
        """Return the number of rows in a step of this size."""
        return {"tokens": n_tokens, "states": n_states, "logits": n_logits}[self.rows]


@dataclass(frozen=True)
class Op:
    """One op of a program."""

    kind: Kind
    out: str
    """Buffer that is written (or changed in place)."""
    inputs: tuple[str, ...] = ()
    weights: tuple[Operand, ...] = ()
    bias: tuple[Operand, ...] = ()
    """Biases; for linears one per weight, or none."""
    layer: int | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Attributes; see the table of kinds."""

    def __str__(self) -> str:
        where = "      " if self.layer is None else f"L{self.layer:<4} "
        weights = list(map(str, self.weights))
        if len(weights) > _MAX_SHOWN:  # experts or heads
            weights = [weights[0], f"... {len(weights)} in all ...", weights[-1]]
        reads = ", ".join((*self.inputs, *weights, *map(str, self.bias)))
        attrs = " ".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{where}{self.kind:<11} {self.out} <- {reads}  {attrs}".rstrip()


Mask = tuple[int | None, int | None]
"""Sliding window and chunk of causal attention, in tokens; None for none."""


def mask_of(op: Op) -> Mask:
    """Return the window and the chunk of an attention op."""
    return op.attrs.get("window"), op.attrs.get("chunk")


def expert_parts(op: Op, items: Sequence[Any]) -> list[list[Any]]:
    """Return what belongs to the matrices of an `experts` op by kind: gates, ups and downs.

    Experts without gates have the latter two.
    """
    first, end = op.attrs["experts"]
    return [list(items[i : i + end - first]) for i in range(0, len(items), end - first)]


def kv_layer(op: Op) -> int:
    """Return the layer whose keys and values an op reads or writes."""
    return int(op.attrs.get("kv_layer", op.layer or 0))


StateKey = tuple[int, str]
"""Layer and output buffer of a recurrent op."""


def state_key(op: Op) -> StateKey:
    """Return the key of a recurrent op's state."""
    return op.layer or 0, op.out


@dataclass(frozen=True)
class State:
    """State of one sequence for a recurrent op."""

    shape: tuple[int, ...]
    format: str = "f32"
    """Storage format, see `nbflow_kernels.state_format`."""

    @property
    def n_bytes(self) -> int:
        """Bytes in storage."""
        return state_bytes(self.shape, self.format)


def state_of(op: Op, spec: ModelSpec) -> State:
    """Return the state of a recurrent op.

    A convolution keeps a few inputs of each channel, which fill no block of q8_0: bfloat16 has
    their range and about its precision.  Ops of plugins get float32.
    """
    format = spec.state_format
    if op.kind == "plugin":
        format = "f32"
    elif op.kind == "conv" and format == "q8_0":
        format = "bf16"
    return State(op.attrs["state"], format)


def kv_heads_read(spec: ModelSpec, layer: int, heads: tuple[int, int]) -> tuple[int, int]:
    """Return the first and last + 1 KV head of a layer that query heads (first, number) read."""
    n, (first, n_heads) = spec.heads_of(layer).n_kv_heads, heads
    return first * n // spec.n_heads, -(-(first + n_heads) * n // spec.n_heads)


@dataclass(frozen=True)
class Program:
    """Forward pass of one rank."""

    spec: ModelSpec
    ops: tuple[Op, ...]
    buffers: Mapping[str, Buffer]
    n_heads: int
    """Query heads computed by this rank."""
    n_kv_heads: int
    """Key/value heads stored by this rank."""
    layers: tuple[int, ...]
    first_head: int = 0
    """First query head, counted in the whole model."""

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with keys and values."""
        return tuple(dict.fromkeys(op.layer or 0 for op in self.ops if op.kind == "append_kv"))

    def heads_of(self, layer: int) -> HeadShape:
        """Return the heads of a layer's attention whose keys and values this rank stores."""
        heads, n = self.spec.heads_of(layer), self.n_kv_heads
        if self.spec.is_local(layer):
            first, end = kv_heads_read(self.spec, layer, (self.first_head, self.n_heads))
            n = end - first
        return HeadShape(n, heads.key_dim, heads.value_dim)

    @property
    def tables(self) -> set[tuple[Operand, ...]]:
        """Weights that are looked up on this rank, or on the first one: a tied head.

        They have one layout everywhere, so that all divisions into stages compute the same bits.
        """
        found = {op.weights for op in self.ops if op.kind == "embedding" and op.weights}
        if self.spec.tied_head:
            heads = (op.weights for op in self.ops if op.kind == "linear")
            found |= {w for w in heads if w and w[0].name == "embed.weight"}
        return found

    @property
    def states(self) -> dict[StateKey, State]:
        """State of one sequence for each recurrent op."""
        ops = (op for op in self.ops if "state" in op.attrs)
        return {state_key(op): state_of(op, self.spec) for op in ops}

    def __str__(self) -> str:
        header = (
            f"{self.spec.name}: {len(self.ops)} ops, layers {list(self.layers)}, "
            f"{self.n_heads} query heads, {self.n_kv_heads} key/value heads"
        )
        return "\n".join([header, *map(str, self.ops)])
