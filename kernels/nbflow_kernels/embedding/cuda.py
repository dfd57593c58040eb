"""Embedding rows on CUDA devices, see `nbflow_kernels.formats.cuda_gather`.

An index that is not in the table gives a row of NaN: checking indices would wait for the device.
"""

from __future__ import annotations

from typing import Any

from nbflow_kernels.formats.cuda_gather import gather


def embedding(ids: Any, table: Any, scale: float, out: Any) -> None:
    """See `nbflow_kernels.embedding`."""
    if not out.size:
        return
    if hasattr(table, "format"):
        from nbflow_kernels.formats.cuda_dequantize import decode

        decode(table, ids, scale, out)
    else:
        gather(ids, table, scale, out)
