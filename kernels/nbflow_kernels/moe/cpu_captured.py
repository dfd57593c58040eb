"""Layers of experts inside a captured graph: the products find the router's choice when they run.

A graph holds a block of words with the arguments of each call (`nbflow_kernels.cpu.graph`).  The
blocks of a product with another expert, or of other rows, differ in a few words, mostly addresses.
`ExpertMatrices` captures the launcher of the product for each expert and compares the blocks;
`_multiply_chunks` writes the words of the chosen experts into a copy of a block and calls the
kernel.  So every format and arithmetic of the launchers is supported, and results are bitwise those
of `nbflow_kernels.fused_moe`.

Pairs of token and expert are sorted by expert; up to `CHUNK_ROWS` rows of one expert are a chunk.
The row groups of all chunks are divided among the threads together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.activation import cpu as activation_cpu
from nbflow_kernels.activation.cpu_glu_apart import glu_apart
from nbflow_kernels.cpu import atomics, interpreter, jit, simd
from nbflow_kernels.cpu.graph import GraphNode, machine_calls
from nbflow_kernels.cpu.parallel_for import capture, hold, parallel_for
from nbflow_kernels.embedding.gather import gather_rows
from nbflow_kernels.errors import UsageError
from nbflow_kernels.moe import cpu
from nbflow_kernels.moe.routing import routing_numbers
from nbflow_kernels.quantized_matmul import cpu as quant_cpu
from nbflow_kernels.quantized_matmul.int8_activations import ROWS, Int8Rows

CHUNK_ROWS = 8
"""Rows of a product at most: as many as the kernels multiply while they read a weight once."""
MAX_PAIRS = 512
"""Pairs of token and expert up to which a layer is captured: with more, Python costs little."""

Words = NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """Widths of the arrays of a layer of experts.

    Parameters
    ----------
    columns : int
        Columns of the tokens.
    first : tuple of (int, bool)
        Rows of the matrices of each first projection, and whether it reads int8 activations.
    down : (int, bool)
        Rows of the matrices of the down projections, and whether they read int8 activations.
    joined : bool
        True if one first projection has the rows of gates and ups.
    weigh_inputs : bool
        As of `nbflow_kernels.fused_moe`.
    """

    columns: int
    first: tuple[tuple[int, bool], ...]
    down: tuple[int, bool]
    joined: bool
    weigh_inputs: bool

    def buffers(
        self, n_tokens: int, top_k: int
    ) -> tuple[dict[tuple[str, int], int], dict[int, int]]:
        """Return the rows of the buffers that captured steps of up to `n_tokens` tokens use.

        Float32 buffers by name and columns, as `Scratch.floats` takes them, and `Int8Rows` by
        columns.
        """
        n_pairs = top_k * min(n_tokens, MAX_PAIRS // top_k)
        width, int8_down = self.down
        hidden = self.first[0][0] // 2 if self.joined else self.first[0][0]
        floats = {("inputs", self.columns): n_pairs, ("outputs", width): n_pairs}
        floats |= {(f"first {i}", n): n_pairs for i, (n, _) in enumerate(self.first)}
        floats[("hidden", hidden)] = n_pairs
        if self.weigh_inputs:
            floats[("weighed", self.columns)] = n_pairs
        int8 = {self.columns: n_pairs + ROWS} if any(int8 for _, int8 in self.first) else {}
        return floats, int8 | ({hidden: n_pairs + ROWS} if int8_down else {})


@dataclass(frozen=True)
class Scratch:
    """Allocator of buffers that the layers of a model share in turn."""

    floats: Callable[[str, int, int], NDArray[np.float32]]
    """``floats(name, n_rows, n_columns)``."""
    int8_rows: Callable[[int, int], Int8Rows]
    """``int8_rows(n_rows, n_columns)``."""

    def quantized(self, x: NDArray[np.float32]) -> Int8Rows:
        """Launch the int8 quantization of `x` to rows that `Int8Rows.part` may divide."""
        rows = self.int8_rows(len(x) + ROWS, x.shape[1])
        quant_cpu.quantize_activations(x, rows)
        return rows


@dataclass(frozen=True)
class Chunks:
    """Chunks of rows in order of experts, written by `_make_chunks` when the graph runs."""

    bounds: Words
    """(pairs, 3): expert, first row, number of rows."""
    count: Words
    """(1,): chunks in use."""
    most_rows: int
    """Rows of a chunk at most."""


class ExpertMatrices:
    """The matrices of a layer's experts for one projection, of one shape.

    Parameters
    ----------
    matrices : sequence of arrays or QuantTensors, shape (N, K)
        One for each expert.
    bias : array of float32, shape (E, N), optional
        Added to the products.
    activations : {"f32", "bf16", "int8"}
        Arithmetic of quantized matrices.
    """

    def __init__(self, matrices: Sequence[Any], bias: Any, activations: str) -> None:
        self._matrices, self._bias, self._activations = matrices, bias, activations
        self._varying: list[tuple[Words, Words]] | None = None
        self.width: int = matrices[0].shape[0]
        """Rows of a matrix."""
        self.takes_int8 = activations == "int8" and any(map(cpu.is_block_quantized, matrices))
        """True if a product reads int8 activations."""
        self.can_vary = all(_differ_by_address(matrices[0], w) for w in matrices)
        """True if the calls of all matrices have the same kernels."""

    def launch(self, chunks: Chunks, x: Any, rows: Int8Rows | None, out: Any) -> None:
        """Launch the products of all chunks.

        Parameters
        ----------
        chunks : Chunks
            The chunks; they are read when the products run.
        x : array of float32, shape (P, K)
            Rows in order of experts.
        rows : Int8Rows, optional
            `x` in int8, with `ROWS` rows more; needed if `takes_int8`.
        out : array of float32, shape (P, N)
            Where to write the products.
        """

        def calls(e: int, first: int, n: int) -> list[GraphNode]:
            part = slice(first, first + n)
            some = None if rows is None else rows.part(part.start, part.stop)
            bias = None if self._bias is None else self._bias[e]
            with capture() as captured:
                cpu.multiply(x[part], some, self._matrices[e], bias, self._activations, out[part])
            return captured.calls

        if self._varying is None:
            self._varying = _varying_words([calls(e, 0, 1) for e in range(len(self._matrices))])
        n_pairs = len(chunks.bounds)
        by_count = [calls(0, 0, n) for n in range(1, chunks.most_rows + 1)]
        second = calls(0, min(1, n_pairs - 1), 1)
        hold(x, rows, out, self._matrices, self._bias)
        for i, varying in enumerate(self._varying):
            made = machine_calls([of_count[i] for of_count in by_count])
            blocks = np.array([block for _, block in made])
            steps = machine_calls([second[i]])[0][1] - blocks[0]
            n_items = int(by_count[0][i].n_rows)
            parallel_for(
                _multiply_chunks, n_pairs * n_items, n_pairs * by_count[0][i].work,
                chunks.bounds, chunks.count, np.array([function for function, _ in made]), blocks,
                *varying, np.flatnonzero(steps), steps[steps != 0], n_items, n_pairs * n_items,
            )  # fmt: skip


def _differ_by_address(first: Any, other: Any) -> bool:
    """Return True if products with two matrices are the same calls but for addresses and sizes."""
    if isinstance(first, np.ndarray) or isinstance(other, np.ndarray):
        same = type(first) is type(other) and first.dtype == other.dtype
        return same and first.flags.num == other.flags.num and first.shape == other.shape
    if first.column_order is not None or other.column_order is not None:
        return False  # each matrix reads the activations in an order of its own
    # a user's function decodes rows into an array that its launcher allocates
    same = first.format == other.format and not first.format.decodes_from_storage
    both = (first.outliers is None) == (other.outliers is None)
    return same and both and first.shape == other.shape


def _varying_words(calls: Sequence[Sequence[GraphNode]]) -> list[tuple[Words, Words]]:
    """Return, for each call of a product, the words that depend on the matrix, and their values.

    Parameters
    ----------
    calls : sequence of sequences of GraphNode
        The calls of each matrix for the same rows.

    Returns
    -------
    list of (indices (n,), values (E, n))
    """
    found = []
    for of_call in zip(*calls, strict=True):
        blocks = np.array([block for _, block in machine_calls(of_call)])
        at = np.flatnonzero((blocks != blocks[0]).any(axis=0))
        found.append((at, np.ascontiguousarray(blocks[:, at])))
    return found


class ExpertLayer:
    """A layer of experts, to be captured; parameters as of `nbflow_kernels.fused_moe`."""

    def __init__(
        self, *, gate_up: Any, down: Any, up: Any = None, activation: str, gated: bool = True,
        weigh_inputs: bool = False, gate_up_bias: Any = None, up_bias: Any = None,
        down_bias: Any = None, activations: str = "f32",
    ) -> None:  # fmt: skip
        self._activation, self._weigh_inputs = activation, weigh_inputs
        self._gated = gated
        given = [(gate_up, gate_up_bias)] + ([] if up is None else [(up, up_bias)])
        self._first = [ExpertMatrices(*one, activations) for one in given]
        self._down = ExpertMatrices(down, down_bias, activations)
        self._n_experts = len(down)
        self._can_vary = all(matrices.can_vary for matrices in (*self._first, self._down))

    def can_capture(self, n_pairs: int) -> bool:
        """Return True if `launch` can capture the layer for a number of pairs.

        Otherwise the layer needs `nbflow_kernels.fused_moe`: for many pairs, matrices of several
        formats, formats of users, and with compiling off.
        """
        return self._can_vary and 0 < n_pairs <= MAX_PAIRS and not interpreter.is_on()

    def reserve(self, columns: int, n_tokens: int, top_k: int, scratch: Scratch) -> None:
        """Allocate the buffers of captured steps of up to `n_tokens` tokens."""
        if not self._can_vary:
            return
        first = tuple((matrices.width, matrices.takes_int8) for matrices in self._first)
        down, joined = (self._down.width, self._down.takes_int8), self._gated and len(first) == 1
        floats, int8 = Sizes(columns, first, down, joined, self._weigh_inputs).buffers(
            n_tokens, top_k
        )
        for (name, width), n_rows in floats.items():
            scratch.floats(name, n_rows, width)
        for width, n_rows in int8.items():
            scratch.int8_rows(n_rows, width)

    def launch(
        self, x: NDArray[np.float32], logits: NDArray[np.float32], options: dict[str, Any],
        bias: NDArray[np.float32] | None, scale: NDArray[np.float32] | None, first: int,
        scratch: Scratch, out: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Launch the layer in a capture.

        Parameters
        ----------
        x : array of float32, shape (T, H)
            Tokens.
        logits : array of float32, shape (T, all experts)
            The router's output.
        options : dict
            Of `nbflow_kernels.moe_routing`, without `correction_bias`.
        bias : array of float32, shape (all experts,), optional
            `correction_bias`.
        scale : array of float32, shape (all experts,), optional
            Factors of the experts' weights.
        first : int
            The first expert of these matrices; the others belong to other ranks.
        scratch : Scratch
            Buffers.
        out : array of float32, shape (T, H)
            Where to write the result.
        """
        T, k = len(x), options["top_k"]
        numbers = routing_numbers(logits.shape[1], **options)
        weights, ids = np.zeros((T, k), np.float32), np.zeros((T, k), np.int32)
        cpu.routing(logits, bias, *numbers, weights, ids)
        factors = np.zeros(0, np.float32) if scale is None else scale
        parallel_for(_choose, 1, 0.0, factors, first, self._n_experts, weights, ids)
        if self._weigh_inputs:
            x, ids, weights = self._weighed(x, weights, ids, scratch)
        rows, inverse = np.zeros(T * k, np.int32), np.zeros((T, k), np.int32)
        indptr = np.zeros(self._n_experts + 1, np.int32)
        cpu.permute(ids, rows, indptr, inverse.reshape(ids.shape))
        bounds = np.zeros((T * k, 3), np.int64)
        chunks = Chunks(bounds, np.zeros(1, np.int64), min(CHUNK_ROWS, T))
        parallel_for(_make_chunks, 1, 0.0, indptr, chunks.bounds, chunks.count)
        y = self._outputs(self._hidden(x, rows, chunks, scratch), chunks, scratch)
        cpu.combine(y, weights, inverse, False, out)

    @staticmethod
    def _weighed(x: Any, weights: Any, ids: Any, scratch: Scratch) -> tuple[Any, Any, Any]:
        """Launch the product of tokens and weights; return it, its experts, and weights of 1."""
        T, k = weights.shape
        tokens = np.repeat(np.arange(T, dtype=np.int32), k)[:, None]
        weighed = scratch.floats("weighed", T * k, x.shape[1])
        cpu.combine(x, weights.reshape(-1, 1), tokens, False, weighed)
        return weighed, ids.reshape(-1, 1), np.ones_like(weights)

    def _hidden(self, x: Any, rows: Any, chunks: Chunks, scratch: Scratch) -> Any:
        """Launch the first products and the activation; return the result in order of experts."""
        n_pairs, width = len(rows), self._first[0].width
        inputs = scratch.floats("inputs", n_pairs, x.shape[1])
        gather_rows(rows, x, inputs)
        takes_int8 = any(matrices.takes_int8 for matrices in self._first)
        quantized = scratch.quantized(inputs) if takes_int8 else None
        found = [scratch.floats(f"first {i}", n_pairs, width) for i in range(len(self._first))]
        for matrices, result in zip(self._first, found, strict=True):
            matrices.launch(chunks, inputs, quantized, result)
        joined = self._gated and len(found) == 1
        hidden = scratch.floats("hidden", n_pairs, width // 2 if joined else width)
        if not self._gated:
            activation_cpu.elementwise(found[0], self._activation, hidden)
        elif joined:
            activation_cpu.glu(found[0], self._activation, True, hidden)
        else:
            glu_apart(found[0], found[1], self._activation, hidden)
        return hidden

    def _outputs(self, hidden: Any, chunks: Chunks, scratch: Scratch) -> Any:
        """Launch the down projections; return the experts' results."""
        quantized = scratch.quantized(hidden) if self._down.takes_int8 else None
        y = scratch.floats("outputs", len(hidden), self._down.width)
        self._down.launch(chunks, hidden, quantized, y)
        return y


@jit.kernel
def _choose(factors, first, n, weights, ids, start, stop):
    """Check and scale the weights; make ids those of a rank's `n` experts, -1 for others."""
    for t in range(ids.shape[0]):
        if weights[t, 0] != weights[t, 0]:
            ids[:] = -1  # the calls that follow in the graph still run
            raise UsageError(
                "the router's logits of a token must not have a NaN or +inf, nor be all -inf"
            )
        for j in range(ids.shape[1]):
            e = ids[t, j]
            if e >= 0 and len(factors) > 0:
                weights[t, j] *= factors[e]
            e -= first
            ids[t, j] = e if 0 <= e < n else -1


@jit.kernel
def _make_chunks(indptr, bounds, count, start, stop):
    """Divide the rows of each expert into chunks."""
    n = 0
    for e in range(len(indptr) - 1):
        for row in range(indptr[e], indptr[e + 1], CHUNK_ROWS):
            bounds[n, 0], bounds[n, 1] = e, row
            bounds[n, 2] = min(CHUNK_ROWS, indptr[e + 1] - row)
            n += 1
    count[0] = n


@jit.kernel
def _multiply_chunks(
    bounds, count, functions, blocks, matrix_at, matrix_words, row_at, row_steps, n_items, n_shares,
    start, stop
):  # fmt: skip
    """Call a product's kernel for shares [start, stop) of the items of all chunks.

    `functions` and `blocks` are trampolines and arguments by number of rows, less 1.
    """
    total = count[0] * n_items
    first, last = start * total // n_shares, stop * total // n_shares
    words = np.empty(blocks.shape[1], np.int64)
    for c in range(first // n_items, (last + n_items - 1) // n_items):
        e, row, n = bounds[c, 0], bounds[c, 1], bounds[c, 2]
        for i in range(len(words)):
            words[i] = blocks[n - 1, i]
        for i in range(len(row_at)):
            words[row_at[i]] += row_steps[i] * row
        for i in range(len(matrix_at)):
            words[matrix_at[i]] = matrix_words[e, i]
        failed = atomics.call_row_range(
            functions[n - 1], simd.address(words), max(first - c * n_items, 0),
            min(last - c * n_items, n_items),
        )  # fmt: skip
        if failed != 0:
            raise RuntimeError("a product of experts failed")
