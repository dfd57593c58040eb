"""Random sequences on pages, for the tests of attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbflow_kernels.attention import BatchPrefillWithPagedKVCacheWrapper
from nbflow_kernels.kv_cache.cases import page_table
from nbflow_kernels.kv_cache.formats import kv_format, split_names
from nbflow_kernels.kv_cache.reference import encode


def ints(*values: int) -> np.ndarray:
    """Return an int32 array."""
    return np.array(values, np.int32)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Return normally distributed numbers."""
    return rng.standard_normal(shape).astype(dtype)


def store(rows: np.ndarray, name: str) -> np.ndarray:
    """Return head vectors (..., D) as a cache of this format holds them."""
    format = kv_format(name)
    if name == "bf16":
        bits = rows.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if not rows.size:
        return np.zeros((*rows.shape[:-1], format.row_length(rows.shape[-1])), format.dtype)
    return encode(np.ascontiguousarray(rows, np.float32), format.dtype, format.name)


class Paged:
    """Random sequences, kept both as stored rows and on pages whose unused slots are NaN."""

    def __init__(
        self,
        rng: np.random.Generator,
        lens: list[int],
        heads: tuple[int, int, int],
        page_size: int,
        layout: str = "NHD",
        dtype: Any = np.float32,
        *,
        dim_vo: int | None = None,
        format: str | None = None,
    ) -> None:
        _, G, D = heads
        self.heads, self.page_size, self.layout = heads, page_size, layout
        self.format = {} if format is None else {"kv_format": format}
        self.dim_vo = D if dim_vo is None else dim_vo
        self.table = page_table(rng, lens, page_size)
        self.k = [normal(rng, n, G, D, dtype=dtype) for n in lens]
        self.v = [normal(rng, n, G, self.dim_vo, dtype=dtype) for n in lens]
        if format is not None:
            self.k, self.v = (
                [store(rows, name) for rows in part]
                for part, name in zip((self.k, self.v), split_names(format), strict=True)
            )
        self.cache = (self._pages(self.k), self._pages(self.v))

    def _pages(self, sequences: list[np.ndarray]) -> np.ndarray:
        indptr, indices, _ = self.table
        first, page_size = sequences[0], self.page_size
        unused = np.nan if first.dtype.kind == "f" else np.iinfo(first.dtype).max
        pages = np.full((len(indices), page_size, *first.shape[1:]), unused, first.dtype)
        for i, sequence in enumerate(sequences):
            for at in range(0, len(sequence), page_size):
                chunk = sequence[at : at + page_size]
                pages[indices[indptr[i] + at // page_size], : len(chunk)] = chunk
        return pages if self.layout == "NHD" else np.ascontiguousarray(pages.transpose(0, 2, 1, 3))

    def plan(self, wrapper: Any, qo_indptr: np.ndarray, **options: Any) -> Any:
        """Plan attention of these rows, causal by default."""
        options = {"causal": True, "head_dim_vo": self.dim_vo, **self.format, **options}
        return wrapper.plan(qo_indptr, *self.table, *self.heads, self.page_size, **options)

    def run(self, q: np.ndarray, qo_indptr: np.ndarray, cls: Any = None, **options: Any) -> Any:
        """Return output and LSE of a wrapper."""
        wrapper = (cls or BatchPrefillWithPagedKVCacheWrapper)(kv_layout=self.layout)
        sinks = options.pop("sinks", None)
        self.plan(wrapper, qo_indptr, **options)
        return wrapper.run(q, self.cache, return_lse=True, sinks=sinks)
