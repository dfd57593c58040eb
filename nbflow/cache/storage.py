"""The pages themselves: keys and values of one rank's layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nbflow_kernels.kvcache.formats import kv_format

LAYOUT = "HND"
"""A page holds one head's tokens after the other: attention reads them as one stream."""


class KVStorage:
    """For each layer a pair (keys, values) of shape (pages, heads, page_size, row length), HND.

    Parameters
    ----------
    layers : sequence of int
        Numbers of the layers.
    page_size : int
        Tokens per page.
    n_kv_heads, head_dim : int
        Heads, and numbers of a head vector.
    kv : str
        Element format, a name of `nbflow_kernels.kvcache.formats.kv_format`.
    """

    def __init__(
        self, layers: Sequence[int], page_size: int, n_kv_heads: int, head_dim: int, kv: str
    ) -> None:
        self.page_size = page_size
        self.format = kv_format(kv)
        self._shape = (n_kv_heads, page_size, self.format.row_length(head_dim))
        self.layers = {i: (self._pages(0), self._pages(0)) for i in layers}
        self.n_pages = 0
        self.version = 0
        """Counts how often the arrays have been made anew."""

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all pages."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers.values())

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page, all layers together."""
        return 2 * len(self.layers) * int(np.prod(self._shape)) * self.format.dtype.itemsize

    def ensure(self, n_pages: int) -> None:
        """Have at least `n_pages` pages, keeping what the present ones hold."""
        if n_pages <= self.n_pages:
            return
        for layer, (keys, values) in self.layers.items():
            grown = self._pages(n_pages), self._pages(n_pages)
            grown[0][: self.n_pages] = keys
            grown[1][: self.n_pages] = values
            self.layers[layer] = grown
        self.n_pages = n_pages
        self.version += 1

    def release(self) -> None:
        """Give all memory back; no page is left."""
        self.layers = {i: (self._pages(0), self._pages(0)) for i in self.layers}
        self.n_pages = 0
        self.version += 1

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy pages (from, to), one after the other."""
        for source, target in pairs:
            for keys, values in self.layers.values():
                keys[target] = keys[source]
                values[target] = values[source]

    def _pages(self, n: int) -> np.ndarray:
        # Zeros, not garbage: a page's unused tail is read (and masked) by vector loads.
        return np.zeros((n, *self._shape), self.format.dtype)
