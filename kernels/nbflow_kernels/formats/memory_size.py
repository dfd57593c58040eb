"""Sizes of matrices in storage and in the packed layouts, computed without packing."""

from __future__ import annotations

from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.layout_cpu import ROWS, packed_form
from nbflow_kernels.formats.layout_mma import ROWS as TILE_ROWS
from nbflow_kernels.formats.layout_mma import unit_form

FLOAT_COLUMNS = 8
"""Packed float matrices pad their columns to a multiple of it; see `PackedFloats`."""


def storage_bytes(format: str, n_rows: int, n_columns: int) -> int:
    """Return the storage bytes of a matrix, with whole blocks in each row."""
    known = FORMATS[format]
    return n_rows * -(-n_columns // known.block_size) * known.block_bytes


def layout_bytes(format: str, n_rows: int, n_columns: int, on_device: bool = False) -> int:
    """Return the bytes of a matrix after `QuantTensor.drop_storage`, without outliers.

    Weights whose scales need a wider type than usual in their format take more.

    Parameters
    ----------
    format : str
        Name of a weight format.
    n_rows, n_columns : int
        Shape.
    on_device : bool
        Size of the MMA layout for CUDA, instead of the CPU layout.

    Examples
    --------
    >>> import numpy as np
    >>> from nbflow_kernels import quantize
    >>> from nbflow_kernels.formats.memory_size import layout_bytes
    >>> tensor = quantize(np.ones((17, 100), np.float32), "q4")
    >>> tensor.drop_storage()
    >>> tensor.packed_nbytes == layout_bytes("q4", 17, 100)
    True
    """
    known = FORMATS[format]
    stored = storage_bytes(format, n_rows, n_columns)
    if known.decodes_from_storage:
        return stored
    if isinstance(known, FloatFormat):
        rows = -(-n_rows // ROWS) * ROWS
        columns = -(-n_columns // FLOAT_COLUMNS) * FLOAT_COLUMNS
        return stored if on_device else rows * columns * known.block_bytes
    if on_device and not known.has_mma_layout:
        return stored
    if on_device:
        return -(-n_rows // TILE_ROWS) * unit_form(known.integer_form).tile_bytes(n_columns)
    form = packed_form(known.integer_form)
    columns = -(-n_columns // known.block_size) * known.block_size
    return -(-n_rows // ROWS) * -(-columns // form.block) * form.block_bytes
