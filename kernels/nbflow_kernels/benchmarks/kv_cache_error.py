"""``python -m nbflow_kernels.benchmarks.kv_cache_error``: attention error of KV cache formats.

Prints a Markdown table of every KV cache format: its size and the relative root mean square error
of attention, in float64, against exact keys and values.  Queries, keys and values are N(0, 1) with
heads of 128, 512 keys and a fixed seed.  Keys of trained models differ: a few of their channels are
far larger than the others, which increases the error of formats with large blocks.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.attention.reference import single_prefill_with_kv_cache
from nbflow_kernels.kv_cache.cpu_codec import KINDS
from nbflow_kernels.kv_cache.formats import kv_format
from nbflow_kernels.kv_cache.reference import decode, decode_nvfp4, encode, encode_nvfp4

HEAD_DIM = 128
NVFP4, NVFP4_BITS = "nvfp4", 4.5
"""Caches in two arrays (`nbflow_kernels.nvfp4_quantize_append_paged_kv_cache`): no `kv_format`."""
HEADER = (
    "| format | bits/value, D = 128 | D = 80 | error, keys and values | error, keys alone |\n"
    "|---|---:|---:|---:|---:|"
)


@functools.cache
def sample() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return queries (32, 4, 128), keys and values (512, 4, 128)."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((32, 4, HEAD_DIM))
    return q, rng.standard_normal((512, 4, HEAD_DIM)), rng.standard_normal((512, 4, HEAD_DIM))


def stored(x: NDArray[np.float64], format: str) -> NDArray[np.float64]:
    """Return numbers (n, G, D) after they were in a cache of that format."""
    if format == NVFP4:
        return decode_nvfp4(*encode_nvfp4(x.astype(np.float32), 1.0))
    there = kv_format(format)
    rows = encode(x.astype(np.float32), there.dtype, there.name)
    return decode(rows, there.name, x.shape[-1])


@functools.cache
def attention_error(format: str, *, values: bool = True) -> float:
    """Return the relative error of attention over a cache with keys (and `values`) in a format.

    Examples
    --------
    >>> attention_error("f32") < 1e-6 < attention_error("q8_0") < 0.02
    True
    """
    q, k, v = sample()
    exact = single_prefill_with_kv_cache(q, k, v)
    found = single_prefill_with_kv_cache(q, stored(k, format), stored(v, format) if values else v)
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))


def table() -> str:
    """Return the Markdown table of all formats."""
    lines = [HEADER]
    for name in (*KINDS, NVFP4):
        both, keys = attention_error(name), attention_error(name, values=False)
        bits = [
            NVFP4_BITS if name == NVFP4 else kv_format(name).bits_per_value(width)
            for width in (HEAD_DIM, 80)
        ]
        lines.append(f"| `{name}` | {bits[0]:g} | {bits[1]:g} | {both:.2g} | {keys:.2g} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
