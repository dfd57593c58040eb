"""Quantized matrix product on the CPU: choice of the kernel.

==============  =============================  =====================================================
activations     rows                           kernel
==============  =============================  =====================================================
float32         1                              `cpu_gemv_f32.gemv`
float32         2 and more                     `cpu_gemm_f32_bf16.gemm_f32`
bfloat16        any                            `cpu_gemm_f32_bf16.gemm_bf16`
int8            up to 16 (8 or 9 for formats   `cpu_gemv_int8.gemv`, 1, 2, 3, 4 or 8 rows at a time
                that take long to decode)      (at most 4 with a scale for each 16 columns)
int8            more                           `cpu_gemm_int8.gemm`
==============  =============================  =====================================================

Weights of every block format are read in one packed layout (`formats.layout_cpu`; a lane is a
weight row), by kernels compiled for its `CpuLayout` at first use.  Float weights go to
`matmul.cpu_packed`, user formats without integer codes to `cpu_user_formats`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.cpu.parallel_for import parallel_for
from nbflow_kernels.formats.column_order import gather_columns
from nbflow_kernels.formats.floats import PackedFloats
from nbflow_kernels.formats.layout_cpu import PAIRS, ROWS, CpuLayout, CpuPacked
from nbflow_kernels.formats.registry import Floats
from nbflow_kernels.formats.tensor import QuantTensor
from nbflow_kernels.matmul import cpu_packed
from nbflow_kernels.quantized_matmul import (
    cpu_gemm_f32_bf16,
    cpu_gemm_int8,
    cpu_gemv_f32,
    cpu_gemv_int8,
    cpu_outliers,
    cpu_user_formats,
)
from nbflow_kernels.quantized_matmul.int8_activations import Int8Rows, quantize_activations

__all__ = ["Int8Rows", "matmul", "matmul_int8", "qmatmul", "quantize_activations"]

_NO_BIAS = np.zeros(0, np.float32)


def qmatmul(
    x: Floats, w: QuantTensor, bias: Floats | None, accumulate: bool, activations: str, out: Floats
) -> None:
    """See `nbflow_kernels.qmatmul`."""
    if w.column_order is not None:
        gathered = np.empty((len(x), w.n_stored_columns), np.float32)
        gather_columns(x, w.column_order, gathered, w.column_scales)
        x = gathered
    if activations == "int8":
        rows = Int8Rows.empty(*x.shape)
        quantize_activations(x, rows)
        matmul_int8(rows, w, bias, accumulate, out)
    else:
        matmul(x, w, bias, accumulate, out, bf16=activations == "bf16")


def matmul(
    x: Floats, w: QuantTensor, bias: Floats | None, accumulate: bool, out: Floats, *,
    bf16: bool = False,
) -> None:  # fmt: skip
    """Multiply float32 activations, rounded to bfloat16 with the weights if `bf16`.

    The columns of `x` are in the order in which `w` stores them; so are those of `matmul_int8`.
    """
    with cpu_outliers.in_order(w):
        if w.format.decodes_from_storage:
            cpu_user_formats.matmul(x, w, bias, accumulate, out, bf16=bf16)
        else:
            _matmul(x, w.packed(), _NO_BIAS if bias is None else bias, accumulate, out, bf16)
        cpu_outliers.add(x, w, out)


def _matmul(
    x: Floats, packed: CpuPacked | PackedFloats, bias: Floats, accumulate: bool, out: Floats,
    bf16: bool,
) -> None:  # fmt: skip
    """Multiply float32 rows by packed weights."""
    if isinstance(packed, PackedFloats):
        cpu_packed.matmul(x, packed.data, bias, accumulate, out, bf16=bf16)
        return
    kernel, work = cpu_gemm_f32_bf16.gemm_f32, _work(packed, x.shape[0])
    if bf16:
        kernel, work = cpu_gemm_f32_bf16.gemm_bf16, work / 2
    elif x.shape[0] == 1:
        kernel = cpu_gemv_f32.gemv
    parallel_for(
        kernel(packed.form), packed.n_groups, work,
        x, packed.data, packed.n_blocks, bias, accumulate, out,
    )  # fmt: skip


def matmul_int8(
    rows: Int8Rows, w: QuantTensor, bias: Floats | None, accumulate: bool, out: Floats
) -> None:
    """Multiply quantized activations."""
    with cpu_outliers.in_order(w):
        if w.format.decodes_from_storage:
            cpu_user_formats.matmul_int8(rows, w, bias, accumulate, out)
        else:
            _matmul_int8(rows, w.packed(), _NO_BIAS if bias is None else bias, accumulate, out)
        cpu_outliers.add_int8(rows, w, out)


def _matmul_int8(
    rows: Int8Rows, packed: CpuPacked | PackedFloats, bias: Floats, accumulate: bool, out: Floats
) -> None:
    """Multiply quantized rows by packed weights."""
    assert isinstance(packed, CpuPacked), "int8 activations go with integer codes"
    if rows.n_rows == 0:  # the kernels read the first row
        return
    sums = rows.sums if cpu_gemv_int8.piece_vectors(packed.form) == 8 else rows.half_sums
    kernel = int8_kernel(packed.form, rows.n_rows)
    parallel_for(
        kernel, packed.n_groups, _work(packed, rows.n_rows), rows.codes, rows.n_rows, rows.scales,
        sums, packed.data, packed.n_blocks, bias, accumulate, out,
        tile=2 if kernel is cpu_gemm_int8.gemm(packed.form) else 1,
    )  # fmt: skip


def int8_kernel(form: CpuLayout, n_rows: int) -> Any:
    """Return the kernel for a number of rows of int8 activations, at least 1."""
    # a trellis and pairs of codes take long to decode, and q2_k and q3_k gain most by the GEMM
    costly = form.trellis or form.bits == PAIRS
    if n_rows > (8 if costly else 16 if form.folded_zero is None else 9):
        return cpu_gemm_int8.gemm(form)
    return cpu_gemv_int8.gemv(form, gemv_tile(form, n_rows))


def gemv_tile(form: CpuLayout, n_rows: int) -> int:
    """Return how many rows the int8 GEMV multiplies at a time, of up to 16."""
    if n_rows == 2 and form.bits == 6:
        return 3  # reads memory faster than the tile of 2: q6_k takes 29 ps instead of 38
    passes = -(-n_rows // 4)
    tile = -(-n_rows // passes)
    costly = form.trellis or form.bits == PAIRS
    # 8 rows with two sums for each piece exceed the registers: 1.2 to 1.9 times slower
    return 8 if form.sub_block != 16 and passes % 2 == 0 and (tile == 4 or costly) else tile


def _work(packed: CpuPacked, n_rows: int) -> float:
    """Return the multiply-adds of a product."""
    return float(n_rows) * packed.n_columns * packed.n_groups * ROWS
