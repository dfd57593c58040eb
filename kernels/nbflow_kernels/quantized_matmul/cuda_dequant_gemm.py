"""Products whose weights are decoded to rows of numbers first, panel by panel.

With activations="bf16" both sides are bfloat16, which tensor cores multiply exactly and add in
float32.  A panel is as large as a second-level cache holds, and its memory is used
again for the next one.  Many tokens need none on devices that have `wgmma` (`unit_tiles`).

The weights of a user's format without an integer form are decoded in the same way, to float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from nbflow_kernels.arrays import empty
from nbflow_kernels.cuda import Kernel, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import workspace
from nbflow_kernels.formats.layout_mma import ROWS, MmaLayout, MmaPacked
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cuda as dense
from nbflow_kernels.matmul import cuda_mma, cuda_wgmma
from nbflow_kernels.quantized_matmul import cuda_gemm_wgmma

PANEL_BYTES = 24 << 20  # half of the second-level cache of large devices

_round_rows = cpp_kernel(
    __file__,
    "cuda_round_activations.cu",
    "round_rows",
    "f32* x, f32* out, i64 x_stride, i32 n_columns, i32 int8",
)
_BITS = {
    "float32": cpp_kernel(
        __file__, "cuda_round_activations.cu", "to_bits<float, false>", "f32* x, bf16* out, i64 n"
    ),
    "float16": cpp_kernel(
        __file__,
        "cuda_round_activations.cu",
        "to_bits<unsigned short, true>",
        "f16* x, bf16* out, i64 n",
    ),
}


def qmatmul(x: Any, w: QuantTensor, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply with activations and weights rounded to bfloat16."""
    n_rows, n_columns = w.shape
    of_units = not w.is_float and not w.format.decodes_from_storage
    if of_units and cuda_wgmma.takes(device_of(x), len(x)):
        cuda_gemm_wgmma.multiply(x, w.units(), bias, accumulate, out)
        return
    for row, stop in panels(n_rows, 2 * n_columns):
        panel = _unit_rows(w, row, stop) if of_units else _bf16_rows(w, row, stop)
        _rounded_part(x, panel, of_units, bias, accumulate, out, row)


def decoded(x: Any, w: QuantTensor, bias: Any, accumulate: bool, int8: bool, out: Any) -> None:
    """Multiply by weights of a format that is decoded from storage."""
    from nbflow_kernels.formats import dequantize

    if int8:
        x = to_int8_grid(x)
    n_rows, n_columns = w.shape
    for row, stop in panels(n_rows, 4 * n_columns):
        weights = workspace(device_of(x), "qmatmul panel f32", (stop - row) * n_columns, "f4")
        weights = weights[: (stop - row) * n_columns].reshape(stop - row, n_columns)
        part = QuantTensor(w.format, weights.shape, w.data[row:stop])
        dequantize(part, out=weights)
        _part(x, weights, bias, accumulate, out, row)


def panels(n_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Return first and last row of each panel."""
    step = max(ROWS, PANEL_BYTES // max(row_bytes, 1) // ROWS * ROWS)
    return [(row, min(row + step, n_rows)) for row in range(0, n_rows, step)]


def to_int8_grid(x: Any) -> Any:
    """Return the float32 numbers that 8-bit activations stand for."""
    return _rounded(x, int8=True)


def unpack(w: MmaPacked, row: int, out: Any) -> None:
    """Write rows from `row`, a multiple of 16, to `out`: float32 (rows, K), or bits of bfloat16.

    These are (rows, K rounded up to 32), in the order of `column_at`
    (`matmul/cuda_mma_common.cuh`).
    """
    n_rows, n_columns = len(out), w.n_columns
    kernel = _unpack(w.form, "float" if out.dtype.name == "float32" else "unsigned short")
    for first in range(0, n_rows, ROWS * 65535):  # as many row tiles as a grid has
        part = out[first : first + ROWS * 65535]
        grid = (ceil_div(ceil_div(n_columns, 128), 4), ceil_div(len(part), ROWS))
        args = (w.data, part, w.form.tile_bytes(w.n_columns), row + first, len(part), n_columns)
        kernel(grid, 128, args)


def _part(x: Any, weights: Any, bias: Any, accumulate: bool, out: Any, row: int) -> None:
    """Multiply by a panel, to its columns of `out`."""
    columns = slice(row, row + len(weights))
    part = None if bias is None else bias[columns]
    dense.multiply(x, weights, part, accumulate, out[:, columns])


def _rounded_part(
    x: Any, weights: Any, of_units: bool, bias: Any, accumulate: bool, out: Any, row: int
) -> None:
    """Do as `_part` with activations rounded to bfloat16."""
    if not cuda_mma.fits(weights):
        _part(_rounded(x, int8=False), weights, bias, accumulate, out, row)
        return
    columns = slice(row, row + len(weights))
    part = None if bias is None else bias[columns]
    cuda_mma.multiply(
        x, weights, part, accumulate, out[:, columns], rounded=True, of_units=of_units
    )


def _bf16_rows(w: QuantTensor, row: int, stop: int) -> Any:
    """Return rows of weights that have no units as the bits of bfloat16."""
    if w.is_float and w.format.name == "bf16":
        return w.array[row:stop]
    panel = _panel(device_of(w.data), stop - row, w.shape[1])
    if w.is_float:
        _to_bits(w.array[row:stop], panel)
        return panel
    from nbflow_kernels.formats import dequantize

    part = QuantTensor(w.format, panel.shape, w.data[row:stop])
    wide = workspace(device_of(w.data), "qmatmul panel f32", panel.size, "f4")
    wide = wide[: panel.size].reshape(panel.shape)
    dequantize(part, out=wide)
    _to_bits(wide, panel)
    return panel


def _unit_rows(w: QuantTensor, row: int, stop: int) -> Any:
    """Return rows of weights in units as the bits of bfloat16, ordered as `unpack` says."""
    found = w.units()
    panel = _panel(device_of(found.data), stop - row, ceil_div(found.n_columns, 32) * 32)
    unpack(found, row, panel)
    return panel


def _panel(device: Any, n_rows: int, n_columns: int) -> Any:
    """Return memory for a panel, the same for all."""
    panel = workspace(device, "qmatmul panel", n_rows * n_columns, "u2")
    return panel[: n_rows * n_columns].reshape(n_rows, n_columns)


def _to_bits(x, out):
    _BITS[x.dtype.name](min(ceil_div(x.size, 256), 4096), 256, (x, out, x.size))


def _rounded(x: Any, int8: bool) -> Any:
    out = empty(x, x.shape)
    _round_rows(
        (ceil_div(x.shape[1], 256), len(x)), 256, (x, out, x.strides[0] // 4, x.shape[1], int(int8))
    )
    return out


@cache
def _unpack(form: MmaLayout, number: str) -> Kernel:
    """Return the kernel that writes rows of a type of numbers."""
    pointer = "f32*" if number == "float" else "bf16*"
    parameters = f"u8* weights, {pointer} out, i64 tile_bytes, i32 row_0, i32 n_rows, i32 n_columns"
    return cpp_kernel(
        __file__, "cuda_dequantize.cu", f"unpack<{number}>", parameters, defines=form.defines()
    )
