"""How the tokens of several sequences are put into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Piece = tuple[int, int, int]
"""Number of a sequence, and from which to which of its tokens."""


def pieces(lengths: Sequence[int], most: int, whole: bool) -> Iterator[list[Piece]]:
    """Yield which tokens of which sequences run together, at most `most` of them.

    With `whole` no sequence is cut, and one that is longer than `most` runs alone.

    Examples
    --------
    >>> list(pieces([3, 4, 2], 5, whole=False))
    [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4), (2, 0, 2)]]
    >>> list(pieces([3, 4, 2], 5, whole=True))
    [[(0, 0, 3)], [(1, 0, 4)], [(2, 0, 2)]]
    """
    step: list[Piece] = []
    room = most
    for b, length in enumerate(lengths):
        start = 0
        while start < length:
            if step and (room < 1 or (whole and length > room)):
                yield step
                step, room = [], most
            stop = length if whole else min(length, start + room)
            step.append((b, start, stop))
            room -= stop - start
            start = stop
    if step:
        yield step
