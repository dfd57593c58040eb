"""GEMM with weights dequantized panel by panel: `cuda_dequantize.cu`, then `matmul.cuda`.

With activations="bf16" both operands are bfloat16, which tensor cores multiply exactly and add in
float32.  A panel fits the L2 cache, and its memory is reused for the next one.  With `wgmma` many
tokens need no panels (`cuda_gemm_wgmma`), except where decoding is slow (`decodes_tiles`).

Weights in a user's format without integer codes are dequantized in the same way, to float32.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from nbflow_kernels.arrays import empty
from nbflow_kernels.cuda import Kernel, ceil_div, cpp_kernel, device_of
from nbflow_kernels.cuda.workspace import allocated_bytes, workspace
from nbflow_kernels.formats.floats import FloatFormat
from nbflow_kernels.formats.layout_mma import ROWS, MmaLayout, MmaPacked
from nbflow_kernels.formats.registry import QuantFormat
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cuda as float_cuda
from nbflow_kernels.matmul import cuda_mma
from nbflow_kernels.quantized_matmul import cuda_gemm_wgmma

PANEL_BYTES = 24 << 20  # half of the L2 cache of large devices
MAX_GRID_ROWS = 65535
"""Thread blocks along the second axis of a grid."""
MAX_TRELLIS_TOKENS = 2 * cuda_gemm_wgmma.MAX_TOKENS
"""Most tokens for which `wgmma` decodes a trellis in registers, again for each tile.  Above,
weights are decoded once to a panel: 830 cycles a step and 128 rows, against 430 to 510 a tile."""

_kernel = partial(cpp_kernel, __file__, "cuda_round_activations.cu")
_round_rows = _kernel("round_rows", "f32* x, f32* out, i64 x_stride, i32 n_columns, i32 int8")
_BITS = {
    "float32": _kernel("to_bf16_bits<float, false>", "f32* x, bf16* out, i64 n"),
    "float16": _kernel("to_bf16_bits<unsigned short, true>", "f16* x, bf16* out, i64 n"),
}


def has_mma_layout(w: QuantTensor) -> bool:
    """Return whether a weight has an MMA layout, which leaves out the outliers."""
    return w.format.has_mma_layout


def decodes_tiles(device: Any, w: QuantTensor, n_tokens: int) -> bool:
    """Return whether `wgmma` multiplies, with weights decoded for each tile of tokens."""
    return _takes_tiles(w.format, n_tokens) and float_cuda.use_wgmma(device, n_tokens)


def _takes_tiles(format: QuantFormat, n_tokens: int) -> bool:
    if not format.has_mma_layout:
        return False
    return n_tokens <= MAX_TRELLIS_TOKENS or not format.integer_form.trellis


def workspace_bytes(
    format: QuantFormat, n_rows: int, n_columns: int, n_tokens: int, device: Any
) -> dict[str, int]:
    """Return the sizes of the workspaces of `qmatmul` by name, panels included.

    `n_columns` are those of a stored row; `device` has `n_sms` and `arch`.
    """
    if _takes_tiles(format, n_tokens) and float_cuda.plans_wgmma(device, n_tokens):
        return cuda_gemm_wgmma.workspace_bytes(n_rows, n_columns, n_tokens, device)
    found, (_, rows) = {}, panels(n_rows, 2 * n_columns)[0]
    if format.has_mma_layout:
        n_columns = ceil_div(n_columns, 32) * 32
    elif not isinstance(format, FloatFormat):
        found["qmatmul panel f32"] = allocated_bytes(rows * n_columns, 4)
    if format.name != "bf16":
        found["qmatmul panel"] = allocated_bytes(rows * n_columns, 2)
    return found | float_cuda.workspace_bytes(
        "uint16", rows, n_columns, n_tokens, device, rounded=True
    )


def decoded_workspace_bytes(n_rows: int, n_columns: int) -> dict[str, int]:
    """Return the size of the workspace of `decoded` by name."""
    _, rows = panels(n_rows, 4 * n_columns)[0]
    return {"qmatmul panel f32": allocated_bytes(rows * n_columns, 4)}


def qmatmul(x: Any, w: QuantTensor, bias: Any, accumulate: bool, out: Any) -> None:
    """Multiply with activations and weights rounded to bfloat16."""
    n_rows, n_columns = w.shape[0], w.n_stored_columns
    if decodes_tiles(device_of(x), w, len(x)):
        cuda_gemm_wgmma.multiply(x, w.units(), bias, accumulate, out)
        return
    has_units = has_mma_layout(w)
    for row, stop in panels(n_rows, 2 * n_columns):
        panel = _unit_rows(w, row, stop) if has_units else _bf16_rows(w, row, stop)
        _multiply_bf16_panel(x, panel, has_units, bias, accumulate, out, row)


def decoded(x: Any, w: QuantTensor, bias: Any, accumulate: bool, int8: bool, out: Any) -> None:
    """Multiply by weights that are dequantized from storage."""
    from nbflow_kernels.formats import dequantize

    if int8:
        x = to_int8_grid(x)
    n_rows, n_columns = w.shape[0], w.n_stored_columns
    for row, stop in panels(n_rows, 4 * n_columns):
        weights = workspace(device_of(x), "qmatmul panel f32", (stop - row) * n_columns, "f4")
        weights = weights[: (stop - row) * n_columns].reshape(stop - row, n_columns)
        part = QuantTensor(w.format, weights.shape, w.data[row:stop])
        dequantize(part, out=weights)
        _multiply_panel(x, weights, bias, accumulate, out, row)


def panels(n_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Return the range of rows of each panel."""
    step = max(ROWS, PANEL_BYTES // max(row_bytes, 1) // ROWS * ROWS)
    return [(row, min(row + step, n_rows)) for row in range(0, n_rows, step)]


def to_int8_grid(x: Any) -> Any:
    """Return activations rounded to int8 and dequantized."""
    return _rounded(x, int8=True)


def unpack(w: MmaPacked, row: int, out: Any) -> None:
    """Dequantize rows from `row`, a multiple of 16, to `out`.

    `out` holds bits of bfloat16 (rows, K rounded up to 32) in fragment order (`column_at` in
    `matmul/cuda_mma_common.cuh`).
    """
    n_rows, n_columns = len(out), w.n_columns
    kernel = _unpack(w.form)
    for first in range(0, n_rows, ROWS * MAX_GRID_ROWS):
        part = out[first : first + ROWS * MAX_GRID_ROWS]
        grid = (ceil_div(ceil_div(n_columns, 128), 4), ceil_div(len(part), ROWS))
        args = (w.data, part, w.form.tile_bytes(w.n_columns), row + first, len(part), n_columns)
        kernel(grid, 128, args)


def _multiply_panel(x: Any, weights: Any, bias: Any, accumulate: bool, out: Any, row: int) -> None:
    """Multiply by a panel and write its columns of `out`."""
    columns = slice(row, row + len(weights))
    part = None if bias is None else bias[columns]
    float_cuda.matmul(x, weights, part, accumulate, out[:, columns])


def _multiply_bf16_panel(
    x: Any, weights: Any, fragment_order: bool, bias: Any, accumulate: bool, out: Any, row: int
) -> None:
    """Multiply a panel as `_multiply_panel`, with activations rounded to bfloat16."""
    if not cuda_mma.fits(weights):
        _multiply_panel(_rounded(x, int8=False), weights, bias, accumulate, out, row)
        return
    columns = slice(row, row + len(weights))
    part = None if bias is None else bias[columns]
    float_cuda.multiply_16bit(
        x, weights, part, accumulate, out[:, columns], rounded=True, fragment_order=fragment_order
    )


def _bf16_rows(w: QuantTensor, row: int, stop: int) -> Any:
    """Return rows of weights without an MMA layout as bits of bfloat16."""
    if w.is_float and w.format.name == "bf16":
        return w.array[row:stop]
    panel = _panel(device_of(w.data), stop - row, w.n_stored_columns)
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
    """Return rows of weights in the MMA layout as bits of bfloat16 in fragment order."""
    units = w.units()
    panel = _panel(device_of(units.data), stop - row, ceil_div(units.n_columns, 32) * 32)
    unpack(units, row, panel)
    return panel


def _panel(device: Any, n_rows: int, n_columns: int) -> Any:
    """Return the workspace of a panel, which all panels share."""
    panel = workspace(device, "qmatmul panel", n_rows * n_columns, "u2")
    return panel[: n_rows * n_columns].reshape(n_rows, n_columns)


def _to_bits(x, out):
    _BITS[x.dtype.name](min(ceil_div(x.size, 256), 4096), 256, (x, out, x.size))


def _rounded(x: Any, int8: bool) -> Any:
    out, stride, n_columns = empty(x, x.shape), x.strides[0] // 4, x.shape[1]
    for row in range(0, len(x), MAX_GRID_ROWS):
        part = slice(row, row + MAX_GRID_ROWS)
        grid = ceil_div(n_columns, 256), len(x[part])
        _round_rows(grid, 256, (x[part], out[part], stride, n_columns, int(int8)))
    return out


@cache
def _unpack(form: MmaLayout) -> Kernel:
    parameters = "u8* weights, bf16* out, i64 tile_bytes, i32 row_0, i32 n_rows, i32 n_columns"
    return cpp_kernel(__file__, "cuda_dequantize.cu", "unpack", parameters, defines=form.defines())
