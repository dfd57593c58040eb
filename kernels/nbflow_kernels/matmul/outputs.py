"""The end of every product whose lanes are weight rows: bias and old output."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import simd
from nbflow_kernels._jit import helper


@helper
def write_group(total: Any, bias: Any, accumulate: Any, out: Any, token: Any, group: Any) -> None:
    """Write the sums of a row group and a token, with the bias and the old output added."""
    first = 16 * group
    at = simd.address(out) + token * out.strides[0] + 4 * first
    count = min(out.shape[1] - first, 16)
    if count == 16:
        if len(bias):
            total = simd.add(total, simd.load_f32(simd.address(bias) + 4 * first))
        if accumulate:
            total = simd.add(total, simd.load_f32(at))
        simd.store_f32(at, total)
        return
    lanes = np.empty(16, np.float32)
    simd.store_f32(simd.address(lanes), total)
    for i in range(count):
        y = lanes[i]
        if len(bias):
            y += bias[first + i]
        if accumulate:
            y += out[token, first + i]
        out[token, first + i] = y
