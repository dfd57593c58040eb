r"""Second moments of what each matrix is multiplied with, summed while a model reads a text.

For a matrix W (N, K) and its inputs X (T, K) these are the sums over rows
:math:`\sum_t x_{ti}^2` (an importance matrix), or all of :math:`X^T X`, which GPTQ needs.  The
squared error of the outputs is :math:`\mathrm{tr}(E X^T X E^T)` for an error E of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nbflow_kernels as nk
from nbflow.engine.llm import LLM
from nbflow.executor.cpu import CpuExecutor
from nbflow.executor.expert_bias import expert_biases
from nbflow.program.records import Op
from nbflow_kernels.activation import reference as activation
from nbflow_kernels.errors import UsageError

MATRICES = ("linear", "heads_linear", "experts")
"""Kinds of op whose weights are matrices that a format applies to."""


@dataclass
class ActivationStats:
    """What the rows were that some matrices were multiplied with."""

    names: tuple[str, ...]
    """Our names of the matrices; all of them read the same rows."""
    sums: NDArray[np.float64]
    """Sums of squares (K,), or of all products (K, K)."""
    n_rows: int = 0
    """Rows that were added."""

    @property
    def squares(self) -> NDArray[np.float64]:
        """Sums of squares of each column (K,)."""
        return self.sums if self.sums.ndim == 1 else self.sums.diagonal()

    def add(self, x: NDArray[Any]) -> None:
        """Add rows (T, K)."""
        wide = x.astype(np.float64)
        self.sums += np.einsum("tk,tk->k", wide, wide) if self.sums.ndim == 1 else wide.T @ wide
        self.n_rows += len(x)


def collect(
    model: LLM,
    windows: Iterable[Sequence[int] | NDArray[Any]],
    *,
    full: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[ActivationStats]:
    """Run a model over windows of a text and sum up what its matrices are multiplied with.

    Parameters
    ----------
    model : Model
        A model on the CPU, in one process, that has not run yet; it keeps its observer.
    windows : iterable of array of int, shape (T,)
        Token ids; each window begins with an empty cache.
    full : bool
        Whether to sum all products of columns, (K, K) in float64 for each input of the model.
    progress : callable, optional
        Called with the number of windows done.

    Returns
    -------
    list of Inputs
        In the order of the program.  An expert that no token went to has ``n_rows`` 0.

    Raises
    ------
    UsageError
        If the model lies elsewhere, or has an encoder beside its decoder.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python") as model:
    ...     found = collect(model, [[0, 5, 7], [0, 9]])
    >>> found[0].names, found[0].sums.shape, found[0].n_rows
    (('layers.0.attn.q.weight', 'layers.0.attn.k.weight', 'layers.0.attn.v.weight'), (256,), 5)
    """
    collector = collector_of(model)
    collector.restart(full=full)
    run = model.logits if model.spec.head else model.hidden
    for i, window in enumerate(windows):
        run(window)
        if progress is not None:
            progress(i + 1)
    return collector.found()


def collector_of(model: LLM) -> Collector:
    """Return what sums up the inputs of a model's matrices whenever it runs.

    Raises
    ------
    UsageError
        As `collect`.
    """
    executor = model.workers[0].executor if len(model.workers) == 1 else None
    if not isinstance(executor, CpuExecutor) or executor.comm.size > 1:
        raise UsageError("inputs are collected on the CPU in one process; leave partition and MPI")
    if model.spec.encoder is not None:
        raise UsageError(f"{model.spec.name} has an encoder beside its decoder; not collected yet")
    collector = Collector()
    executor.observe = MatrixInputs(executor, collector.add)
    return collector


class Collector:
    """Adds up what matrices are multiplied with."""

    def __init__(self) -> None:
        self.restart()

    def restart(
        self, *, full: bool = False, only: Collection[tuple[str, ...]] | None = None
    ) -> None:
        """Begin with sums of 0, of all products of columns if `full`, and `only` of some inputs."""
        self._full, self._only = full, only
        self._inputs: dict[tuple[str, ...], ActivationStats] = {}

    def found(self) -> list[ActivationStats]:
        """Return what was added up."""
        return list(self._inputs.values())

    def add(self, names: tuple[str, ...], x: NDArray[Any]) -> None:
        """Add rows (T, K) that these matrices are multiplied with."""
        if self._only is not None and names not in self._only:
            return
        if names not in self._inputs:
            K = x.shape[1]
            self._inputs[names] = ActivationStats(names, np.zeros((K, K) if self._full else K))
        self._inputs[names].add(x)


class MatrixInputs:
    """Hands on the rows that each matrix is multiplied with, as ops are about to run.

    Parameters
    ----------
    executor : CpuExecutor
        Whose `observe` this is made for.
    add : callable
        Called with our names of matrices that read the same rows, and the rows (T, K), which
        change afterwards.
    """

    def __init__(
        self, executor: CpuExecutor, add: Callable[[tuple[str, ...], NDArray[Any]], None]
    ) -> None:
        self._add = add
        program = executor.program
        self._operands = dict(zip(map(id, program.ops), executor.weights.operands, strict=True))
        self._bias = dict(zip(map(id, program.ops), executor.weights.bias, strict=True))
        self._spec, self._moe = program.spec, program.spec.moe

    def __call__(self, op: Op, inputs: tuple[NDArray[Any], ...]) -> None:
        """Hand on the inputs of an op with weights."""
        if op.kind in MATRICES:
            getattr(self, f"_{op.kind}")(op, *inputs)

    def _linear(self, op: Op, x: NDArray[Any]) -> None:
        self._add(tuple(weight.name for weight in op.weights), x)

    def _heads_linear(self, op: Op, x: NDArray[Any]) -> None:
        """Add the first columns of each head; all heads lie in one tensor."""
        heads = x.reshape(len(x), -1, op.attrs["head"])
        for h, (operand, weight) in enumerate(zip(op.weights, self._operands[id(op)], strict=True)):
            self._add((operand.name,), heads[:, h, : weight.shape[1]])

    def _experts(self, op: Op, x: NDArray[Any], router: NDArray[Any]) -> None:
        """Add the rows that go to each expert, and what its gate makes of them."""
        assert self._moe is not None
        biases = expert_biases(op, self._spec, self._bias[id(op)])
        _, chosen = nk.moe_routing(
            np.ascontiguousarray(router), correction_bias=biases.choice, **self._moe.routing
        )
        matrices, n = self._operands[id(op)], len(op.weights) // 3
        for e in range(n):
            gate, up, down = (op.weights[i * n + e].name for i in range(3))
            rows = np.ascontiguousarray(x[(chosen == e).any(axis=1)])
            self._add((gate, up), rows)
            if not len(rows):
                self._add((down,), np.zeros((0, matrices[2 * n + e].shape[1])))
                continue
            both = [
                _product(rows, matrices[i * n + e], None if b is None else b[e])
                for i, b in enumerate((biases.gate, biases.up))
            ]
            whole = np.concatenate(both, axis=1)
            self._add((down,), activation.glu(whole, op.attrs["activation"], gate_first=True))


def _product(rows: NDArray[Any], w: Any, bias: NDArray[Any] | None) -> NDArray[Any]:
    multiply = nk.qmatmul if isinstance(w, nk.QuantTensor) else nk.matmul
    return multiply(rows, w, bias=bias)  # type: ignore[no-any-return]
