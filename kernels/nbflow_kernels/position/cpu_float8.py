"""Heads rotated by RoPE and encoded in float8 on the CPU."""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit, simd
from nbflow_kernels.cpu.float8 import encode_float8_row
from nbflow_kernels.cpu.parallel_for import hold, parallel_for
from nbflow_kernels.cpu.simd_memory import address_of, load_first, store_first
from nbflow_kernels.formats.float8 import Float8Codec
from nbflow_kernels.position.cpu import rotate_head

_NO_POSITIONS = np.zeros(1, np.int32)


def encode_heads(
    x: np.ndarray,
    positions: np.ndarray | None,
    cos_sin: np.ndarray | None,
    is_neox: bool,
    codec: Float8Codec,
    codes: np.ndarray,
    n_numbers: int,
) -> None:
    """Encode heads (T, H, n), rotated by rows of a table if there is one; any strides."""
    T, H, n = x.shape
    hold(x, cos_sin, codes)
    table, half = (0, 0) if cos_sin is None else (address_of(cos_sin), cos_sin.shape[1] // 2)
    parallel_for(
        _encode_heads, T, 4.0 * n_numbers, _NO_POSITIONS if positions is None else positions,
        address_of(x), x.strides[0], x.strides[1], H, n, table, half, is_neox,
        (*codec.type, np.float32(codec.factor)), address_of(codes), codes.strides[0],
        codes.strides[1],
    )  # fmt: skip


@jit.kernel
def _encode_heads(
    positions, x, row_bytes, head_bytes, H, n, table, half, is_neox, codec, codes, code_row_bytes,
    code_head_bytes, start, stop
):  # fmt: skip
    mantissa, bias, largest, factor = codec
    scratch = np.empty((n + 15) // 16 * 16, np.float32)
    head = simd.address(scratch)
    for t in range(start, stop):
        for h in range(H):
            source = x + t * row_bytes + h * head_bytes
            if table != 0:
                for d in range(0, n, 16):
                    store_first(head + 4 * d, 16, load_first(source + 4 * d, n - d, 0.0))
                rotate_head(head, table + 8 * half * np.int64(positions[t]), half, is_neox)
                source = head
            target = codes + t * code_row_bytes + h * code_head_bytes
            encode_float8_row(mantissa, bias, largest, source, n, factor, target)
