"""The pages themselves: keys and values of one rank's layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError
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
        return np.zeros((n, *self._shape), self.format.dtype)


class LatentStorage(KVStorage):
    """Pages of one vector for each token, whose first columns are the values too.

    The pair (keys, values) of a layer is the pages and a view of their first columns.

    Parameters
    ----------
    layers, page_size, kv
        As of `KVStorage`.
    width : int
        Numbers of a vector.
    value_width : int
        Numbers of it that are values.
    """

    def __init__(
        self, layers: Sequence[int], page_size: int, width: int, value_width: int, kv: str
    ) -> None:
        super().__init__(layers, page_size, 1, width, kv)
        block = self.format.block_size
        if value_width % block:
            raise UsageError(
                f"kv={kv!r}: the {value_width} columns of a latent vector that are values must be "
                f"whole blocks of {block}; use kv='f16', or a format with a smaller block"
            )
        self._value_length = self.format.row_length(value_width)
        self.layers = {i: self._pair(self._pages(0)) for i in layers}

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all pages."""
        return sum(keys.nbytes for keys, _ in self.layers.values())

    def ensure(self, n_pages: int) -> None:
        """Have at least `n_pages` pages, keeping what the present ones hold."""
        if n_pages <= self.n_pages:
            return
        for layer, (vectors, _) in self.layers.items():
            grown = self._pages(n_pages)
            grown[: self.n_pages] = vectors
            self.layers[layer] = self._pair(grown)
        self.n_pages = n_pages

    def _pair(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return keys and values of pages of vectors."""
        return vectors, vectors[..., : self._value_length]


def make_storage(
    spec: ModelSpec, layers: Sequence[int], page_size: int, n_kv_heads: int, kv: str
) -> KVStorage:
    """Return the storage of some layers' keys and values for a model."""
    if spec.latent is not None:
        return LatentStorage(layers, page_size, spec.cached_dim, spec.latent.kv_rank, kv)
    return KVStorage(layers, page_size, n_kv_heads, spec.head_dim, kv)
