"""The pages themselves: keys and values of one rank's layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KV_FORMATS = {"f32": np.float32, "f16": np.float16}
"""Element formats of the key/value cache."""


class KVStorage:
    """For each layer a pair (keys, values) of shape (pages, page_size, heads, head_dim), NHD."""

    def __init__(
        self, layers: Sequence[int], page_size: int, n_kv_heads: int, head_dim: int, kv: str
    ) -> None:
        self.page_size = page_size
        self._shape = (page_size, n_kv_heads, head_dim)
        self._dtype = np.dtype(KV_FORMATS[kv])
        self.layers = {i: (self._pages(0), self._pages(0)) for i in layers}
        self.n_pages = 0

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all pages."""
        return sum(k.nbytes + v.nbytes for k, v in self.layers.values())

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

    def _pages(self, n: int) -> np.ndarray:
        # Zeros, not garbage: a page's unused tail is read (and masked) by vector loads.
        return np.zeros((n, *self._shape), self._dtype)
