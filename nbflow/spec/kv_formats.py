"""KV cache formats by layer: one pair for all layers, and others for some.

``"q4_0"`` and ``"q8_0/q4_0"`` (keys first) are formats of all layers.  After semicolons follow
layers with formats that differ: ``"q4_0;0-1:f16;-2:q8_0/q4_0"`` has float16 in the first two layers
and q8_0/q4_0 in the last two.  The first entry that names a layer decides.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from nbflow_kernels.errors import UsageError
from nbflow_kernels.kv_cache.formats import KVFormat, kv_formats

Pair = tuple[KVFormat, KVFormat]
"""Formats of keys and of values."""
_LAYERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?|-(\d{1,6})")


@dataclass(frozen=True)
class KVFormats:
    """Formats of keys and values of each layer; made by `parse_kv`."""

    default: Pair
    """Formats of the layers without an entry."""
    entries: tuple[tuple[int, int, Pair], ...] = ()
    """First and last layer, and their formats; (-n, -1) are the last n layers."""

    def of(self, layer: int, n_layers: int) -> Pair:
        """Return the formats of a layer of a model with `n_layers`."""
        for first, last, formats in self.entries:
            start, end = (n + n_layers if n < 0 else n for n in (first, last))
            if start <= layer <= end:
                return formats
        return self.default

    def check(self, n_layers: int) -> None:
        """Raise unless the model has all layers that are named."""
        for first, last, _ in self.entries:
            if last >= n_layers or -first > n_layers:
                found = f"the last {-first}" if first < 0 else f"layer {last}"
                raise UsageError(
                    f"kv names {found}, and the model has {n_layers} layers, 0 to {n_layers - 1}; "
                    "correct the layers after ';'"
                )


@functools.lru_cache(maxsize=64)
def parse_kv(kv: str) -> KVFormats:
    """Return the formats that an option `kv` stands for.

    Raises
    ------
    UsageError
        If a format is unknown, or an entry is not ``LAYERS:FORMAT``.

    Examples
    --------
    >>> formats = parse_kv("q4_0;0-1:f16;-1:q8_0/f16")
    >>> [[side.name for side in formats.of(layer, 4)] for layer in range(4)]
    [['f16', 'f16'], ['f16', 'f16'], ['q4_0', 'q4_0'], ['q8_0', 'f16']]
    """
    default, *rest = kv.split(";") if isinstance(kv, str) else [kv]
    return KVFormats(kv_formats(default), tuple(map(_entry, rest)))


def _entry(text: str) -> tuple[int, int, Pair]:
    """Return the layers and formats of ``LAYERS:FORMAT``."""
    layers, colon, format = text.partition(":")
    match = _LAYERS.fullmatch(layers.strip())
    if not colon or match is None:
        raise UsageError(
            f"kv: {text!r} must be LAYERS:FORMAT, where LAYERS is a layer (3), a range (0-3) or "
            "the last layers (-2), e.g. 'q4_0;0-1:f16'"
        )
    one, end, last = (None if n is None else int(n) for n in match.groups())
    if last is not None:
        return -last, -1, kv_formats(format)
    first = one or 0
    if end is not None and end < first:
        raise UsageError(f"kv: the range {layers.strip()!r} ends before it begins")
    return first, first if end is None else end, kv_formats(format)
