"""Conformance checks of a weight format, built-in or user-defined.

>>> from nbflow_kernels import check_format
>>> report = check_format("q4_0")
>>> report.bits_per_weight, 0.08 < report.error < 0.09
(4.5, True)
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats import FORMATS, QuantFormat, QuantTensor, dequantize, dequantize_rows
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.user_validation import sample_blocks
from nbflow_kernels.quantized_matmul import qmatmul, reference
from nbflow_kernels.quantizers import quantize
from nbflow_kernels.testing.checks import CheckError
from nbflow_kernels.testing.format_table import relative_rmse

__all__ = ["FormatReport", "check_format"]

ROWS, TOKENS = 37, 7  # two row groups and five rows; a register tile and one token


@dataclass(frozen=True)
class FormatReport:
    """Cost and errors measured by `check_format`."""

    name: str
    """Explicit name of the format."""
    bits_per_weight: float
    """Storage cost."""
    error: float
    """Root mean square error on N(0, 0.02) weights, relative to theirs; default quantizer."""
    int8_error: float
    """Relative root mean square error that int8 activations add to a product; NaN for floats."""


def check_format(format: str | QuantFormat, *, quantizer: str = "search") -> FormatReport:
    """Check a weight format's storage, decoding and products.

    Storage: sizes, bytes of a row independent of other rows, finite decoding of random, constant,
    zero, tiny and huge weights, padded rows, `from_bytes`, pickling.  Decoding: whole tensors,
    rows, the NumPy form.  Products with float32, bfloat16 and int8 activations: single weights bit
    by bit, float64 reference, batch invariance, bias, accumulation, no rows.

    Parameters
    ----------
    format : str or QuantFormat
        A format, or its name in `nbflow_kernels.FORMATS`.
    quantizer : {"search", "reference"}
        The quantizer to check.

    Returns
    -------
    FormatReport
        Cost and errors.

    Raises
    ------
    CheckError
        If a check fails; the message names it.
    UsageError
        If the format is unknown.
    """
    chosen = format if isinstance(format, QuantFormat) else FORMATS[format]
    rng = np.random.default_rng(3)
    size = chosen.block_size
    n_columns = 3 * size + max(1, size // 3) if size > 1 else 100  # a padded block, unless floats
    x = rng.normal(0, 0.02, (ROWS, n_columns)).astype(np.float32)
    qt = quantize(x, chosen, quantizer=quantizer)
    _check_storage(chosen, x, qt, quantizer)
    _check_special_weights(chosen, quantizer)
    _check_decoding(chosen, qt)
    activations = rng.standard_normal((TOKENS, n_columns), dtype=np.float32)
    _check_products(chosen, qt, activations)
    _check_bf16(chosen, qt, activations)
    int8_error = float("nan")
    if not isinstance(chosen, FloatFormat):
        int8_error = _check_int8(chosen, qt, activations)
    y = rng.normal(0, 0.02, (256, 4 * max(size, 64))).astype(np.float32)
    error = relative_rmse(y, chosen, quantizer)
    return FormatReport(chosen.name, chosen.bits_per_weight, error, int8_error)


def _require(holds: Any, format: QuantFormat, what: str) -> None:
    if not holds:
        raise CheckError(f"format {format.name}: {what}")


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _check_storage(format: QuantFormat, x: NDArray[Any], qt: QuantTensor, quantizer: str) -> None:
    blocks = format.row_blocks(x.shape[1])
    wanted = (len(x), blocks * format.block_bytes)
    _require(qt.data.shape == wanted, format, f"data must have shape {wanted}, has {qt.data.shape}")
    _require(qt.nbytes == wanted[0] * wanted[1], format, "nbytes is not the size of the data")
    again = quantize(x, format, quantizer=quantizer)
    _require(_same(again.data, qt.data), format, "the quantizer is not deterministic")
    row = quantize(x[5:6], format, quantizer=quantizer)
    _require(_same(row.data, qt.data[5:6]), format, "a row's bytes depend on the other rows")
    _require(
        _same(QuantTensor.from_bytes(qt.tobytes(), format, qt.shape).data, qt.data),
        format,
        "from_bytes does not give back what tobytes gave",
    )
    if FORMATS.get(format.name) is format:
        copy = pickle.loads(pickle.dumps(qt))
        _require(copy.format is format and _same(copy.data, qt.data), format, "pickling changes it")


def _check_special_weights(format: QuantFormat, quantizer: str) -> None:
    for kind, blocks in sample_blocks(max(format.block_size, 32)).items():
        values = dequantize(quantize(blocks, format, quantizer=quantizer))
        _require(np.isfinite(values).all(), format, f"{kind} weights decode to NaN or infinity")


def _check_decoding(format: QuantFormat, qt: QuantTensor) -> None:
    values = dequantize(qt)
    _require(values.shape == qt.shape, format, f"decoded weights have shape {values.shape}")
    widened = reference.weights(qt)
    _require(
        np.array_equal(widened, values.astype(np.float64)),
        format,
        "dequantize_blocks and dequantize_rows decode to different bits",
    )
    ids = np.array([36, 0, 5, 5], np.int32)
    _require(
        _same(dequantize_rows(qt, ids), values[ids]), format, "gathered rows differ from the rows"
    )
    _require(_same(dequantize(qt.rows(3, 20)), values[3:20]), format, "rows() differ from the rows")


def _check_products(format: QuantFormat, qt: QuantTensor, x: NDArray[np.float32]) -> None:
    values = dequantize(qt)
    n_columns = qt.shape[1]
    picked = qmatmul(np.eye(n_columns, dtype=np.float32)[:TOKENS], qt)
    _require(np.array_equal(picked, values.T[:TOKENS]), format, "a product decodes other weights")
    y = qmatmul(x, qt)
    wanted = reference.qmatmul(x, qt)
    # float32 sums of K products: K roundings of 6e-8 of partial sums below 4 * sqrt(K) * sigma
    allowed = 4 * 6e-8 * n_columns * float(np.abs(values).max()) + 1e-30
    error = float(np.abs(y - wanted).max())
    _require(error <= allowed, format, f"a product is off by {error:g}, allowed are {allowed:g}")
    alone = np.concatenate([qmatmul(x[t : t + 1], qt) for t in range(TOKENS)])
    _require(np.array_equal(y, alone), format, "a row of a product depends on the other rows")
    bias = np.linspace(-1, 1, ROWS, dtype=np.float32)
    out = np.full((TOKENS, ROWS), 0.37, np.float32)
    qmatmul(x, qt, bias=bias, accumulate=True, out=out)
    off = np.abs(out - ((y + bias) + np.float32(0.37))).max()
    # the order of the two additions is not the same for all: two roundings of numbers below 2
    _require(off <= 2.4e-7 * (2 + np.abs(y).max()), format, "bias or old output are wrong")
    _require(qmatmul(x[:0], qt).shape == (0, ROWS), format, "a product of no rows is wrong")


def _check_bf16(format: QuantFormat, qt: QuantTensor, x: NDArray[np.float32]) -> None:
    y = qmatmul(x, qt, activations="bf16")
    weights = np.abs(reference.weights(qt))
    # both factors are off by 2**-9 of themselves at most, and so is each product by twice that
    allowed = 1.01 * 2.0**-8 * (np.abs(x).astype(np.float64) @ weights.T) + 1e-30
    error = np.abs(y - reference.qmatmul(x, qt)) / allowed
    _require((error <= 1).all(), format, f"a bfloat16 product is off by {error.max():g} of a limit")
    alone = qmatmul(x[3:4], qt, activations="bf16")
    _require(np.array_equal(alone[0], y[3]), format, "bf16: a row depends on the other rows")


def _check_int8(format: QuantFormat, qt: QuantTensor, x: NDArray[np.float32]) -> float:
    """Check products with int8 activations; return the relative error that these add."""
    out = qmatmul(x, qt, activations="int8")
    weights = reference.weights(qt)
    # bases and codes are added apart: each may be as large as the largest weight times K
    allowed = 64 * 6e-8 * x.shape[1] * float(np.abs(weights).max()) + 1e-30
    error = float(np.abs(out - reference.qmatmul(x, qt, activations="int8")).max())
    _require(error <= allowed, format, f"an int8 product is off by {error:g}, not {allowed:g}")
    alone = qmatmul(x[3:4], qt, activations="int8")
    _require(np.array_equal(alone[0], out[3]), format, "int8: a row depends on the other rows")
    exact = x.astype(np.float64) @ weights.T
    return float(np.sqrt(np.square(out - exact).mean() / max(np.square(exact).mean(), 1e-300)))
