"""Page storage: keys and values of the layers of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nbflow.spec.kv_formats import Pair, parse_kv
from nbflow.spec.layer_specs import HeadShape
from nbflow.spec.model_spec import ModelSpec
from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import KVFormat

LAYOUT = "HND"
"""Page layout (heads, tokens, dim): attention reads the tokens of a head contiguously."""


PageArray = tuple[tuple[int, int, int], np.dtype[Any]]
"""Shape and dtype of one page."""


class KVStorage:
    """Keys and values of each layer, shape (pages, heads, page_size, row length), HND.

    Parameters
    ----------
    layers : sequence of int
        Numbers of the layers.
    page_size : int
        Tokens per page.
    heads : HeadShape or mapping of int to HeadShape
        KV heads of all layers, or of each.
    kv : str
        Formats of keys and values: see `nbflow.spec.kv_formats`.
    xp : module
        Array module: NumPy, or the allocator of a device.
    host : pair of module and int, optional
        Allocator and number of the last layers that are kept in host memory.
    n_layers : int, optional
        Layers of the whole model; by default those here.
    """

    def __init__(
        self,
        layers: Sequence[int],
        page_size: int,
        heads: HeadShape | Mapping[int, HeadShape],
        kv: str,
        xp: Any = np,
        host: tuple[Any, int] = (np, 0),
        n_layers: int | None = None,
    ) -> None:
        self.page_size = page_size
        count = len(layers) if n_layers is None else n_layers
        self.formats = {layer: parse_kv(kv).of(layer, count) for layer in layers}
        """Formats of keys and values of each layer."""
        n_here = len(layers) - host[1]
        self._xp = {layer: xp if i < n_here else host[0] for i, layer in enumerate(layers)}
        self.n_host_layers = host[1]
        """Number of last layers in host memory, with a device."""
        self._arrays = {
            layer: self._arrays_of_layer(
                heads if isinstance(heads, HeadShape) else heads[layer], self.formats[layer]
            )
            for layer in layers
        }
        self._held: dict[int, tuple[Any, ...]] = dict.fromkeys(layers, ())
        self.layers: dict[int, tuple[Any, Any]] = {}
        """Keys and values of each layer."""
        self.n_pages = 0
        self.version = 0
        """Incremented on each reallocation."""
        self.release()

    def kinds_of(self, layer: int | None) -> tuple[int, int]:
        """Return the format codes of a layer's keys and values for kernels."""
        keys, values = self.formats[layer or 0]
        return keys.kind, values.kind

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all pages."""
        return self.n_pages * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the pages in host memory, with a device."""
        first = len(self._held) - self.n_host_layers
        return self.n_pages * sum(map(self._layer_bytes, list(self._held)[first:]))

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page over all layers."""
        return sum(map(self._layer_bytes, self._held))

    def _layer_bytes(self, layer: int) -> int:
        """Return the bytes of one page of a layer."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._arrays[layer])

    def ensure(self, n_pages: int) -> None:
        """Grow to at least `n_pages` pages, keeping their contents.

        If memory runs out, some layers have grown and none has lost a page.
        """
        if n_pages <= self.n_pages:
            return
        self.version += 1
        for layer in self._held:
            self._keep(layer, self._grown(layer, n_pages))
        self.n_pages = n_pages

    def _grown(self, layer: int, n_pages: int) -> tuple[Any, ...]:
        """Return a larger copy of the pages of a layer."""
        new = self._pages(layer, n_pages)
        for a, b in zip(self._held[layer], new, strict=True):
            b[: self.n_pages] = a[: self.n_pages]
        return new

    def release(self) -> None:
        """Free all pages."""
        for layer in self._held:
            self._keep(layer, self._pages(layer, 0))
        self.n_pages = 0
        self.version += 1

    def copy_pages(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy pages (from, to) in order."""
        for source, target in pairs:
            for arrays in self._held.values():
                for array in arrays:
                    array[target] = array[source]

    def _arrays_of_layer(self, heads: HeadShape, formats: Pair) -> list[PageArray]:
        """Return shape and dtype of a page for each array of a layer."""
        widths = heads.key_dim, heads.value_dim
        return [
            self._page_array(heads.n_kv_heads, format, width)
            for format, width in zip(formats, widths, strict=True)
        ]

    def _page_array(self, n_heads: int, format: KVFormat, head_dim: int) -> PageArray:
        return (n_heads, self.page_size, format.row_length(head_dim)), format.dtype

    def _keep(self, layer: int, arrays: tuple[Any, ...]) -> None:
        self._held[layer] = arrays
        self.layers[layer] = self._pair(arrays)

    def _pair(self, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return keys and values from the arrays of a layer."""
        keys, values = arrays
        return keys, values

    def _pages(self, layer: int, n: int) -> tuple[Any, ...]:
        xp = self._xp[layer]
        # Zeros, not garbage: a page's unused tail is read (and masked) by vector loads.
        return tuple(xp.zeros((n, *shape), dtype) for shape, dtype in self._arrays[layer])


class LatentStorage(KVStorage):
    """MLA storage: one latent vector per token, whose first columns are the values.

    The values of a layer are a view of its pages.  Parameters as in `KVStorage`; vectors have
    `width` columns, of which `value_width` are values.  With `index_width` there are also float32
    index keys of this width, whose small differences decide which keys are selected.
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
        index_width: int = 0,
    ) -> None:
        self._index_width = index_width
        self.index_keys: dict[int, Any] = {}
        """Index keys of each layer, shape (pages, 1, page_size, index_width)."""
        formats = parse_kv(kv)
        format, other = formats.default
        if formats.entries:
            raise UsageError(f"kv={kv!r}: latent attention has one format in all layers")
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
        super().__init__(layers, page_size, HeadShape(1, width, value_width), kv, xp, host)

    def _arrays_of_layer(self, heads: HeadShape, formats: Pair) -> list[PageArray]:
        found = [self._page_array(heads.n_kv_heads, formats[0], heads.key_dim)]
        if self._index_width:
            found.append(((1, self.page_size, self._index_width), np.dtype(np.float32)))
        return found

    def _keep(self, layer: int, arrays: tuple[Any, ...]) -> None:
        super()._keep(layer, arrays)
        if self._index_width:
            self.index_keys[layer] = arrays[1]

    def _pair(self, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
        vectors = arrays[0]
        return vectors, vectors[..., : self._value_length]


def make_storage(
    spec: ModelSpec,
    layers: Sequence[int],
    page_size: int,
    heads: Callable[[int], HeadShape],
    kv: str,
    xp: Any = np,
    host: tuple[Any, int] = (np, 0),
) -> KVStorage:
    """Return the storage of some layers of a model; `heads` gives those of a layer of the rank."""
    if spec.latent is not None:
        width, value_width = spec.cached_dim, spec.latent.kv_rank
        index_width = 0 if spec.indexer is None else spec.indexer.dim
        return LatentStorage(layers, page_size, width, value_width, kv, xp, host, index_width)
    all_heads = {i: heads(i) for i in layers}
    return KVStorage(layers, page_size, all_heads, kv, xp, host, spec.n_layers)
