"""A model cut into stages that run one by one: the embedding, each layer, the head.

A stage is the sub-program between two states of the residual stream, with weights, KV pages and
its own buffers.  Its tensors can be replaced one by one; it runs the engine's kernels, so measured
errors are those of the engine.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow.distributed.device import Device
from nbflow.executor import HOST, CpuExecutor, Step, WeightLoader, make_executor, make_step
from nbflow.executor.executor import Executor
from nbflow.kv_cache import BlockTable, StateStorage, make_storage
from nbflow.kv_cache.state_table import ZEROS
from nbflow.planner.memory import PAGE_SIZE
from nbflow.program import build, fuse
from nbflow.program.records import Op, Program
from nbflow.spec.model_spec import ModelSpec
from nbflow_experiments.analysis.treatments import Checkpoint
from nbflow_kernels import QuantTensor
from nbflow_kernels.errors import UsageError

Floats = NDArray[np.float32]
Observer = Callable[[Op, tuple[NDArray[Any], ...]], None]


def stage_programs(spec: ModelSpec) -> list[Program]:
    """Return the programs of the embedding, of each layer and of the head, in this order."""
    if spec.encoder is not None:
        raise UsageError(f"{spec.name} has an encoder and a decoder; only decoders are analysed")
    whole = fuse(build(spec))
    inside = [i for i, op in enumerate(whole.ops) if op.layer is not None]
    first, end = inside[0], inside[-1] + 1
    layers = [[op for op in whole.ops if op.layer == i] for i in range(spec.n_layers)]
    return [
        _sub_program(whole, list(whole.ops[:first]), ()),
        *(_sub_program(whole, [Op("input", "x"), *ops], (i,)) for i, ops in enumerate(layers)),
        _sub_program(whole, [Op("input", "x"), *whole.ops[end:]], ()),
    ]


def _sub_program(whole: Program, ops: list[Op], layers: tuple[int, ...]) -> Program:
    """Extract ops of a program with the buffers they use."""
    names = {name for op in ops for name in (op.out, *op.inputs)}
    names |= {base for name in names & set(whole.buffers) if (base := whole.buffers[name].base)}
    buffers = {name: buffer for name, buffer in whole.buffers.items() if name in names}
    return dataclasses.replace(whole, ops=tuple(ops), buffers=buffers, layers=layers)


class Stage:
    """One stage of a model, in float32 by default.

    Parameters
    ----------
    program : Program
        One of `stage_programs`.
    weights : WeightLoader
        Its weights, not fused.
    kv : str
        Format of the keys and values, as in `nbflow.load`.
    activations : str
        Arithmetic of the products, as in `nbflow.load`.
    tables : dict, optional
        Rotary tables that the stages of a model share, on their device.
    device : Device
        Device that runs the stage; the weights are on the host, and copied when they change.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightLoader,
        kv: str = "f32",
        activations: str = "f32",
        tables: dict[Any, Any] | None = None,
        device: Device = HOST,
    ) -> None:
        self.program = program
        self.device = device
        self._exact = tuple(weights.operands)
        self._weights = copy.copy(weights)
        self._weights.operands = list(self._exact)
        spec = program.spec
        xp = np if device.on_host else device
        self._storage = make_storage(spec, program.kv_layers, PAGE_SIZE, program.heads_of, kv, xp)
        self._states = StateStorage(program.states, xp)
        self._activations = activations
        self._tables: dict[Any, Any] = {} if tables is None else tables
        self._executor = self._bound()
        self._out = program.ops[-1].out if not program.layers else "x"
        self._replaced: dict[str, int] = {}

    @classmethod
    def read(
        cls,
        checkpoint: Checkpoint,
        program: Program,
        tables: dict[Any, Any] | None = None,
        device: Device = HOST,
    ) -> Stage:
        """Return a stage with the checkpoint's weights in float32."""
        weights = WeightLoader(program, checkpoint.file, "f32", joined=False)
        if device.on_host:
            weights.finalize(HOST)
        return cls(program, weights, tables=tables, device=device)

    def _bound(self) -> Executor:
        """Return an executor with the present weights."""
        weights = self._weights
        if not self.device.on_host:
            weights = copy.copy(weights)
            weights.operands, weights.bias = list(weights.operands), list(weights.bias)
            weights.finalize(self.device)
        executor = make_executor(
            self.program,
            weights,
            self._storage,
            activations=self._activations,
            device=self.device,
            states=self._states,
        )
        executor.rope_tables = self._tables
        return executor

    def on_host(self) -> Stage:
        """Return this stage on the CPU, where inputs of matrices can be observed."""
        if self.device.on_host:
            return self
        weights = copy.copy(self._weights)
        weights.operands = list(self._exact)
        return Stage(self.program, weights)

    @property
    def layer(self) -> int:
        """Return the layer index; -1 for the embedding and the head."""
        return self.program.layers[0] if self.program.layers else -1

    @property
    def tensors(self) -> list[str]:
        """Return the canonical names of the replaceable matrices."""
        matrices = ("linear", "experts", "embedding")
        ops = [op for op in self.program.ops if op.kind in matrices]
        return [weight.name for op in ops for weight in op.weights]

    def shown(self, name: str, matrix: Floats) -> Floats:
        """Return a matrix of the checkpoint as the stage multiplies with it."""
        ops = [op for op in self.program.ops if name in (weight.name for weight in op.weights)]
        if not any(op.attrs.get("normalize_rows") for op in ops):
            return matrix
        normal: Floats = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
        return normal

    def alike(self, kv: str = "f32", activations: str = "f32") -> Stage:
        """Return a stage that shares the weights, with another cache or activation format."""
        weights = copy.copy(self._weights)
        weights.operands = list(self._exact)
        return Stage(self.program, weights, kv, activations, self._tables, self.device)

    def use(self, tensors: Mapping[str, QuantTensor]) -> None:
        """Swap in matrices by canonical name; unnamed ones revert to the checkpoint's."""
        wanted = {name: id(tensor) for name, tensor in tensors.items()}
        if wanted == self._replaced:
            return
        unknown = wanted.keys() - set(self.tensors)
        if unknown:
            raise UsageError(f"no matrix of this stage is called {min(unknown)!r}")
        self._weights.operands[:] = [
            tuple(
                tensors.get(operand.name, old)
                for operand, old in zip(op.weights, exact, strict=False)
            )
            or exact
            for op, exact in zip(self.program.ops, self._exact, strict=True)
        ]
        self._replaced = wanted
        if self.device.on_host:
            self._executor.release_bindings()
        else:
            self._executor.release_buffers()
            self._executor = self._bound()

    def observe(self, observer: Callable[[CpuExecutor], Observer] | None) -> None:
        """Install an observer, called before each op with weights; on the CPU only."""
        assert isinstance(self._executor, CpuExecutor)
        self._executor.observe = None if observer is None else observer(self._executor)
        self._executor.release_bindings()

    def run(self, step: Step, x: Floats | None = None) -> Floats:
        """Run the stage once from an empty cache.

        Parameters
        ----------
        step : Step
            Of `make_steps`.
        x : array of float32, shape (T, E), optional
            The residual stream; the embedding takes none.

        Returns
        -------
        array of float32, shape (T, E) or (T, V)
            The residual stream after the stage; the logits, or the last hidden states of a model
            without a head.
        """
        self._storage.ensure(int(step.pages.kv_indices.max()) + 1)
        self._states.ensure(1)
        self._states.copy_rows([(ZEROS, 0)])
        if x is not None:
            self._executor.external_rows = x
        self._executor.run(step)
        return self._executor.buffer(self._out, len(step.ids)).copy()

    def buffer(self, name: str, n_rows: int) -> Floats | None:
        """Return a copy of a buffer after the last run; None if the stage lacks it."""
        if name not in self.program.buffers:
            return None
        return self._executor.buffer(name, n_rows).copy()


def make_steps(spec: ModelSpec, windows: Iterable[Sequence[int] | NDArray[Any]]) -> list[Step]:
    """Return the steps that run windows of a text, each from an empty cache.

    Raises
    ------
    UsageError
        If a window is empty or longer than the context, or an id is outside the vocabulary.
    """
    from nbflow.engine.request_validation import check_ids

    steps = []
    for window in windows:
        ids = check_ids(spec, window, 0)
        table = BlockTable(PAGE_SIZE)
        table.add(0)
        steps.append(make_step(table, [0], [ids], range(len(ids))))
    if not steps:
        raise UsageError("the list of windows is empty")
    return steps


def predicts(spec: ModelSpec) -> bool:
    """Return whether the model predicts next tokens."""
    return spec.head and spec.causal
