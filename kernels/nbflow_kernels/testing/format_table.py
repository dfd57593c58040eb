"""Markdown table of formats: properties from the code and measured errors and speeds.

The errors are those of N(0, 0.02) weights: root mean square error over root mean square, 2**20
samples with a fixed seed in rows of 1024.  They stand for the distribution, not for a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.formats import FORMATS, QuantFormat, dequantize
from nbflow_kernels.quantizers import quantize

HEADER = (
    "| format | short name | block | bytes | bits/weight | packed "
    "| error, reference | error, search | bits wasted | model: weight error "
    "| model: KLD (nat/token) "
    "| GEMV f32, Gweights/s | GB/s (of read) "
    "| GEMV int8, Gweights/s | GB/s (of read) |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)
COLUMNS = (
    ("packed_bits_per_weight", "{:.4g}"),
    ("error_reference", "{:.3g}"),
    ("error_search", "{:.3g}"),
    ("bits_wasted", "{:.2f}"),
    ("model_weight_error_relative", "{:.3g}"),
    ("model_kld_mean_nats", "{:.2g}"),
)
"""Columns of the table: measured value and its format."""


def relative_rmse(x: NDArray[np.float32], format: str | QuantFormat, quantizer: str) -> float:
    """Return the root mean square error of a format on `x`, relative to that of zeros.

    Examples
    --------
    >>> import numpy as np
    >>> relative_rmse(np.ones((1, 32), np.float32), "q4", "search")
    0.0
    """
    error = np.subtract(dequantize(quantize(x, format, quantizer=quantizer)), x, dtype=np.float64)
    return float(np.sqrt(np.square(error).mean() / np.square(x, dtype=np.float64).mean()))


def bits_wasted(bits_per_weight: float, error: float) -> float:
    """Return the bits of a format above those that its error on normal weights needs.

    No code of R bits per weight has a relative error below ``2**-R`` on independent normal
    weights.

    References
    ----------
    .. [1] Shannon, "Coding theorems for a discrete source with a fidelity criterion", 1959.

    Examples
    --------
    >>> bits_wasted(4.5, 0.0625)
    0.5
    """
    return bits_per_weight + math.log2(error)


def sample(n_rows: int = 1024) -> NDArray[np.float32]:
    """Return the weights the table is measured on, N(0, 0.02), shape (n_rows, 1024)."""
    return np.random.default_rng(0).normal(0, 0.02, (n_rows, 1024)).astype(np.float32)


def short_names() -> dict[str, str]:
    """Return the shortest of each format's short names, by explicit name."""
    short: dict[str, str] = {}
    for alias, name in FORMATS.short_names.items():
        if len(alias) < len(short.get(name, name)) and alias[:2] != "fp":
            short[name] = alias
    return short


def table(measured: Mapping[str, Mapping[str, Any]], names: Sequence[str] | None = None) -> str:
    """Return the Markdown table of formats.

    Parameters
    ----------
    measured : mapping
        For each explicit name what `nbflow_kernels.benchmarks.formats` measured, and the errors on
        a model where there are any; missing values are a dash.
    names : sequence of str, optional
        The formats, by explicit name; all built-in ones by default.

    Examples
    --------
    >>> print(table({"f16": {"error_reference": 0.000207}}, ["f16"]).splitlines()[2])
    | `f16` |  | 1 | 2 | 16 | - | 0.000207 | - | - | - | - | - | - | - | - |
    """
    short = short_names()
    lines = [HEADER]
    for name in FORMATS if names is None else names:
        format, row = FORMATS[name], dict(measured.get(name, {}))
        if row.get("error_search"):
            row["bits_wasted"] = bits_wasted(format.bits_per_weight, row["error_search"])
        alias = f"`{short[name]}`" if name in short else ""
        cells = [f"`{name}`", alias, f"{format.block_size}", f"{format.block_bytes}"]
        cells.append(f"{format.bits_per_weight:g}")
        cells += [_cell(row.get(key), form) for key, form in COLUMNS]
        for kind in ("f32", "int8"):
            speed = _cell(row.get(f"gemv_{kind}_gweights_per_s"), "{:.1f}")
            bandwidth = _cell(row.get(f"gemv_{kind}_gb_per_s"), "{:.1f}")
            share = row.get(f"gemv_{kind}_share_of_read")
            percent = "" if share is None else f" ({100 * share:.0f} %)"
            cells += [speed, f"{bandwidth}{percent}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
