"""q8 quantization of all-reduce payloads: blocks of 32 int8 codes with a float32 scale.

A message holds the codes of all blocks, then their scales, viewed as float32.  The error is at most
max|x| / 254 of the block.  Blocks with NaN or infinity keep them in their scale.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit

Q8_BLOCK = 32


def q8_packed_bytes(size: int) -> int:
    """Return the message bytes of `size` numbers."""
    return -(-size // Q8_BLOCK) * (Q8_BLOCK + 4)


def q8_pack(flat: np.ndarray) -> np.ndarray:
    """Quantize flat float32 numbers to a message."""
    packed = np.empty(q8_packed_bytes(flat.size) // 4, np.float32)
    _pack(flat, *_parts(packed))
    return packed


def q8_unpack(packed: np.ndarray, size: int) -> np.ndarray:
    """Dequantize the `size` numbers of a message."""
    result = np.zeros(size, np.float32)
    q8_add(packed, result)
    return result


def q8_add(packed: np.ndarray, total: np.ndarray) -> None:
    """Dequantize a message and add it to `total`."""
    _add(*_parts(packed), total)


def q8_error(flat: np.ndarray, packed: np.ndarray) -> tuple[float, float]:
    """Return the sums of squares of the numbers and of their quantization errors."""
    signal, noise = _error(flat, *_parts(packed))
    return float(signal), float(noise)


def _parts(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the codes and scales of a message."""
    n_blocks = packed.nbytes // (Q8_BLOCK + 4)
    codes = packed[: n_blocks * Q8_BLOCK // 4].view(np.int8)
    return codes, packed[n_blocks * Q8_BLOCK // 4 :]


@jit.kernel(strict=True)
def _pack(flat, codes, scales):  # type: ignore[no-untyped-def]
    """Write codes (B * 32,) and scales (B,) of numbers (n,)."""
    for block in range(len(scales)):
        first = block * Q8_BLOCK
        n = min(Q8_BLOCK, len(flat) - first)
        largest = np.float32(0)
        for i in range(first, first + n):
            magnitude = abs(flat[i])
            if largest == largest and not magnitude <= largest:  # a NaN stays
                largest = magnitude
        scale = largest / np.float32(127)
        scales[block] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        finite = largest < np.float32(np.inf)
        for i in range(n):
            codes[first + i] = np.int8(np.rint(flat[first + i] * inverse)) if finite else np.int8(1)
        for i in range(n, Q8_BLOCK):
            codes[first + i] = 0


@jit.kernel(strict=True)
def _add(codes, scales, total):  # type: ignore[no-untyped-def]
    """Add codes (B * 32,) times scales (B,) to numbers (n,)."""
    for block in range(len(scales)):
        scale = scales[block]
        for i in range(block * Q8_BLOCK, min((block + 1) * Q8_BLOCK, len(total))):
            total[i] += np.float32(codes[i]) * scale


@jit.kernel(strict=True)
def _error(flat, codes, scales):  # type: ignore[no-untyped-def]
    """Return the sums of squares of numbers, and of their differences to the rounded ones."""
    signal = noise = 0.0
    for i in range(len(flat)):
        difference = flat[i] - np.float32(codes[i]) * scales[i // Q8_BLOCK]
        signal += flat[i] * flat[i]
        noise += difference * difference
    return signal, noise
