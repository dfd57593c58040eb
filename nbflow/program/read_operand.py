"""Read operands of a program from the checkpoint: a tensor or a rank's shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import nbflow_kernels as nk
from nbflow.checkpoint import WeightFile
from nbflow.program.records import Operand
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_layout import TensorLayout
from nbflow_kernels.errors import UsageError

FLOAT_DTYPES = {"f32": np.float32, "f16": np.float16}


def has_whole_rows(spec: ModelSpec, file: WeightFile, operand: Operand) -> bool:
    """Return whether the rows of a matrix are rows that the file stores, so that few are read."""
    layout = spec.tensor_layout(operand.name)
    changed = layout.columns is not None or layout.head_rows or layout.transposed or layout.step > 1
    return not changed and len(spec.shape_of(operand.name)) == 2 and file.is_as_stored(layout.name)


def read_operand(spec: ModelSpec, file: WeightFile, operand: Operand) -> np.ndarray:
    """Return a tensor of the model, or a shard of it, in its stored type.

    Output features come first, however the checkpoint orders them.
    """
    layout = spec.tensor_layout(operand.name)
    if layout.columns is not None:
        return np.ascontiguousarray(file.array(layout.name, rows=operand.rows)[:, layout.columns])
    if len(spec.shape_of(operand.name)) == 1 and len(file.shape(layout.name)) > 1:
        row = None if layout.rows is None else layout.rows[0]  # one head
        return file.array(layout.name, row).reshape(-1)[slice(*(operand.rows or (None,)))]
    if layout.head_rows:
        return _per_head_transposed(spec, file, operand, layout)
    spans = _spans(spec, operand, layout)
    if layout.transposed:
        first, end = operand.columns or (0, spec.shape_of(operand.name)[1])
        rows = layout.base + first, layout.base + end
        arrays = [file.array(layout.name, rows, s, flat=True).T for s in spans]
    else:
        arrays = [file.array(layout.name, s, operand.columns, flat=True) for s in spans]
    if layout.step > 1:
        arrays = [array[:: layout.step] for array in arrays]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return np.ascontiguousarray(whole)


def _per_head_transposed(
    spec: ModelSpec, file: WeightFile, operand: Operand, layout: TensorLayout
) -> np.ndarray:
    """Return matrices of heads that the checkpoint stores transposed per head."""
    n_rows, width = layout.head_rows, layout.shape[-1]  # of a head: rows stored, rows returned
    first, end = (row // width for row in operand.rows or (0, spec.shape_of(operand.name)[0]))
    spans = layout.cut((first * n_rows, end * n_rows))
    heads = [file.array(layout.name, span, flat=True).T for span in spans]
    return np.concatenate(heads)


def read_quantized_operand(
    spec: ModelSpec, file: WeightFile, operand: Operand
) -> list[nk.QuantTensor]:
    """Return a block-quantized tensor, or a shard of it, as row chunks to concatenate."""
    layout = spec.tensor_layout(operand.name)
    if layout.transposed:
        raise UsageError(
            f"tensor {layout.name} is block-quantized and stored as (in, out); its rows cannot be "
            "read: convert the checkpoint to a float type"
        )
    spans = _spans(spec, operand, layout)
    chunks = [file.quantized(layout.name, s, operand.columns, flat=True) for s in spans]
    return chunks if layout.step == 1 else [_every(rows, layout.step) for rows in chunks]


def read_operand_rows(spec: ModelSpec, file: WeightFile, operand: Operand, out: np.ndarray) -> None:
    """Read the stored bytes of rows (`has_whole_rows`) to `out`, uint8 (rows, row bytes)."""
    layout, done = spec.tensor_layout(operand.name), 0
    for span in _spans(spec, operand, layout):
        end = len(out) if span is None else done + span[1] - span[0]
        file.read_rows(layout.name, span, operand.columns, out[done:end])
        done = end


def _every(rows: nk.QuantTensor, step: int) -> nk.QuantTensor:
    data = np.ascontiguousarray(rows.data[::step])
    shape = len(data), rows.shape[1]
    of_columns = rows.column_order, rows.column_scales
    return nk.QuantTensor(rows.format, shape, data, None, *of_columns)


def _spans(
    spec: ModelSpec, operand: Operand, layout: TensorLayout
) -> Sequence[tuple[int, int] | None]:
    """Return the rows of the checkpoint's tensor that make up an operand."""
    if operand.rows is None and layout.rows is None:
        return (None,)
    return layout.cut(operand.rows or (0, spec.shape_of(operand.name)[0]))


def convert(matrix: np.ndarray, format: str, name: str) -> Any:
    """Convert a float matrix to a weight format: an array (bf16 as uint16) or a `QuantTensor`."""
    if format in FLOAT_DTYPES:
        with np.errstate(over="ignore"):
            result = matrix.astype(FLOAT_DTYPES[format])
        if not np.isfinite(result).all():
            largest = float(np.abs(matrix.astype(np.float64)).max())
            raise UsageError(
                f"tensor {name} does not fit into {format}: its largest magnitude is {largest:g}; "
                "keep it in f32 or bf16"
            )
        return result
    try:
        quantized = nk.quantize(matrix, format)
    except UsageError as error:
        raise UsageError(f"tensor {name}: {error}") from error
    return quantized.array if quantized.is_float else quantized


def operand_bytes(operand: Any) -> int:
    """Return the bytes of an array or a quantized tensor in the layout that kernels read."""
    if isinstance(operand, nk.QuantTensor):
        if operand.packed_nbytes:
            return operand.packed_nbytes + operand.extra_nbytes
        if operand.units_nbytes:
            storage = operand.nbytes if operand.has_storage else operand.extra_nbytes
            return operand.units_nbytes + storage
        return operand.nbytes
    return int(operand.nbytes)
