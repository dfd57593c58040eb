"""The bytes of a rank's weights in its memory, known from the program before any is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import nbflow_kernels as nk
from nbflow.planner.planned_model import PlannedModel
from nbflow.program.records import Op, Operand, Program
from nbflow_kernels.formats.memory_size import layout_bytes, storage_bytes

FLOAT32_BYTES = 4
OUTLIER_BYTES = 8
"""Of an outlier: its value and its column."""


@dataclass(frozen=True)
class WeightBytes:
    """What `WeightLoader` will hold."""

    n_bytes: int
    """All of it."""
    table_bytes: int
    """Tables that are only looked up, which may lie in the host's memory beside a device."""


def weight_bytes(
    program: Program, model: PlannedModel, on_device: bool, outliers: float = 0.0
) -> WeightBytes:
    """Return the bytes of `WeightLoader` for a program, in the layout it computes from.

    Parameters
    ----------
    program : Program
        A rank's program, fused.
    model : PlannedModel
        How its weights are stored.
    on_device : bool
        Whether they go to a CUDA device.
    outliers : float
        Share of the weights of converted matrices that are kept beside their format.
    """
    looked_up = {op.weights for op in program.ops if op.kind == "embedding" and op.weights}
    multiplied = {op.weights for op in program.ops if op.kind == "linear"}
    sizes: dict[object, int] = {}
    tables = 0
    for index, op in enumerate(program.ops):
        if op.bias:
            sizes["bias", index] = FLOAT32_BYTES * sum(_n_numbers(program, b) for b in op.bias)
        if op.kind == "embedding" and op.weights not in multiplied:
            n = _table(program, model, op)
            tables += 0 if (op.weights or index) in sizes else n
            sizes[op.weights or index] = n
            continue
        for parts in _matrices(op, model):
            shared = op.weights in looked_up
            sizes[parts] = _matrix(program, model, op, parts, on_device, shared, outliers)
    return WeightBytes(sum(sizes.values()), tables)


def _matrices(op: Op, model: PlannedModel) -> list[tuple[Operand, ...]]:
    """Return the parts of each operand of an op, as `WeightLoader` joins them."""
    if op.kind in ("linear", "embedding"):
        runs = groupby(op.weights, key=lambda w: (_chosen(model, w), model.kept_format(w.name)))
        return [tuple(run) for _, run in runs]
    return [(w,) for w in op.weights]


def _matrix(
    program: Program,
    model: PlannedModel,
    op: Op,
    parts: tuple[Operand, ...],
    on_device: bool,
    shared: bool,
    outliers: float,
) -> int:
    """Return the bytes of the parts of a matrix, one below the other; or of a vector."""
    spec = program.spec
    if op.kind in ("attention", "cross_attention"):  # a bias for each distance, of each head
        heads = parts[0].shape(spec.shape_of(parts[0].name))[-1]
        return FLOAT32_BYTES * heads * (2 * spec.max_context - 1)
    if op.kind not in ("linear", "embedding", "experts", "heads_linear"):
        return FLOAT32_BYTES * sum(_n_numbers(program, part) for part in parts)
    format, (n_rows, n_columns) = _joined(program, model, parts)
    if op.attrs.get("normalize_rows"):
        format = "f32"
    elif shared and nk.FORMATS[format].block_size == 1:  # an array for both uses
        return storage_bytes(format, n_rows, n_columns)
    total = layout_bytes(format, n_rows, n_columns, on_device)
    if shared and on_device and not nk.FORMATS[format].decodes_from_storage:
        total += storage_bytes(format, n_rows, n_columns)  # rows are decoded from there
    if outliers and _chosen(model, parts[0]):
        total += round(outliers * n_rows * n_columns) * OUTLIER_BYTES + 4 * (n_rows + 1)
    return total


def _chosen(model: PlannedModel, part: Operand) -> str | None:
    """Return the format that a matrix is converted to, or None."""
    formats = model.formats
    return None if formats is None else formats.of(part.name, model.spec.shape_of(part.name))


def _table(program: Program, model: PlannedModel, op: Op) -> int:
    """Return the bytes of a table that is looked up; one without weights is computed."""
    spec = program.spec
    if not op.weights:
        return FLOAT32_BYTES * spec.max_context * spec.hidden_size
    format, (n_rows, n_columns) = _joined(program, model, op.weights)
    return storage_bytes(format, n_rows, n_columns)


def _joined(
    program: Program, model: PlannedModel, parts: tuple[Operand, ...]
) -> tuple[str, tuple[int, int]]:
    """Return format and shape of matrices one below the other."""
    spec = program.spec
    shapes = [part.shape(spec.shape_of(part.name)) for part in parts]
    formats = [model.format_of(part.name) for part in parts]
    format = formats[0] if len(set(formats)) == 1 else "f32"
    return format, (sum(math.prod(s[:-1]) for s in shapes), shapes[0][-1])


def _n_numbers(program: Program, part: Operand) -> int:
    return math.prod(part.shape(program.spec.shape_of(part.name)))
