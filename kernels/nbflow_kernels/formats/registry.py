"""The interface of weight formats, and the registry `FORMATS` from names to formats."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats.codec_spec import CodecSpec, DecodedBlocks, ReadRows
from nbflow_kernels.plugins import note

Bytes = NDArray[Any]  # of uint8; NumPy's annotations call ``bytes >> 4`` a signed integer
Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
"""Float16 numbers as raw bits."""
ACTIVATION_TYPES = ("q8_1", "q8_k")
_MIX = re.compile(r"(q[2-6]_k)_(s|m|l|xl)")
"""llama.cpp's names of files, which have several formats."""


class QuantFormat(ABC):
    """Weight format: the storage of a block of consecutive weights of one row.

    A row is a whole number of contiguous blocks.  `QuantTensor` and `quantize` handle shapes,
    padding and checks.
    """

    name: str
    """The explicit name, e.g. ``q3h_b64t1``."""
    block_size: int
    """Weights per block."""
    block_bytes: int
    """Storage bytes per block."""

    @property
    def bits_per_weight(self) -> float:
        """Storage cost, scales included: ``8 * block_bytes / block_size``."""
        return 8 * self.block_bytes / self.block_size

    def row_blocks(self, n_columns: int) -> int:
        """Return the number of blocks of a row of `n_columns` weights."""
        return -(-n_columns // self.block_size)

    @abstractmethod
    def dequantize_blocks(self, blocks: Bytes) -> Floats:
        """Dequantize blocks (n, block_bytes) to float32 (n, block_size), in NumPy."""

    @abstractmethod
    def dequantize_rows(self, data: Bytes, out: Floats) -> None:
        """Dequantize rows (rows, row bytes) to `out` (rows, columns) with the compiled kernel."""

    @property
    def decodes_from_storage(self) -> bool:
        """True if matmuls decode the storage bytes because the format has no packed layout."""
        return False

    @property
    def takes_int8(self) -> bool:
        """True if weights are integers times a scale, which int8 activations can multiply."""
        return True

    @property
    def has_mma_layout(self) -> bool:
        """True if products on CUDA read the MMA layout; others dequantize panels to floats."""
        return not self.decodes_from_storage

    @property
    def integer_form(self) -> CodecSpec:
        """Decode formula of the format's integers; float formats have none.

        Raises
        ------
        UsageError
            If the format stores no integers.
        """
        raise UsageError(f"format {self.name} stores no integers")

    def integers(self, data: Bytes) -> DecodedBlocks:
        """Unpack rows (rows, row bytes) into the integers and floats that they store.

        Raises
        ------
        UsageError
            If the format stores no integers.
        """
        raise UsageError(f"format {self.name} stores no integers")

    def stored_integers(self, data: Bytes) -> DecodedBlocks:
        """Unpack rows as `integers`, with the codes that the MMA layout stores."""
        return self.integers(data)

    def pack(self, rows: ReadRows, n_rows: int, n_blocks: int) -> Any:
        """Repack rows of `n_blocks` blocks into the CPU layout, `CpuPacked` or `PackedFloats`.

        ``rows(start, stop)`` returns storage bytes (stop - start, row bytes).
        """
        from nbflow_kernels.formats import layout_cpu as packed

        columns = n_blocks * self.block_size
        return packed.pack(self.integer_form, self.integers, rows, n_rows, columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)  # a copy or an unpickled format is the same object

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.bits_per_weight:g} bits per weight>"


class Formats(Mapping[str, QuantFormat]):
    """Registry of formats by explicit or short name, case-insensitive; iterates explicit names."""

    def __init__(self) -> None:
        self._formats: dict[str, QuantFormat] = {}
        self.short_names: dict[str, str] = {}
        """Short or alternative names to explicit names."""
        self.built_in: dict[str, QuantFormat] = {}
        """Formats of this package, without user-defined ones."""
        self.families: list[Callable[[str], QuantFormat | None]] = []
        """Functions that make formats of a family by name, or return None."""

    def fill(self, formats: tuple[QuantFormat, ...], short_names: dict[str, str]) -> None:
        """Add the formats of this package, in the order in which tables list them."""
        self.built_in.update({f.name: f for f in formats})
        self._formats.update(self.built_in)
        self.short_names.update(short_names)

    def __getitem__(self, name: str) -> QuantFormat:
        lower = name.lower() if isinstance(name, str) else name
        found = self._find(lower)
        if found is None and lower in ACTIVATION_TYPES:
            raise UsageError(
                f"{name} is no format of weights: GGML quantizes activations to it while it "
                "computes, and no file holds it; for weights of 8 bits use q8_0"
            )
        if found is None:
            mix = _MIX.fullmatch(str(lower))
            if mix and self._find(mix[1]):
                raise UsageError(
                    f"{name} is llama.cpp's mixture of formats, not one: use {mix[1]} for all "
                    "matrices, or a policy with a format for each; files with it are read as they "
                    "are"
                )
            raise unknown_name("format", name, [*self.short_names, *self._formats])
        return found

    def _find(self, lower: Any) -> QuantFormat | None:
        """Return the format of a lower-case name: a registered one, or one of a family."""
        found = self._formats.get(self.short_names.get(lower, lower))
        if found is None and isinstance(lower, str):
            found = next(filter(None, (family(lower) for family in self.families)), None)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """Return the format of that name, or `default`."""
        try:
            return self[name]
        except UsageError:
            return default

    def add(self, format: QuantFormat) -> None:
        """Add a format under its name; `nbflow_kernels.register_format` checks it first."""
        self._formats[format.name] = format
        self.note(format)

    def note(self, format: QuantFormat) -> None:
        """Record that a plugin has registered a format."""
        note("format", format.name, lambda: self._formats.get(format.name) is format)

    def remove(self, name: str) -> None:
        """Remove the format with that explicit name."""
        del self._formats[name]

    def __contains__(self, name: object) -> bool:
        return self._find(name.lower() if isinstance(name, str) else name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)


FORMATS = Formats()
"""All weight formats by name; `nbflow_kernels.formats` fills it."""


def _by_name(name: str) -> QuantFormat:
    return FORMATS[name]
