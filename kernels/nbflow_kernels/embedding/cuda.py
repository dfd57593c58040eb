"""Embedding rows on CUDA devices, see `nbflow_kernels.formats.cuda_gather`.

An index that is not in the table gives a row of NaN: checking indices would wait for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels import cuda
from nbflow_kernels.formats.cuda_gather import clear_foreign_rows, gather, shard_rows


def embedding(ids: Any, table: Any, scale: float, out: Any) -> None:
    """See `nbflow_kernels.embedding`."""
    if not out.size:
        return
    if hasattr(table, "format"):
        from nbflow_kernels.formats.cuda_dequantize import decode

        decode(table, ids, scale, out)
    else:
        gather(ids, table, scale, out)


def embedding_shard(ids: Any, table: Any, scale: float, first_row: int, out: Any) -> None:
    """Gather rows of a table of which `table` holds those from `first_row` on; others are zeros.

    The sum over the ranks that share the table is the look-up in the whole table.
    """
    if not out.size:
        return
    rows = cuda.device_of(out).empty((len(out),), np.int32)
    shard_rows(ids, first_row, table.shape[0], rows)
    embedding(rows, table, scale, out)
    clear_foreign_rows(rows, out)
