"""Format to its quantizers: the published one ("plain") and the search ("best")."""

from __future__ import annotations

from typing import Any

from nbflow_kernels.formats.affine_format import AffineFormat
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.registry import Bytes, Floats, QuantFormat
from nbflow_kernels.formats.user import UserFormat
from nbflow_kernels.quantizers import codebook_formats, grid_formats, k_formats
from nbflow_kernels.quantizers.affine_formats import AffineQuantizer

AFFINE = AffineQuantizer()
QUANTIZERS: dict[str, Any] = {
    **k_formats.QUANTIZERS,
    **codebook_formats.QUANTIZERS,
    **grid_formats.QUANTIZERS,
}
"""Format name to its quantizers; `AffineFormat`s share one that reads the format's rule; float
formats round, and users' formats bring a function."""


def quantize_rows(
    format: QuantFormat,
    x: Floats,
    n_columns: int,
    encoder: str,
    importance: Floats | None = None,
) -> Bytes:
    """Return the bytes of each row of `x`, shape (rows, row bytes).

    Parameters
    ----------
    format : QuantFormat
        The format.
    x : array of float32, shape (rows, blocks * block_size)
        Finite weights; the columns from `n_columns` on are padding: copies of the row's last
        weight, whose error does not count.
    n_columns : int
        Columns that count.
    encoder : {"plain", "best"}
        The published quantizer, or the search.
    importance : array of float32, shape (1 or rows, blocks * block_size), optional
        Weights of the squared errors, 0 in the padding.

    Raises
    ------
    UsageError
        If the published quantizer knows no importance, or the format has no quantizer.
    """
    if isinstance(format, FloatFormat | UserFormat):
        return format.quantize_rows(x, n_columns, encoder, importance)
    found: Any = AFFINE if isinstance(format, AffineFormat) else QUANTIZERS[format.name]
    data: Bytes = found.quantize_rows(format, x, n_columns, encoder, importance)
    return data


def takes_importance(format: QuantFormat) -> bool:
    """Return whether the published quantizer of a format knows importance weights."""
    if isinstance(format, UserFormat):
        return "quantize_block_weighted" in format.code.functions
    if isinstance(format, AffineFormat):
        return AFFINE.takes_importance(format)
    return isinstance(format, FloatFormat) or bool(QUANTIZERS[format.name].takes_importance)
