"""Storage formats of the KV cache: `KVFormat` by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbflow_kernels.arrays import is_cuda
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_kernels.formats import FORMATS
from nbflow_kernels.formats.float8 import FLOAT8_NAMES
from nbflow_kernels.kv_cache.cpu_codec import BLOCK, BLOCK_BYTES, FIRST_BLOCK_KIND, KINDS, LAYOUTS

_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
_FLOAT_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "uint16": "bf16",  # its bits
    **FLOAT8_NAMES,
}


@dataclass(frozen=True)
class KVFormat:
    """Storage format of keys or values in a cache; made by `kv_format`.

    A head vector (key or value of one token and head, D numbers) is a row of D floats or of
    ``ceil(D / block_size)`` blocks.  The last block is padded as in `quantize`, so every format
    holds every head size; `bits_per_value` includes the padding.
    """

    name: str
    """The explicit name, e.g. ``q8_b32t2``."""
    kind: int
    """Index of the format in `nbflow_kernels.kv_cache.cpu_codec.KINDS`."""
    dtype: np.dtype[Any]
    """dtype of the cache: float32, float16, uint16 (bits of bfloat16), or uint8 (the others)."""
    block_size: int
    """Numbers in a block; 1 for floats."""
    block_bytes: int
    """Bytes of a block."""

    @property
    def is_float(self) -> bool:
        """True for f32, f16 and bf16."""
        return self.kind < FIRST_BLOCK_KIND

    def row_bytes(self, head_dim: int) -> int:
        """Return the bytes of a head vector."""
        return -(-head_dim // self.block_size) * self.block_bytes

    def row_length(self, head_dim: int) -> int:
        """Return the length of the cache's last axis, in elements of `dtype`."""
        return self.row_bytes(head_dim) // self.dtype.itemsize

    def bits_per_value(self, head_dim: int) -> float:
        """Return the bits per stored number, including scales and padding."""
        return 8 * self.row_bytes(head_dim) / head_dim


def kv_format(name: str) -> KVFormat:
    """Return a cache format by name.

    Parameters
    ----------
    name : str
        ``f32``, ``f16``, ``bf16``, ``f8_e4m3``, ``f8_e5m2``, or a block format of `FORMATS` whose
        blocks have 32 or 64 numbers, by its explicit or short name: ``q8_0 q5_1 q5_0 q4_1 q4_0``,
        ``q8 q6 q5 q4 q3h q3 q2``; or a codebook ``lm4 lm3 lm2``.

    Returns
    -------
    KVFormat
        Sizes and dtype; ``row_length(D)`` is the last axis of the cache.

    Raises
    ------
    UsageError
        If the format is unknown, or not supported for a cache.

    Examples
    --------
    >>> from nbflow_kernels import kv_format
    >>> q8 = kv_format("q8_0")
    >>> q8.dtype.name, q8.row_length(128), q8.bits_per_value(128)
    ('uint8', 136, 8.5)
    >>> q8.row_length(80), q8.bits_per_value(80)  # 2.5 blocks, padded to 3
    (102, 10.2)
    """
    lower = name.lower() if isinstance(name, str) else name
    explicit = FORMATS.short_names.get(lower, lower)
    kind = KINDS.get(explicit)
    if kind is None:
        if explicit in FORMATS:
            raise UsageError(
                f"weight format {name} cannot hold a key/value cache: it needs blocks of 32 or 64 "
                f"numbers of any size; take one of {', '.join(KINDS)}"
            )
        raise unknown_name("kv_format", name, KINDS)
    dtype = np.dtype(_DTYPES.get(explicit, np.uint8))
    return KVFormat(explicit, kind, dtype, *LAYOUTS[kind, [BLOCK, BLOCK_BYTES]].tolist())


def kv_formats(name: str) -> tuple[KVFormat, KVFormat]:
    """Return the formats of keys and of values by name.

    Parameters
    ----------
    name : str
        One name of `kv_format` for both, or two separated by a slash, keys first
        (``"q8_0/q4_0"``).

    Returns
    -------
    pair of KVFormat
        Formats of keys and of values.

    Examples
    --------
    >>> from nbflow_kernels import kv_formats
    >>> [format.name for format in kv_formats("q8/q4_0")]
    ['q8_b32t2', 'q4_0']
    >>> [format.name for format in kv_formats("f16")]
    ['f16', 'f16']
    """
    keys, values = split_names(name)
    return kv_format(keys), kv_format(values)


def split_names(name: Any) -> tuple[Any, Any]:
    """Split ``"keys/values"`` into two names; a single name counts for both."""
    if not isinstance(name, str):
        return name, name
    keys, slash, values = name.partition("/")
    return keys.strip(), (values if slash else keys).strip()


def formats_of(k: Any, v: Any, name: str | None) -> tuple[KVFormat, KVFormat]:
    """Return the formats of the arrays of keys and of values; see `format_of`."""
    keys, values = split_names(name)
    return format_of(k, keys), format_of(v, values)


def kinds_of(k: Any, v: Any, name: str | None) -> tuple[int, int]:
    """Return the KINDS of the formats of keys and of values."""
    keys, values = formats_of(k, v, name)
    return keys.kind, values.kind


def format_of(array: Any, name: str | None) -> KVFormat:
    """Return the format of a cache array: `name`, or that of a float dtype."""
    if not isinstance(array, np.ndarray) and not is_cuda(array):
        raise TypeError(
            f"paged_kv_cache must be arrays (NumPy or on a CUDA device), got {type(array).__name__}"
        )
    found = array.dtype.name
    if name is None:
        if found not in _FLOAT_NAMES:
            raise TypeError(
                "paged_kv_cache must have dtype float32, float16, bfloat16 or float8, got "
                f"{found}; pass kv_format= for quantized pages and bits of float8"
            )
        return kv_format(_FLOAT_NAMES[found])
    wanted = kv_format(name)
    if array.dtype != wanted.dtype and _FLOAT_NAMES.get(found) != wanted.name:
        raise TypeError(
            f"paged_kv_cache in format {name} must have dtype {wanted.dtype.name}, got {found}"
        )
    return wanted
