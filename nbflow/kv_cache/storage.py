"""The pages themselves: keys and values of one rank's layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import KVFormat, kv_formats

LAYOUT = "HND"
"""A page holds one head's tokens after the other: attention reads them as one stream."""


PageArray = tuple[tuple[int, int, int], np.dtype[Any]]
"""Shape and dtype of one page."""


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
        Format of keys and values, or of each (``"q8/q4"``): see `nbflow_kernels.kv_formats`.
    xp : module
        Makes the arrays: NumPy, or what stands for it on a device.
    host : pair of module and int, optional
        What makes the arrays of the last layers, in the host's memory, and of how many.
    """

    def __init__(
        self,
        layers: Sequence[int],
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        kv: str,
        xp: Any = np,
        host: tuple[Any, int] = (np, 0),
    ) -> None:
        self.page_size = page_size
        self.formats = kv_formats(kv)
        """Of keys and of values."""
        n_here = len(layers) - host[1]
        self._xp = {layer: xp if i < n_here else host[0] for i, layer in enumerate(layers)}
        self.n_host_layers = host[1]
        """How many of the last layers lie in the host's memory, beside a device."""
        self._arrays = self._arrays_of_layer(n_kv_heads, head_dim)
        self._held: dict[int, tuple[Any, ...]] = dict.fromkeys(layers, ())
        self.layers: dict[int, tuple[Any, Any]] = {}
        """Keys and values of each layer."""
        self.n_pages = 0
        self.version = 0
        """Counts how often the arrays have been made anew."""
        self.release()

    @property
    def kinds(self) -> tuple[int, int]:
        """Return the numbers that kernels know the formats of keys and of values by."""
        return self.formats[0].kind, self.formats[1].kind

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self.n_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the pages in the host's memory, beside a device."""
        return self.n_pages * self.n_host_layers * self._layer_bytes

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page, all layers together."""
        return len(self._held) * self._layer_bytes

    @property
    def _layer_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._arrays)

    def ensure(self, n_pages: int) -> None:
        """Have at least `n_pages` pages, keeping what the present ones hold.

        Where there is no memory for them, some layers have more pages than `n_pages` says and none
        has lost any.
        """
        if n_pages <= self.n_pages:
            return
        self.version += 1
        for layer in self._held:
            self._keep(layer, self._grown(layer, n_pages))
        self.n_pages = n_pages

    def _grown(self, layer: int, n_pages: int) -> tuple[Any, ...]:
        """Return more pages of a layer with what the present ones hold."""
        new = self._pages(layer, n_pages)
        for a, b in zip(self._held[layer], new, strict=True):
            b[: self.n_pages] = a[: self.n_pages]
        return new

    def release(self) -> None:
        """Give all memory back; no page is left."""
        for layer in self._held:
            self._keep(layer, self._pages(layer, 0))
        self.n_pages = 0
        self.version += 1

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy pages (from, to), one after the other."""
        for source, target in pairs:
            for arrays in self._held.values():
                for array in arrays:
                    array[target] = array[source]

    def _arrays_of_layer(self, n_kv_heads: int, head_dim: int) -> list[PageArray]:
        """Return shape and dtype of a page of each array that a layer has."""
        return [self._page_array(n_kv_heads, format, head_dim) for format in self.formats]

    def _page_array(self, n_heads: int, format: KVFormat, head_dim: int) -> PageArray:
        return (n_heads, self.page_size, format.row_length(head_dim)), format.dtype

    def _keep(self, layer: int, arrays: tuple[Any, ...]) -> None:
        self._held[layer] = arrays
        self.layers[layer] = self._pair(arrays)

    def _pair(self, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return keys and values of the arrays of a layer."""
        keys, values = arrays
        return keys, values

    def _pages(self, layer: int, n: int) -> tuple[Any, ...]:
        xp = self._xp[layer]
        # Zeros, not garbage: a page's unused tail is read (and masked) by vector loads.
        return tuple(xp.zeros((n, *shape), dtype) for shape, dtype in self._arrays)


class LatentStorage(KVStorage):
    """Pages of one vector for each token, whose first columns are the values too.

    The pair (keys, values) of a layer is the pages and a view of their first columns.

    Parameters
    ----------
    layers, page_size, kv, xp, host
        As of `KVStorage`.
    width : int
        Numbers of a vector.
    value_width : int
        Numbers of it that are values.
    """

    def __init__(
        self,
        layers: Sequence[int],
        page_size: int,
        width: int,
        value_width: int,
        kv: str,
        xp: Any = np,
        host: tuple[Any, int] = (np, 0),
    ) -> None:
        format, other = kv_formats(kv)
        if format != other:
            raise UsageError(
                f"kv={kv!r}: the values of latent attention are part of its keys, so that both "
                f"have one format; use kv={format.name!r}"
            )
        if value_width % format.block_size:
            raise UsageError(
                f"kv={kv!r}: the {value_width} columns of a latent vector that are values must be "
                f"whole blocks of {format.block_size}; use kv='f16', or a format with a smaller "
                "block"
            )
        self._value_length = format.row_length(value_width)
        super().__init__(layers, page_size, 1, width, kv, xp, host)

    def _arrays_of_layer(self, n_kv_heads: int, head_dim: int) -> list[PageArray]:
        return [self._page_array(n_kv_heads, self.formats[0], head_dim)]

    def _pair(self, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
        (vectors,) = arrays
        return vectors, vectors[..., : self._value_length]


def make_storage(
    spec: ModelSpec,
    layers: Sequence[int],
    page_size: int,
    n_kv_heads: int,
    kv: str,
    xp: Any = np,
    host: tuple[Any, int] = (np, 0),
) -> KVStorage:
    """Return the storage of some layers' keys and values for a model."""
    if spec.latent is not None:
        width, value_width = spec.cached_dim, spec.latent.kv_rank
        return LatentStorage(layers, page_size, width, value_width, kv, xp, host)
    return KVStorage(layers, page_size, n_kv_heads, spec.head_dim, kv, xp, host)
