r"""Collection of activation statistics: second moments of the inputs of each matrix.

For a matrix W (N, K) with inputs X (T, K) these are the sums :math:`\sum_t x_{ti}^2` over rows (an
importance matrix), or all of :math:`X^T X`, which GPTQ needs.  The
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
from nbflow.program.records import Op, expert_parts
from nbflow_kernels.activation import reference as activation
from nbflow_kernels.errors import UsageError

MATRICES = ("linear", "heads_linear", "experts")
"""Kinds of ops whose weights are quantized matrices."""


@dataclass
class ActivationStats:
    """Second moments of the inputs of some matrices."""

    names: tuple[str, ...]
    """Our names of the matrices, which share their inputs."""
    sums: NDArray[np.float64]
    """Sums of squares (K,), or of all products (K, K)."""
    n_rows: int = 0

    @property
    def squares(self) -> NDArray[np.float64]:
        """Sums of squares of each column (K,)."""
        return self.sums if self.sums.ndim == 1 else self.sums.diagonal()

    def add(self, x: NDArray[Any]) -> None:
        """Add rows (T, K)."""
        wide = x.astype(np.float64)
        self.sums += np.einsum("tk,tk->k", wide, wide) if self.sums.ndim == 1 else wide.T @ wide
        self.n_rows += len(x)


def collect_stats(
    model: LLM,
    windows: Iterable[Sequence[int] | NDArray[Any]],
    *,
    full: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[ActivationStats]:
    """Run a model over windows of a text and sum second moments of the inputs of its matrices.

    Parameters
    ----------
    model : LLM
        A model on the CPU, in one process, that has not run yet; its observer stays installed.
    windows : iterable of array of int, shape (T,)
        Token ids; each window begins with an empty cache.
    full : bool
        Sum all products of columns, (K, K) in float64 for each input of the model.
    progress : callable, optional
        Called with the number of windows done.

    Returns
    -------
    list of ActivationStats
        In the order of the program.  An expert without tokens has ``n_rows`` 0.

    Raises
    ------
    UsageError
        If the model is not on the CPU in one process, or is an encoder-decoder model.

    Examples
    --------
    >>> import nbflow
    >>> with nbflow.load("tiny_python") as model:
    ...     found = collect_stats(model, [[0, 5, 7], [0, 9]])
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


def collector_of(model: LLM) -> StatsCollector:
    """Install an observer that sums the inputs of a model's matrices whenever it runs."""
    executor = check_observable(model)
    collector = StatsCollector()
    executor.observe = ActivationObserver(executor, collector.add)
    return collector


def check_observable(model: LLM) -> CpuExecutor:
    """Return the executor of a model, or raise UsageError if its inputs cannot be observed."""
    executor = model.workers[0].executor if len(model.workers) == 1 else None
    if not isinstance(executor, CpuExecutor) or executor.comm.size > 1:
        raise UsageError(
            "statistics are collected on the CPU in one process; run without partition and MPI"
        )
    if model.spec.encoder is not None:
        raise UsageError(
            f"{model.spec.name} is an encoder-decoder model, which is not supported yet"
        )
    return executor


class StatsCollector:
    """Sums of the inputs of matrices."""

    def __init__(self) -> None:
        self.restart()

    def restart(
        self, *, full: bool = False, only: Collection[tuple[str, ...]] | None = None
    ) -> None:
        """Reset the sums; `full` sums all products of columns, `only` selects inputs."""
        self._full, self._only = full, only
        self._inputs: dict[tuple[str, ...], ActivationStats] = {}

    def found(self) -> list[ActivationStats]:
        """Return the sums."""
        return list(self._inputs.values())

    def add(self, names: tuple[str, ...], x: NDArray[Any]) -> None:
        """Add rows (T, K) of the inputs of these matrices."""
        if self._only is not None and names not in self._only:
            return
        if names not in self._inputs:
            K = x.shape[1]
            self._inputs[names] = ActivationStats(names, np.zeros((K, K) if self._full else K))
        self._inputs[names].add(x)


class ActivationObserver:
    """Observer that passes on the inputs of each matrix before its op runs.

    Parameters
    ----------
    executor : CpuExecutor
        The executor whose `observe` is to be set.
    add : callable
        Called with our names of matrices with the same inputs, and the rows (T, K), which change
        afterwards.
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
        """Pass on the inputs of an op with weights."""
        if op.kind in MATRICES:
            getattr(self, f"_{op.kind}")(op, *inputs)

    def _linear(self, op: Op, x: NDArray[Any]) -> None:
        self._add(tuple(weight.name for weight in op.weights), x)

    def _heads_linear(self, op: Op, x: NDArray[Any]) -> None:
        """Add the first columns of each head; one tensor has all heads."""
        heads = x.reshape(len(x), -1, op.attrs["head"])
        for h, (operand, weight) in enumerate(zip(op.weights, self._operands[id(op)], strict=True)):
            self._add((operand.name,), heads[:, h, : weight.shape[1]])

    def _experts(self, op: Op, x: NDArray[Any], router: NDArray[Any]) -> None:
        """Add the rows routed to each expert, and its activations."""
        assert self._moe is not None
        biases = expert_biases(op, self._spec, self._bias[id(op)])
        _, chosen = nk.moe_routing(
            np.ascontiguousarray(router), correction_bias=biases.choice, **self._moe.routing
        )
        gated, function = op.attrs.get("gated", True), op.attrs["activation"]
        of_products = (biases.gate, biases.up) if gated else (biases.up,)
        names = [weight.name for weight in op.weights]
        parts = zip(expert_parts(op, names), expert_parts(op, self._operands[id(op)]), strict=True)
        each = (zip(*part, strict=True) for part in parts)
        for e, (*first, (down, w_down)) in enumerate(zip(*each, strict=True)):
            rows = np.ascontiguousarray(x[(chosen == e).any(axis=1)])
            self._add(tuple(name for name, _ in first), rows)
            if not len(rows):
                self._add((down,), np.zeros((0, w_down.shape[1])))
                continue
            both = [
                _product(rows, w, None if b is None else b[e])
                for (_, w), b in zip(first, of_products, strict=True)
            ]
            whole = np.concatenate(both, axis=1)
            if gated:
                hidden = activation.glu(whole, function, gate_first=True)
            else:
                hidden = getattr(activation, function)(whole)
            self._add((down,), hidden)


def _product(rows: NDArray[Any], w: Any, bias: NDArray[Any] | None) -> NDArray[Any]:
    multiply = nk.qmatmul if isinstance(w, nk.QuantTensor) else nk.matmul
    return multiply(rows, w, bias=bias)  # type: ignore[no-any-return]
