"""Byte-pair encoding by score, as SentencePiece does it.

A text begins as single characters.  Of all neighbours that together are a piece, those with the
highest score are joined, the leftmost first among equals, until no neighbours are a piece.

Text is cut first wherever no piece has the two characters side by side: nothing can be merged
across such a place, so what lies between is merged on its own, and words are remembered.  That is
exact, and makes the time linear in the text.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import pairwise

_REMEMBERED = 1 << 16  # words
_LONGEST_REMEMBERED = 64  # characters


class Merger:
    """Merges characters into pieces.

    Parameters
    ----------
    scores : mapping of str to float
        Score of each piece that text may be merged into.
    known : mapping of str to float, optional
        Join only what is in it on both sides.  SentencePiece asks nothing of the two sides,
        llama2.c wants them to be pieces.
    """

    def __init__(
        self, scores: Mapping[str, float], known: Mapping[str, float] | None = None
    ) -> None:
        self._scores = scores
        self._known = known
        self._side_by_side = {pair for piece in scores for pair in pairwise(piece)}
        self._words: dict[str, list[str]] = {}

    def split(self, text: str) -> list[str]:
        """Return `text` as pieces, and as single characters where there is no piece."""
        pieces: list[str] = []
        begin = 0
        side_by_side = self._side_by_side
        for end, pair in enumerate(pairwise(text), 1):
            if pair not in side_by_side:
                pieces += self._word(text[begin:end])
                begin = end
        return pieces + self._word(text[begin:]) if text else pieces

    def _word(self, word: str) -> list[str]:
        """Return a word's pieces, from memory where it is short."""
        if len(word) == 1:
            return [word]
        pieces = self._words.get(word)
        if pieces is None:
            pieces = self._merge(word)
            if len(word) <= _LONGEST_REMEMBERED:
                if len(self._words) >= _REMEMBERED:
                    self._words.clear()
                self._words[word] = pieces
        return pieces

    def _merge(self, word: str) -> list[str]:
        """Join neighbours, the highest score first and among equals the leftmost."""
        n = len(word)
        ends = list(range(1, n + 1))  # ends[i]: where the symbol that begins at i ends
        before = list(range(-1, n))  # before[i]: where the symbol that ends at i begins
        alive = [True] * n
        queue: list[tuple[float, int, int]] = []
        scores, known = self._scores, self._known

        def offer(left: int) -> None:
            middle = ends[left]
            if middle == n:
                return
            end = ends[middle]
            score = scores.get(word[left:end])
            if score is None:
                return
            if known is not None and not (word[left:middle] in known and word[middle:end] in known):
                return
            heapq.heappush(queue, (-score, left, end))

        for i in range(n - 1):
            offer(i)
        while queue:
            _, left, end = heapq.heappop(queue)
            # an entry is stale once either side has been joined to something else
            middle = ends[left] if alive[left] else n
            if middle == n or ends[middle] != end:
                continue
            alive[middle] = False
            ends[left] = end
            before[end] = left
            offer(left)
            if left > 0:
                offer(before[left])
        return [word[i : ends[i]] for i in range(n) if alive[i]]
