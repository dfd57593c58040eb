"""Partial sums as bytes: 32 numbers share a float32 scale, 9 bits for each number.

A message holds the codes of all blocks, then their scales, seen as float32.  A number is off by at
most half of 1/127 of its block's largest magnitude.  What is not finite stays so by its scale.
"""

from __future__ import annotations

import numpy as np

from nbflow_kernels.cpu import jit

Q8_BLOCK = 32


def q8_packed_bytes(size: int) -> int:
    """Return the bytes that `size` numbers take."""
    return -(-size // Q8_BLOCK) * (Q8_BLOCK + 4)


def q8_pack(flat: np.ndarray) -> np.ndarray:
    """Return float32 numbers, one-dimensional, as bytes with scales, seen as float32."""
    packed = np.empty(q8_packed_bytes(flat.size) // 4, np.float32)
    _pack(flat, *_parts(packed))
    return packed


def q8_unpack(packed: np.ndarray, size: int) -> np.ndarray:
    """Return the `size` numbers of `q8_pack`, rounded."""
    result = np.zeros(size, np.float32)
    q8_add(packed, result)
    return result


def q8_add(packed: np.ndarray, total: np.ndarray) -> None:
    """Add the numbers of `q8_pack`, rounded, to as many float32."""
    _add(*_parts(packed), total)


def q8_error(flat: np.ndarray, packed: np.ndarray) -> tuple[float, float]:
    """Return the sum of squares of numbers, and that of what `q8_pack` has rounded off them."""
    signal, noise = _error(flat, *_parts(packed))
    return float(signal), float(noise)


def _parts(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes and the scales of a message."""
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
