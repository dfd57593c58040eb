"""The loop every format's codes kernel is made of."""

from __future__ import annotations

from nbflow_kernels.cpu import jit


@jit.device_function(inline="always")
def decode_codes(code, block_size, block_bytes, data, codes, start, stop):
    """Write the codes of rows [start, stop); ``code(row, at, i)`` decodes one of a block."""
    for r in range(start, stop):
        row, out = data[r], codes[r]
        for b in range(data.shape[1] // block_bytes):
            for i in range(block_size):
                out[b * block_size + i] = code(row, b * block_bytes, i)
