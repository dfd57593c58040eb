"""Quantized matrix product on the CPU: a lane of a vector is a weight row.

Weights are read in the packed layout (`nbflow_kernels.quants.packed`) and decoded in registers to
``base + scale * code``, the float32 that `dequantize` gives.  One row of activations streams them
once; several rows decode a tile of 16 rows and 256 columns once and multiply it by up to 64 rows.
Both add in the same order (`tiles`), so a row's result does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels._jit import njit
from nbflow_kernels.matmul import cpu as float_cpu
from nbflow_kernels.qmatmul import layouts
from nbflow_kernels.qmatmul.tiles import many_rows, one_row
from nbflow_kernels.quants.packed import ROWS
from nbflow_kernels.quants.tensor import QuantTensor
from nbflow_kernels.threads import not_capturable, split_rows

_NO_BIAS = np.zeros(0, np.float32)


def matmul(
    x: NDArray[np.float32],
    w: QuantTensor,
    bias: NDArray[np.float32] | None,
    accumulate: bool,
    out: NDArray[np.float32],
) -> None:
    """See `nbflow_kernels.qmatmul`."""
    if w.is_float:
        float_cpu.matmul(x, w.array, bias, accumulate, out)
        return
    packed = w.packed()
    n_columns = packed.n_blocks * packed.block_size
    if x.shape[1] != n_columns:  # the padding of the last block meets zeros
        not_capturable()
        padded = np.zeros((x.shape[0], n_columns), np.float32)
        padded[:, : x.shape[1]] = x
        x = padded
    one, many = _KERNELS[packed.layout.name]
    kernel = one if x.shape[0] == 1 else many
    split_rows(
        kernel, packed.n_groups, float(x.shape[0] * n_columns * packed.n_groups * ROWS),
        x, packed.data, packed.n_blocks, packed.block_size, packed.parameters, packed.zero,
        _NO_BIAS if bias is None else bias, accumulate, out,
    )  # fmt: skip


@njit
def _one_bits8(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_plane, layouts.pair_bits8, 4, 1, 64,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_bits8(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_plane, layouts.pair_bits8, 4, 1, 64,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _one_bits6(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_bits6, layouts.pair_bits6, 16, 2, 192,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_bits6(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_bits6, layouts.pair_bits6, 16, 2, 192,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _one_bits5(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_bits5, layouts.pair_bits5, 32, 4, 320,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_bits5(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_bits5, layouts.pair_bits5, 32, 4, 320,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _one_bits4(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_plane, layouts.pair_bits4, 8, 1, 64,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_bits4(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_plane, layouts.pair_bits4, 8, 1, 64,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _one_bits3(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_bits3, layouts.pair_bits3, 32, 2, 192,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_bits3(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_bits3, layouts.pair_bits3, 32, 2, 192,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _one_bits2(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_plane, layouts.pair_bits2, 16, 1, 64,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_bits2(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_plane, layouts.pair_bits2, 16, 1, 64,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _one_pairs(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    one_row(
        layouts.words_pairs, layouts.pair_pairs, 64, 8, 448,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


@njit
def _many_pairs(
    x: Any, packed: Any, n_blocks: Any, block: Any, parameters: Any, zero: Any, bias: Any,
    accumulate: Any, out: Any, start: Any, stop: Any,
) -> None:  # fmt: skip
    many_rows(
        layouts.words_pairs, layouts.pair_pairs, 64, 8, 448,
        x, packed, n_blocks, block, parameters, zero, bias, accumulate, out, start, stop,
    )  # fmt: skip


_KERNELS = {
    "bits8": (_one_bits8, _many_bits8),
    "bits6": (_one_bits6, _many_bits6),
    "bits5": (_one_bits5, _many_bits5),
    "bits4": (_one_bits4, _many_bits4),
    "bits3": (_one_bits3, _many_bits3),
    "bits2": (_one_bits2, _many_bits2),
    "pairs": (_one_pairs, _many_pairs),
}
