"""Trellis code of the formats q2t, q3t and q4t: from a bit stream to codes of 8 bits.

A block is a stream of k bits per weight, the lowest bit of a byte first.  The *state* of weight t
is the `STATE_BITS` = 12 bits of the stream that end with its own k bits; bits before the block are
0.  Consecutive states share all but k bits, so a quantizer chooses a path through a trellis of
2**(12 - k) nodes for the block as a whole (the bit-shift trellis of QTIP).  From a state,

    index = (newest 7 bits) xor MIXING * (oldest 4 bits)     over GF(2)
    code  = levels(k)[index]

Bit i of the product with the matrix is the parity of the oldest bits under ``MIXING[i]``.  The bit
between the two parts is unused.  The oldest bits thus choose the subset of 2**k of the 128 levels
from which the newest k bits select, as in Ungerboeck's codes; 4096 random levels, one per state,
have a larger error.

A decoder reads both parts of the states of 64 weights as bytes and looks up twice among 128 bytes:
with AVX-512 VBMI that is 4 instructions and an exclusive or.  With 2 bits, the oldest bits of 4
columns lie in the bytes of the newest bits of the 4 columns before: 3 instructions.

The matrix had the least error of 400 random ones on N(0, 1) weights, for 2, 3 and 4 bits together.
The levels are those of Lloyd's iteration on such weights (quantize, then move each level to the
mean of the weights that chose it), averaged over the last 8 of 16 rounds of 98,304 weights, made
antisymmetric and rounded with the largest at 127; hence they are not quite in order.
``tools/measure/trellis_constants.py`` finds both again.

Sources: A. Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing", NeurIPS
2024, arXiv:2406.11235, section 3.1 (bit-shift trellis); M. W. Marcellin and T. R. Fischer, "Trellis
coded quantization of memoryless and Gauss-Markov sources", IEEE Trans. Communications 38, 1990.
The code is this project's.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

STATE_BITS = 12
"""Bits of a state."""
INDEX_BITS = 7
"""Bits of an index: the newest bits of a state."""
OLDEST_BITS = 4
"""Bits of a state that are mixed into the index."""
MIXING = (11, 8, 5, 11, 12, 3, 14)
"""Bit i of an index is flipped by the parity of ``oldest bits & MIXING[i]``."""
ZERO = 128
"""value = code - ZERO."""

_POSITIVE = {
    2: (
        3,
        3,
        3,
        4,
        5,
        6,
        6,
        7,
        7,
        7,
        11,
        9,
        10,
        12,
        13,
        14,
        17,
        18,
        19,
        20,
        20,
        21,
        23,
        24,
        24,
        24,
        26,
        26,
        26,
        26,
        29,
        34,
        42,
        34,
        35,
        38,
        38,
        39,
        40,
        41,
        44,
        43,
        46,
        48,
        47,
        49,
        52,
        55,
        56,
        59,
        61,
        60,
        60,
        62,
        66,
        72,
        72,
        76,
        79,
        89,
        90,
        93,
        102,
        127,
    ),
    3: (
        1,
        2,
        3,
        4,
        3,
        5,
        5,
        7,
        7,
        9,
        9,
        10,
        10,
        11,
        12,
        13,
        16,
        17,
        17,
        18,
        18,
        19,
        22,
        21,
        22,
        24,
        24,
        25,
        26,
        27,
        28,
        30,
        32,
        32,
        33,
        34,
        35,
        35,
        38,
        40,
        40,
        43,
        44,
        44,
        45,
        46,
        47,
        52,
        56,
        54,
        55,
        58,
        59,
        61,
        62,
        68,
        73,
        72,
        74,
        84,
        84,
        93,
        105,
        127,
    ),
    4: (
        1,
        2,
        2,
        2,
        4,
        4,
        5,
        6,
        7,
        8,
        8,
        9,
        10,
        11,
        12,
        13,
        13,
        14,
        15,
        16,
        17,
        18,
        18,
        20,
        20,
        22,
        22,
        23,
        24,
        25,
        26,
        27,
        28,
        29,
        30,
        31,
        33,
        33,
        34,
        36,
        37,
        38,
        40,
        41,
        42,
        44,
        45,
        47,
        48,
        50,
        52,
        53,
        56,
        58,
        59,
        63,
        66,
        69,
        71,
        76,
        82,
        91,
        105,
        127,
    ),
}
"""Values of indices 64 to 127, by bits per weight; index i has minus the value of 127 - i."""


@functools.cache
def levels(bits: int) -> NDArray[np.uint8]:
    """Return the codes (128,) of indices, for `bits` bits per weight."""
    positive = np.array(_POSITIVE[bits], np.int16)
    found = np.concatenate([ZERO - positive[::-1], ZERO + positive]).astype(np.uint8)
    found.setflags(write=False)
    return found


@functools.cache
def flips() -> NDArray[np.uint8]:
    """Return the mask by which the oldest bits of a state flip its index, (2**OLDEST_BITS,)."""
    oldest = range(1 << OLDEST_BITS)
    found = [
        sum(((n & mask).bit_count() & 1) << i for i, mask in enumerate(MIXING)) for n in oldest
    ]
    return np.array(found, np.uint8)


@functools.cache
def codes_of_states(bits: int) -> NDArray[np.uint8]:
    """Return the code of each state, (2**STATE_BITS,)."""
    state = np.arange(1 << STATE_BITS)
    oldest, newest = state & (1 << OLDEST_BITS) - 1, state >> STATE_BITS - INDEX_BITS
    found: NDArray[np.uint8] = levels(bits)[newest ^ flips()[oldest]]
    found.setflags(write=False)
    return found


def states_of_stream(stream: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Return the states (n, weights) of streams (n, bytes)."""
    ones = np.unpackbits(stream, axis=1, bitorder="little").astype(np.int64)
    padded = np.pad(ones, ((0, 0), (STATE_BITS, 0)))
    ends = STATE_BITS + bits * np.arange(1, ones.shape[1] // bits + 1)
    states = np.zeros((len(stream), len(ends)), np.int64)
    for i in range(STATE_BITS):
        states |= padded[:, ends - STATE_BITS + i] << i
    return states
