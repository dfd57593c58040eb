"""Operands of a program's ops as they are stored in the checkpoint: a rank's part of a tensor."""

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


def read_part(spec: ModelSpec, file: WeightFile, part: Operand) -> np.ndarray:
    """Return a tensor of the model, or a part of it, in the type it is stored as.

    Parameters
    ----------
    spec : ModelSpec
        The model.
    file : WeightFile
        Its checkpoint.
    part : Operand
        Our tensor name, and which rows and columns.

    Returns
    -------
    array
        Rows first, as our names have it, whatever way the checkpoint stores it.
    """
    place = spec.tensor_layout(part.name)
    if place.columns is not None:
        return np.ascontiguousarray(file.array(place.name, rows=part.rows)[:, place.columns])
    if len(spec.shape_of(part.name)) == 1 and len(file.shape(place.name)) > 1:
        row = None if place.rows is None else place.rows[0]  # that of one head
        return file.array(place.name, row).reshape(-1)[slice(*(part.rows or (None,)))]
    if place.head_rows:
        return _turned(spec, file, part, place)
    spans = _spans(spec, part, place)
    if place.transposed:
        first, end = part.columns or (0, spec.shape_of(part.name)[1])
        rows = place.base + first, place.base + end
        pieces = [file.array(place.name, rows, s, flat=True).T for s in spans]
    else:
        pieces = [file.array(place.name, s, part.columns, flat=True) for s in spans]
    if place.step > 1:
        pieces = [piece[:: place.step] for piece in pieces]
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return np.ascontiguousarray(whole)


def _turned(spec: ModelSpec, file: WeightFile, part: Operand, place: TensorLayout) -> np.ndarray:
    """Return the matrices of some heads whose rows are columns in the checkpoint."""
    n_rows, width = place.head_rows, place.shape[-1]  # of a head in the checkpoint
    first, end = (row // width for row in part.rows or (0, spec.shape_of(part.name)[0]))
    spans = place.cut((first * n_rows, end * n_rows))
    heads = [file.array(place.name, span, flat=True).T for span in spans]
    return np.concatenate(heads)


def quantized_pieces(spec: ModelSpec, file: WeightFile, part: Operand) -> list[nk.QuantTensor]:
    """Return a tensor that is stored in blocks, or a part of it, in pieces one below the other."""
    place = spec.tensor_layout(part.name)
    if place.transposed:
        raise UsageError(
            f"tensor {place.name} is stored in blocks and as (in, out); its rows cannot be read"
        )
    spans = _spans(spec, part, place)
    pieces = [file.quantized(place.name, s, part.columns, flat=True) for s in spans]
    return pieces if place.step == 1 else [_every(piece, place.step) for piece in pieces]


def _every(rows: nk.QuantTensor, step: int) -> nk.QuantTensor:
    """Return every so many-th row, from the first on."""
    data = np.ascontiguousarray(rows.data[::step])
    return nk.QuantTensor(rows.format, (len(data), rows.shape[1]), data)


def _spans(spec: ModelSpec, part: Operand, place: TensorLayout) -> Sequence[tuple[int, int] | None]:
    """Return which rows of the checkpoint's tensor make a part."""
    if part.rows is None and place.rows is None:
        return (None,)
    return place.cut(part.rows or (0, spec.shape_of(part.name)[0]))


def convert(matrix: np.ndarray, format: str, name: str) -> Any:
    """Return a float matrix in a weight format: an array (bf16 as uint16), or a `QuantTensor`.

    Raises
    ------
    UsageError
        If a value is not finite or too large for the format.
    """
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


def stored_bytes(operand: Any) -> int:
    """Return the bytes of an array or a quantized tensor, in the layout it is computed from."""
    if isinstance(operand, nk.QuantTensor):
        if operand.packed_nbytes:
            return operand.packed_nbytes + operand.outlier_nbytes
        if operand.units_nbytes:
            storage = operand.nbytes if operand.has_storage else operand.outlier_nbytes
            return operand.units_nbytes + storage
        return operand.nbytes
    return int(operand.nbytes)
