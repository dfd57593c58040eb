"""Generator of Java's ``java.util.Random``, with which Inferflow samples."""

from __future__ import annotations

_MULTIPLIER, _INCREMENT, _MASK = 0x5DEECE66D, 0xB, (1 << 48) - 1


class JavaRandom:
    """Linear congruential generator of 48 bits, as documented for ``java.util.Random``.

    Examples
    --------
    >>> JavaRandom(42).next_double()
    0.7275636800328681
    """

    def __init__(self, seed: int) -> None:
        self._state = (seed ^ _MULTIPLIER) & _MASK

    def next(self, bits: int) -> int:
        """Return the upper `bits` (at most 32) of the next state."""
        self._state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        return self._state >> (48 - bits)

    def next_double(self) -> float:
        """Return a number in [0, 1) with 53 random bits."""
        return ((self.next(26) << 27) + self.next(27)) / (1 << 53)
