"""GGML's encoders of its legacy formats for importance weights, bit for bit.

The importance of a weight is multiplied by sqrt(mean square of the row + weight * weight).

Source: GGML, ggml-quants.c (quantize_row_q4_0_impl, _q4_1_, _q5_0_, _q5_1_).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels.cpu import jit
from nbflow_kernels.formats.registry import Bytes, Floats
from nbflow_kernels.quantizers import simd_panel as lockstep
from nbflow_kernels.quantizers.reference import ggml_scale_fit as ggml_fits
from nbflow_kernels.threads import split_rows

if TYPE_CHECKING:
    from nbflow_kernels.formats.affine_format import AffineFormat, Encoded

SIZE = 32  # weights of a block
LOCKSTEP = 16  # blocks encoded together
FIT_COST = 250.0  # multiply-adds a weight costs, for the choice of thread count


@jit.kernel(strict=True)
def _mean_squares(x, out, start, stop):
    """Write the mean square of rows, added up from the first to the last."""
    for row in range(start, stop):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        out[row] = total / np.float32(x.shape[1])


@jit.kernel(strict=True)
def _fit_blocks(x, importance, squares, top, signed, codes, params, start, stop):
    """Encode units [start, stop) of 16 blocks of `x` (blocks, 32).

    `squares` is the mean square of each row.  `top` is the code of weight 0 if `signed`, else the
    largest.  `params` float32 (blocks, 2) gets base and scale.
    """
    blocks = len(x) // len(squares)
    scratch = np.empty((3 * SIZE + 3, 16), np.float32)
    at = simd.address(scratch)
    w_at, code_at, sigma_at = at + SIZE * 64, at + 2 * SIZE * 64, at + 3 * SIZE * 64
    scale_at, minimum_at = sigma_at + 64, sigma_at + 128
    for unit in range(start, stop):
        first = unit * LOCKSTEP
        used = min(LOCKSTEP, len(x) - first)
        lockstep.fill_panel(x, first, scratch[:SIZE])
        lockstep.fill_importance(importance, blocks, first, scratch[SIZE : 2 * SIZE])
        for lane in range(LOCKSTEP):
            scratch[3 * SIZE, lane] = squares[min(first + lane, len(x) - 1) // blocks]
        ggml_fits.emphasize(at, w_at, SIZE, simd.load_f32(sigma_at))
        if signed:
            ggml_fits.fit_signed(at, w_at, SIZE, top, code_at, scale_at)
        else:
            ggml_fits.fit_range(
                at, w_at, SIZE, top, -0.9, 0.05, 36, False, code_at, scale_at, minimum_at
            )
        lockstep.empty_panel(scratch[2 * SIZE : 3 * SIZE], first, codes)
        for lane in range(used):
            params[first + lane, 1] = scratch[3 * SIZE + 1, lane]
            params[first + lane, 0] = 0 if signed else -scratch[3 * SIZE + 2, lane]


def _encode(x: Floats, importance: Floats, top: int, signed: bool) -> Encoded:
    squares = np.empty(len(x), np.float32)
    split_rows(_mean_squares, len(x), 8.0 * x.size, x, squares)
    blocks = x.reshape(-1, SIZE)
    codes: Bytes = np.empty(blocks.shape, np.uint8)
    params = np.empty((len(blocks), 2), np.float32)
    split_rows(
        _fit_blocks,
        -(-len(blocks) // LOCKSTEP),
        FIT_COST * x.size,
        blocks,
        importance,
        squares,
        top,
        signed,
        codes,
        params,
    )
    with np.errstate(over="ignore"):
        return codes, params.astype(np.float16).view(np.uint16)


def weighted_signed(format: AffineFormat, x: Floats, importance: Floats) -> Encoded:
    """Encode rows as Q4_0, Q5_0: of 19 ranges the one that loses least."""
    return _encode(x, importance, format.zero, True)


def weighted_range(format: AffineFormat, x: Floats, importance: Floats) -> Encoded:
    """Encode rows as Q4_1, Q5_1: of 38 ranges the one that loses least, base <= 0."""
    return _encode(x, importance, format.n_codes - 1, False)
