"""``python -m nbflow_kernels.quants.table``: the table of formats, in Markdown, from the code.

The errors are those of N(0, 0.02) weights: root mean square error over root mean square, 2**20
samples with a fixed seed in rows of 1024.  They stand for the distribution, not for a model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.quants import FORMATS, dequantize, quantize

HEADER = (
    "| format | short name | block | bytes | bits/weight | error, plain | error, best |\n"
    "|---|---|---:|---:|---:|---:|---:|"
)


def relative_rmse(x: NDArray[np.float32], format: str, encoder: str) -> float:
    """Return the root mean square error of a format on `x`, relative to that of zeros.

    Parameters
    ----------
    x : array of float32, shape (rows, K)
        The weights.
    format : str
        Name of the format.
    encoder : {"best", "plain"}
        See `quantize`.

    Examples
    --------
    >>> import numpy as np
    >>> relative_rmse(np.ones((1, 32), np.float32), "q4", "best")
    0.0
    """
    error = np.subtract(dequantize(quantize(x, format, encoder=encoder)), x, dtype=np.float64)
    return float(np.sqrt(np.square(error).mean() / np.square(x, dtype=np.float64).mean()))


def sample(n_rows: int = 1024) -> NDArray[np.float32]:
    """Return the weights the table is measured on, N(0, 0.02), shape (n_rows, 1024)."""
    return np.random.default_rng(0).normal(0, 0.02, (n_rows, 1024)).astype(np.float32)


def table() -> str:
    """Return the Markdown table of all formats."""
    x = sample()
    # the nicest of a format's short names is the shortest one
    short: dict[str, str] = {}
    for alias, name in FORMATS.short_names.items():
        if len(alias) < len(short.get(name, name)) and alias[:2] != "fp":
            short[name] = alias
    lines = [HEADER]
    for name, format in FORMATS.items():
        plain, best = (relative_rmse(x, name, encoder) for encoder in ("plain", "best"))
        alias = f"`{short[name]}`" if name in short else ""
        lines.append(
            f"| `{name}` | {alias} | {format.block_size} | {format.block_bytes} "
            f"| {format.bits_per_weight:g} | {plain:.3g} | {best:.3g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
