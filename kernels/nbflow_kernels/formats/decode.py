"""The loop every format's codes kernel is made of."""

from __future__ import annotations

from typing import Any

from nbflow_kernels._jit import inline


@inline
def decode_codes(
    code: Any, block_size: Any, block_bytes: Any, data: Any, codes: Any, start: Any, stop: Any
) -> None:
    """Write the codes of rows [start, stop); ``code(row, at, i)`` decodes one of a block."""
    for r in range(start, stop):
        row, out = data[r], codes[r]
        for b in range(data.shape[1] // block_bytes):
            for i in range(block_size):
                out[b * block_size + i] = code(row, b * block_bytes, i)
