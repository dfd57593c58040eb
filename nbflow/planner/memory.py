"""Memory accounting: bytes of a rank's weights, KV cache and buffers, from its program.

The one accounting of bytes: memory plans (`nbflow.planner.memory_plan`), predictions and sweeps use
it.  Weights count in the layout that the kernels read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import nbflow_kernels as nk
from nbflow.planner.planned_model import PlannedModel
from nbflow.program import build, build_cross_kv, fuse
from nbflow.program.cost import FLOAT32_BYTES, kv_token_bytes, state_row_bytes, workspace_bytes
from nbflow.program.records import Op, Operand, Program, expert_parts
from nbflow.spec.layer_specs import RopeSpec
from nbflow_kernels.formats.memory_size import layout_bytes, storage_bytes
from nbflow_kernels.moe.cpu_captured import Sizes
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows

PAGE_SIZE = 64
"""Tokens of a KV page: one tile of attention, and long enough for the hardware prefetcher (pages of
16 tokens read up to 50 % slower)."""
MIN_ROWS = 8
"""Rows that a buffer has at least."""
OUTLIER_BYTES = 8
"""Bytes of an outlier: its value and its column."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a rank's weights."""

    n_bytes: int
    """All weights."""
    table_bytes: int
    """Tables that are only looked up, which a device can read from host memory."""


def weight_bytes(
    program: Program,
    model: PlannedModel,
    on_device: bool,
    outliers: float = 0.0,
    counts: Mapping[int, int] | None = None,
) -> WeightBytes:
    """Return the bytes of a program's weights in the layout that the kernels read.

    Parameters
    ----------
    program : Program
        Fused program of a rank.
    model : PlannedModel
        Formats of its weights.
    on_device : bool
        Layout of CUDA devices instead of the CPU's.
    outliers : float
        Share of the weights of converted matrices that are kept apart.
    counts : mapping of int to int, optional
        Layer of the program -> number of equal layers that it stands for; each for itself by
        default.
    """
    looked_up = program.tables
    multiplied = {op.weights for op in program.ops if op.kind == "linear"}
    sizes: dict[object, int] = {}
    tables = 0
    for index, op in enumerate(program.ops):
        n = 1 if counts is None or op.layer is None else counts[op.layer]
        if not n:
            continue
        if op.bias:
            sizes["bias", index] = n * FLOAT32_BYTES * sum(_n_weights(program, b) for b in op.bias)
        if op.kind == "embedding" and op.weights not in multiplied:
            n_bytes = _table(program, model, op, on_device)
            tables += 0 if (op.weights or index) in sizes else n_bytes
            sizes[op.weights or index] = n_bytes
            continue
        if op.kind == "experts":
            sizes["experts", index] = n * _experts(program, model, op, on_device, outliers)
            continue
        shared = op.kind == "linear" and op.weights in looked_up
        for operands in _matrices(op, model):
            n_bytes = _matrix(program, model, op, operands, on_device, shared, outliers)
            # all layers share what is not named after one, e.g. a relative position bias
            sizes[operands] = (n if operands[0].name.startswith("layers.") else 1) * n_bytes
    return WeightBytes(sum(sizes.values()), tables)


def model_bytes(model: PlannedModel, kv: str, outliers: float = 0.0) -> tuple[int, int, int]:
    """Return the bytes of a whole model on one CPU rank.

    These are the bytes of its weights, of its KV cache per token, and of its recurrent states per
    sequence.

    Examples
    --------
    >>> from nbflow.planner import planned_model
    >>> model_bytes(planned_model("llama2_7b", "q4"), "f16")[1:]
    (524288, 0)
    """
    program = build(model.spec)
    programs = [(program, model)]
    if model.encoder is not None:
        programs += [
            (build(model.encoder.spec), model.encoder),
            (build_cross_kv(model.spec), model),
        ]
    weights = sum(weight_bytes(fuse(p), m, False, outliers).n_bytes for p, m in programs)
    return weights, kv_token_bytes(program, kv), state_row_bytes(program)


def buffer_bytes(
    program: Program,
    model: PlannedModel,
    activations: str,
    n_tokens: int,
    n_states: int,
    n_logits: int,
    on_device: bool = False,
) -> int:
    """Return the bytes of the buffers of a step of this size, and of the rotary tables."""
    size = max(n_tokens, MIN_ROWS), max(n_states, MIN_ROWS), max(n_logits, MIN_ROWS)
    total = workspace_bytes(program, size[0], size[2], size[1])
    ropes: set[RopeSpec] = {op.attrs["rope"] for op in program.ops if op.kind == "rope"}
    total += FLOAT32_BYTES * sum(program.spec.rope_lengths) * sum(rope.dim for rope in ropes)
    if on_device:
        return total
    int8_rows: dict[int, int] = {}  # by columns: ops of one width share a buffer
    floats: dict[tuple[str, int], int] = {}  # by name and columns, likewise
    for op in program.ops:
        out = program.buffers.get(op.out)
        if op.kind == "experts":
            _add_expert_buffers(program, model, op, activations, n_tokens, floats, int8_rows)
        if op.kind != "linear" or out is None or not out.n_rows(n_tokens, n_states, n_logits):
            continue
        for operands in _matrices(op, model):
            format, (_, width) = concatenated(program, model, operands)
            if activations == "int8" and nk.FORMATS[format].block_size > 1:
                int8_rows[width] = max(out.n_rows(*size), int8_rows.get(width, 0))
            if model.kept_groups(operands[0].name) is not None:
                key = "gathered", width
                floats[key] = max(out.n_rows(*size), floats.get(key, 0))
    total += sum(int(Int8Rows.size(rows, columns)) for columns, rows in int8_rows.items())
    return total + sum(FLOAT32_BYTES * rows * columns for (_, columns), rows in floats.items())


def _add_expert_buffers(
    program: Program, model: PlannedModel, op: Op, activations: str, n_tokens: int,
    floats: dict[tuple[str, int], int], int8_rows: dict[int, int],
) -> None:  # fmt: skip
    """Add the rows of buffers of a layer of experts in captured steps on the CPU."""
    moe, first = program.spec.moe, []
    assert moe is not None
    for operands in expert_parts(op, op.weights):
        kinds = {
            (model.format_of(w.name), *w.shape(program.spec.shape_of(w.name))) for w in operands
        }
        format = model.format_of(operands[0].name)
        kept = any(model.kept_groups(w.name) is not None for w in operands)
        if len(kinds) > 1 or kept or nk.FORMATS[format].decodes_from_storage:
            return  # such a layer is not captured
        takes_int8 = activations == "int8" and nk.FORMATS[format].takes_int8
        first.append((operands[0].shape(program.spec.shape_of(operands[0].name))[0], takes_int8))
    *first, down = first
    gated = op.attrs.get("gated", True)
    sizes = Sizes(
        program.buffers[op.inputs[0]].width, tuple(first), down, gated and len(first) == 1,
        op.attrs.get("weigh_inputs", False),
    )  # fmt: skip
    of_floats, of_int8 = sizes.buffers(n_tokens, moe.top_k)
    for key, rows in of_floats.items():
        floats[key] = max(rows, floats.get(key, 0))
    for columns, rows in of_int8.items():
        int8_rows[columns] = max(rows, int8_rows.get(columns, 0))


def _matrices(op: Op, model: PlannedModel) -> list[tuple[Operand, ...]]:
    """Return the operands of each matrix of an op, as `WeightLoader` concatenates them."""
    if op.kind in ("linear", "embedding"):

        def of_one(w: Operand) -> tuple[object, ...]:
            return _converted(model, w), model.kept_format(w.name), model.kept_groups(w.name)

        return [tuple(run) for _, run in groupby(op.weights, key=of_one)]
    return [(w,) for w in op.weights]


def _experts(
    program: Program, model: PlannedModel, op: Op, on_device: bool, outliers: float
) -> int:
    """Return the bytes of the matrices of experts; equal ones, up to thousands, are sized once."""
    groups: dict[object, list[Operand]] = {}
    for operand in op.weights:
        converted = _converted(model, operand) if outliers else None
        key = model.format_of(operand.name), program.spec.shape_of(operand.name), converted
        groups.setdefault(key, []).append(operand)
    return sum(
        len(group) * _matrix(program, model, op, (group[0],), on_device, False, outliers)
        for group in groups.values()
    )


def _matrix(
    program: Program,
    model: PlannedModel,
    op: Op,
    operands: tuple[Operand, ...],
    on_device: bool,
    shared: bool,
    outliers: float,
) -> int:
    """Return the bytes of a matrix, or of a vector."""
    spec = program.spec
    if op.kind in ("attention", "cross_attention"):  # relative position bias by head and distance
        heads = operands[0].shape(spec.shape_of(operands[0].name))[-1]
        return FLOAT32_BYTES * heads * (2 * spec.max_context - 1)
    if op.kind not in ("linear", "embedding", "experts", "heads_linear"):
        return FLOAT32_BYTES * sum(_n_weights(program, operand) for operand in operands)
    format, (n_rows, n_columns) = concatenated(program, model, operands)
    if op.attrs.get("normalize_rows"):
        format = "f32"
    elif shared and nk.FORMATS[format].block_size == 1:  # a tied head: one array for both uses
        return storage_bytes(format, n_rows, n_columns)
    total = layout_bytes(format, n_rows, n_columns, on_device)
    groups = model.kept_groups(operands[0].name)
    if groups is not None:
        whole = 0, spec.shape_of(operands[0].name)[-1]
        total += groups.extra_bytes(operands[0].columns or whole)
    if outliers and _converted(model, operands[0]):
        total += round(outliers * n_rows * n_columns) * OUTLIER_BYTES + 4 * (n_rows + 1)
    return total


def _converted(model: PlannedModel, operand: Operand) -> str | None:
    """Return the format that a matrix is converted to, or None."""
    formats = model.formats
    return None if formats is None else formats.of(operand.name, model.spec.shape_of(operand.name))


def _table(program: Program, model: PlannedModel, op: Op, on_device: bool) -> int:
    """Return the bytes of an embedding table; one without weights is computed (sinusoidal)."""
    spec = program.spec
    if not op.weights:
        return FLOAT32_BYTES * spec.max_context * spec.hidden_size
    format, (n_rows, n_columns) = concatenated(program, model, op.weights)
    if nk.FORMATS[format].block_size > 1 and not on_device:  # rows of the products' layout
        return layout_bytes(format, n_rows, n_columns, on_device)
    return storage_bytes(format, n_rows, n_columns)


def concatenated(
    program: Program, model: PlannedModel, operands: tuple[Operand, ...]
) -> tuple[str, tuple[int, int]]:
    """Return format and shape of matrices concatenated by rows, as they are stored."""
    spec = program.spec
    shapes = [operand.shape(spec.shape_of(operand.name)) for operand in operands]
    formats = [model.format_of(operand.name) for operand in operands]
    format = formats[0] if len(set(formats)) == 1 else "f32"
    n_rows, n_columns = sum(math.prod(s[:-1]) for s in shapes), shapes[0][-1]
    groups = model.kept_groups(operands[0].name)
    if groups is not None:  # a rank's part of the columns may have another format, and padding
        columns = operands[0].columns or (0, n_columns)
        format, n_columns = groups.format(columns).name, groups.n_stored(columns)
    return format, (n_rows, n_columns)


def _n_weights(program: Program, operand: Operand) -> int:
    return math.prod(operand.shape(program.spec.shape_of(operand.name)))
