"""Ops of plugins: sublayers that a user's Python code computes.

A table [layer.NAME] of a family file names one in the place of the mixer (`op`) or of the
feed-forward network (`feed_forward_op`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.plugins import Registry

PLACES = {"op": "op", "feed_forward_op": "ffn_op"}
"""Key of [layer.NAME] -> part of the tensors' names."""
TENSOR_NAME = re.compile(r"layers\.\{i\}\.(op|ffn_op)\.[a-z][a-z0-9_]*\.weight")
"""Our names of the tensors of such ops, as the keys of [tensors]."""
_SIZE = re.compile(r"[a-z_]+|\d+")
Shape = tuple[int | str, ...]
Dimension = Literal["rows", "columns"]
DIMENSIONS = {"rows": 0, "columns": 1}
Span = tuple[int, int]


@dataclass(frozen=True)
class OpPartition:
    """Tensor-parallel rule of an op: the dimension of each weight that the ranks split.

    Examples
    --------
    A feed-forward network whose hidden columns the ranks split; their outputs are partial sums:

    >>> rule = OpPartition(heads=64, weights={"up": "rows", "down": "columns"})
    >>> rule.all_reduce
    True
    """

    heads: int | str
    """Heads, groups or channels of the op, which go whole to a rank: a number, or a size of the
    model such as ``"n_heads"``.  Each dimension that is split is a multiple of it."""
    weights: Mapping[str, Dimension]
    """Name to the dimension that is split, "rows" (the first) or "columns" (the second); every
    rank holds the other weights whole."""
    state: Dimension | None = None
    """Dimension of the state that is split; None: every rank holds it whole."""
    x: Literal["columns"] | None = None
    """"columns": the op gets the columns of its heads of the input (T, E); None: all of them."""
    all_reduce: bool = True
    """True if the output of a rank is a partial sum; False if each rank computes all of it."""


def _cuts(rule: OpPartition) -> dict[str, Dimension]:
    """Return the dimension that is split of weights, "state" and "x"."""
    others = {"state": rule.state, "x": rule.x}
    return {**rule.weights, **{name: cut for name, cut in others.items() if cut is not None}}


Partition = OpPartition | Literal["replicated"] | None


@dataclass(frozen=True)
class PluginOp:
    """One op; `register_op` describes the fields."""

    name: str
    reference: Callable[..., Any]
    cpu: Callable[..., Any] | None = None
    weights: Mapping[str, Shape] = field(default_factory=dict)
    state: Shape | None = None
    partition: Partition = None

    def shapes(self, spec: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight."""
        return {name: self._sizes(shape, spec, name) for name, shape in self.weights.items()}

    def state_shape(self, spec: Any) -> tuple[int, ...] | None:
        """Return the shape of the state of one sequence, or None."""
        return None if self.state is None else self._sizes(self.state, spec, "state")

    def n_heads(self, spec: Any) -> int:
        """Return the heads that an `OpPartition` deals out; 1 without one.

        Raises
        ------
        UsageError
            If a dimension that is split is not a multiple of them.
        """
        rule = self.partition
        if not isinstance(rule, OpPartition):
            return 1
        (heads,) = self._sizes((rule.heads,), spec, "partition: heads")
        for name, dimension in _cuts(rule).items():
            size = self._size(spec, name, dimension)
            if size % heads:
                raise UsageError(
                    f"op {self.name!r}: partition: {name} has {size} {dimension}, which must be a "
                    f"multiple of heads = {heads}"
                )
        return heads

    def shard(self, spec: Any, heads: Span, name: str) -> tuple[Span | None, Span | None]:
        """Return the rows and columns of a weight, "state" or "x" for a range of heads."""
        rule = self.partition
        dimension = _cuts(rule).get(name) if isinstance(rule, OpPartition) else None
        if dimension is None:
            return None, None
        each = self._size(spec, name, dimension) // self.n_heads(spec)
        span = heads[0] * each, heads[1] * each
        return (span, None) if dimension == "rows" else (None, span)

    def _size(self, spec: Any, name: str, dimension: Dimension) -> int:
        """Return a dimension of a weight, "state" or "x"."""
        shape = {"state": self.state, "x": (1, "hidden_size")}.get(name) or self.weights[name]
        return self._sizes(shape, spec, name)[DIMENSIONS[dimension]]

    def _sizes(self, shape: Shape, spec: Any, what: str) -> tuple[int, ...]:
        sizes = []
        for size in shape:
            product = 1
            for factor in _SIZE.findall(str(size)):
                value = int(factor) if factor.isdigit() else getattr(spec, factor, None)
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise UsageError(
                        f"op {self.name!r}: {what}: {factor!r} is not a size of the model, e.g. "
                        f"hidden_size, n_heads, head_dim, intermediate_size; got {value!r:.60}"
                    )
                product *= value
            sizes.append(product)
        return tuple(sizes)


OPS: Registry[PluginOp] = Registry("op", "nbflow.register_op")
"""Registered ops."""


def register_op(
    name: str,
    *,
    reference: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    weights: Mapping[str, Shape] | None = None,
    state: Shape | None = None,
    partition: Partition = None,
) -> PluginOp:
    """Register an op that models can have as a mixer or as a feed-forward network.

    Parameters
    ----------
    name : str
        The name, for ``op`` and ``feed_forward_op`` of a table [layer.NAME].
    reference : callable
        The op in NumPy float64: ``reference(x, weights)`` returns the sublayer's output (T, E) for
        its input (T, E), without the residual sum.  `weights` are arrays by name.  With a state
        ``reference(x, weights, state, indptr, rows)``: tokens ``indptr[b]`` to ``indptr[b + 1]``
        belong to sequence b, whose state is ``state[rows[b]]``, zeros before its first token, and
        must be updated in place.
    cpu : callable, optional
        The same in float32 with an argument `out` at the end, (T, E), to which it writes.  Compile
        what it calls with Numba.  By default the result of `reference` is rounded.
    weights : mapping, optional
        Name to shape; a size is a number or a product of sizes of the model: ``"hidden_size"``,
        ``"n_heads * head_dim"``.  The family file names them in the checkpoint:
        ``layers.{i}.op.NAME.weight``, ``layers.{i}.ffn_op.NAME.weight``.
    state : tuple, optional
        Shape of the state of one sequence, sizes as above; None for an op that depends on each
        token alone.
    partition : OpPartition or "replicated", optional
        Computation on the tensor parallel ranks of a stage.  With an `OpPartition` each rank gets
        its shard of the weights and of the state, so take sizes from their shapes; "replicated"
        runs the whole op on each of them.  None: such partitions are refused.

    Returns
    -------
    PluginOp

    Raises
    ------
    UsageError
        If the name is taken, or a function, name or shape is wrong.
    """
    where = f"register_op({name!r})"
    for key, function in (("reference", reference), ("cpu", cpu)):
        if not callable(function) and (key == "reference" or function is not None):
            raise UsageError(f"{where}: {key} must be a function, got {function!r:.80}")
    for weight, shape in {**(weights or {}), **({} if state is None else {"state": state})}.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", weight):
            raise UsageError(
                f"{where}: names of weights are lower-case letters, digits and underscores, got "
                f"{weight!r:.80}"
            )
        sizes = shape if isinstance(shape, tuple) and shape else ("",)
        if not all(re.fullmatch(r"\w+( *\* *\w+)*", str(size)) for size in sizes):
            raise UsageError(
                f"{where}: {weight} must have a shape such as ('hidden_size', 4), got {shape!r:.80}"
            )
    _check_partition(where, partition, weights or {}, state)
    made = PluginOp(name, reference, cpu, dict(weights or {}), state, partition)
    OPS.add(name, made, reference)
    return made


def _check_partition(
    where: str, rule: Partition, weights: Mapping[str, Shape], state: Shape | None
) -> None:
    """Raise unless a rule names weights and dimensions of the op."""
    if rule is None or rule == "replicated":
        return
    if not isinstance(rule, OpPartition):
        raise UsageError(
            f"{where}: partition must be an nbflow.OpPartition or 'replicated', got {rule!r:.80}"
        )
    if not re.fullmatch(r"\w+( *\* *\w+)*", str(rule.heads)):
        raise UsageError(
            f"{where}: heads of partition must be a number or a size such as 'n_heads', got "
            f"{rule.heads!r:.80}"
        )
    if not rule.weights:
        raise UsageError(f"{where}: partition splits no weight; use partition='replicated'")
    if rule.state is not None and state is None:
        raise UsageError(f"{where}: partition splits the state, and the op has none")
    if taken := weights.keys() & {"state", "x"}:
        raise UsageError(f"{where}: with a partition a weight cannot be named {min(taken)!r}")
    shapes = {**weights, "state": state or (), "x": ("tokens", "hidden_size")}
    for name, dimension in _cuts(rule).items():
        if name not in shapes:
            raise unknown_name(f"{where}: partition: weight", name, weights)
        allowed = ("columns",) if name == "x" else tuple(DIMENSIONS)[: len(shapes[name])]
        if dimension not in allowed:
            raise UsageError(
                f"{where}: partition of {name}, {shapes[name]}, must be "
                f"{' or '.join(map(repr, allowed))}, got {dimension!r:.80}"
            )
