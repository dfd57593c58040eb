"""Op records: what one step of the model does, as data.

A program works on named buffers of float32 with one row per token; behind the layers there is one
per token whose hidden state, or logits, are wanted, and an op reads as many rows as it writes.
A step gives the token ids, positions and page table; see `nbflow.executor`.

Kinds of op:

============  ===============================================================================
embedding     out = table[ids]; attr ``index``: ids, positions or types; attr ``scale``; without a
              table the sinusoidal one; attr ``first_row``: the table begins with that row of the
              whole one, and rows it does not have count as zeros
norm          out = norm(input); attrs ``norm`` (rms, layer), ``eps``, ``offset``, ``per_head``,
              ``own_weights`` (each head has some: a weight for each),
              ``columns`` (only so many, the first ones); with a second input, the rows are parts of
              rows of attr ``width`` whose sums of squares are its column ``column``
sum_squares   out = the sum of squares of each input's rows, a column for each; attr ``counts``:
              whether an input counts
linear        out = input @ W.T + bias, W the rows of all `weights` one below the other;
              with attr ``accumulate``: out += ...; ``normalize_rows``: W's rows divided by their
              lengths
rope          rotate the inputs (q, k) in place, attr ``rope``; with attr ``first`` from that column
              of each head on
copy_heads    the last columns of each head of out = those of each head of the input, attrs
              ``columns`` (how many) and ``head`` (columns of an input's head)
heads_linear  for each head: the first columns of out's = (the first of the input's) @ W.T, W the
              head's own of `weights`
append_kv     write inputs (k, v), or a latent vector alone, into the layer's pages
attention     out = attention(q) over the layer's pages, attr ``window``; a weight is the table of
              what is added to the scores for each bucket of distances, a bias the heads' sinks
cross_attention
              out = attention(q) over the pages of what the encoder gave, all of it
input         out = rows given from outside, one for each token
activation    out = act(input), attr ``activation``
gate          out = act(gate) * up; inputs (gate, up), or one buffer that holds both
experts       out = the weighted sum of the experts that `router` chooses; inputs (x, router); the
              weights are the gates, then the ups, then the downs of the experts in attr
              ``experts``, the bias that of the choice; with attr ``biased`` the biases of gates,
              ups and downs follow it
scale_rows    out *= sigmoid(input @ w) for each row
add           out += input; attr ``scale``: a factor of the input
scale         out = input * attr ``scale``
soft_cap      out = cap * tanh(input / cap), attr ``cap``
take_rows     out = the input's rows whose hidden states are wanted, those with logits in front
all_reduce    sum `out` over the ranks of the group, attrs ``ranks`` and ``exchange`` (f32, or q8:
              each rank's part rounded to bytes)
all_gather    out = the columns of all ranks of the group, attrs ``ranks`` and ``widths``
send, recv    move a buffer to / from another stage, attr ``peers`` / ``peer``
============  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nbflow.spec.model_spec import ModelSpec

Kind = Literal[
    "embedding",
    "norm",
    "sum_squares",
    "linear",
    "rope",
    "copy_heads",
    "heads_linear",
    "append_kv",
    "attention",
    "cross_attention",
    "input",
    "activation",
    "gate",
    "experts",
    "scale_rows",
    "add",
    "scale",
    "soft_cap",
    "take_rows",
    "all_reduce",
    "all_gather",
    "send",
    "recv",
]
_MOST_SHOWN = 4
COMMUNICATION = frozenset({"all_reduce", "all_gather", "send", "recv"})


@dataclass(frozen=True)
class Operand:
    """A tensor of the model, or the part of it that one rank holds."""

    name: str
    """Our tensor name."""
    rows: tuple[int, int] | None = None
    """First and one past the last row; None is all."""
    columns: tuple[int, int] | None = None
    """First and one past the last column; None is all."""

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, given the tensor's."""
        cuts = (self.rows, self.columns)[: len(full)]
        return tuple(
            size if cut is None else cut[1] - cut[0] for size, cut in zip(full, cuts, strict=True)
        )

    def __str__(self) -> str:
        if self.rows is None and self.columns is None:
            return self.name
        cut = ["" if c is None else f"{c[0]}:{c[1]}" for c in (self.rows, self.columns)]
        return f"{self.name}[{', '.join(c or ':' for c in cut)}]"


@dataclass(frozen=True)
class Buffer:
    """A matrix of float32 that lives for one step, or a band of columns of another one."""

    width: int
    """Columns."""
    rows: Literal["tokens", "states", "logits"] = "tokens"
    """A row per token of the step, per token whose hidden state behind the layers is wanted, or per
    token whose logits are wanted, too."""
    base: str | None = None
    """The buffer this one is a band of."""
    offset: int = 0
    """First column within `base`."""

    def n_rows(self, n_tokens: int, n_states: int, n_logits: int) -> int:
        """Return its rows in a step of this size."""
        return {"tokens": n_tokens, "states": n_states, "logits": n_logits}[self.rows]


@dataclass(frozen=True)
class Op:
    """One record of a program."""

    kind: Kind
    out: str
    """Buffer that is written (or changed in place)."""
    inputs: tuple[str, ...] = ()
    """Buffers that are read."""
    weights: tuple[Operand, ...] = ()
    """Matrices or vectors of the model."""
    bias: tuple[Operand, ...] = ()
    """Biases: of linears one per weight, or none."""
    layer: int | None = None
    """Layer the op belongs to."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the kind."""

    def __str__(self) -> str:
        where = "      " if self.layer is None else f"L{self.layer:<4} "
        weights = list(map(str, self.weights))
        if len(weights) > _MOST_SHOWN:  # those of experts or heads
            weights = [weights[0], f"... {len(weights)} in all ...", weights[-1]]
        reads = ", ".join((*self.inputs, *weights, *map(str, self.bias)))
        attrs = " ".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{where}{self.kind:<11} {self.out} <- {reads}  {attrs}".rstrip()


@dataclass(frozen=True)
class Program:
    """A forward pass of one rank."""

    spec: ModelSpec
    ops: tuple[Op, ...]
    buffers: Mapping[str, Buffer]
    n_heads: int
    """Query heads computed by this rank."""
    n_kv_heads: int
    """Key/value heads stored by this rank."""
    layers: tuple[int, ...]
    """Layers of this rank, in order; their KV caches live here."""
    first_head: int = 0
    """Number of the first query head in the whole model."""

    def __str__(self) -> str:
        header = (
            f"{self.spec.name}: {len(self.ops)} ops, layers {list(self.layers)}, "
            f"{self.n_heads} query heads, {self.n_kv_heads} key/value heads"
        )
        return "\n".join([header, *map(str, self.ops)])
