"""Write safetensors, with block formats as tensors of bytes.

A tensor in a block format has dtype ``U8`` and shape (rows, bytes of a row).  The entry
``nbflow.formats`` of ``__metadata__`` is JSON that says for each of them::

    {"NAME": {"format": "q4_b32t1a", "shape": [768, 256], "block": [32, 20]}}

`shape` is that of the weights, `block` the weights and bytes of a block.  Other programs see bytes;
`nbflow.checkpoint.readers.safetensors` reads the block formats back.

The ``safetensors`` package needs all tensors in memory; these are quantized one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, BinaryIO

import nbflow_kernels as nk
from nbflow.checkpoint.dtypes import ITEM_BITS
from nbflow.checkpoint.readers.safetensors import DTYPES, FORMATS_KEY
from nbflow.checkpoint.writers.tensor_plan import TensorPlan
from nbflow_kernels.errors import UsageError

_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_safetensors(file: BinaryIO, tensors: Sequence[TensorPlan]) -> None:
    """Write header and tensors to an open file."""
    header = _header(tensors)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for tensor in tensors:
        tensor.write(file)


def _header(tensors: Sequence[TensorPlan]) -> dict[str, Any]:
    """Return the header as plain data."""
    formats = {
        t.name: {
            "format": t.format,
            "shape": list(t.shape),
            "block": [nk.FORMATS[t.format].block_size, nk.FORMATS[t.format].block_bytes],
        }
        for t in tensors
        if t.format not in ITEM_BITS
    }
    metadata = {"format": "pt"}  # required by transformers
    if formats:
        metadata[FORMATS_KEY] = json.dumps(formats, separators=(",", ":"))
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for t in tensors:
        end = begin + t.n_bytes
        if t.format in ITEM_BITS:
            if t.format not in _CODES:
                raise UsageError(f"tensor {t.name}: safetensors has no type for {t.format}")
            record: dict[str, Any] = {"dtype": _CODES[t.format], "shape": list(t.shape)}
        else:
            n_rows = math.prod(t.shape[:-1])
            record = {"dtype": "U8", "shape": [n_rows, t.n_bytes // max(1, n_rows)]}
        header[t.name] = {**record, "data_offsets": [begin, end]}
        begin = end
    return header
