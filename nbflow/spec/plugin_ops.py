"""Ops of plugins: sublayers that a user's Python code computes.

A table [layer.NAME] of a family file names one in the place of the mixer (`op`) or of the
feed-forward network (`feed_forward_op`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import Registry

PLACES = {"op": "op", "feed_forward_op": "ffn_op"}
"""Key of [layer.NAME] -> part of the tensors' names."""
TENSOR_NAME = re.compile(r"layers\.\{i\}\.(op|ffn_op)\.[a-z][a-z0-9_]*\.weight")
"""Our names of the tensors of such ops, as the keys of [tensors]."""
_SIZE = re.compile(r"[a-z_]+|\d+")
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class PluginOp:
    """One op; `register_op` describes the fields."""

    name: str
    reference: Callable[..., Any]
    cpu: Callable[..., Any] | None = None
    weights: Mapping[str, Shape] = field(default_factory=dict)
    state: Shape | None = None

    def shapes(self, spec: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight."""
        return {name: self._sizes(shape, spec, name) for name, shape in self.weights.items()}

    def state_shape(self, spec: Any) -> tuple[int, ...] | None:
        """Return the shape of the state of one sequence, or None."""
        return None if self.state is None else self._sizes(self.state, spec, "state")

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
    made = PluginOp(name, reference, cpu, dict(weights or {}), state)
    OPS.add(name, made, reference)
    return made
