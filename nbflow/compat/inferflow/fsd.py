"""FSD (frustratingly simple decoding): n-gram model of the text as an anti-language model.

H. Yang et al., "A Frustratingly Simple Decoding Method for Neural Text Generation", LREC-COLING
2024, arXiv:2305.12675.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class NgramModel:
    """Back-off n-gram model with counts of orders 1 to n.

    `n` is the order: the longest context has n - 1 tokens.  `beta` is the share of the longest
    context's estimate; each shorter one gets `beta` of what is left.
    """

    def __init__(self, n: int, beta: float) -> None:
        self.n, self.beta = n, beta
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], Counter[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the counts."""
        for token in tokens:
            for i in range(min(self.n, len(self.tokens) + 1)):
                self._after.setdefault(self._context(i), Counter())[token] += 1
            self.tokens.append(token)

    def penalty(self, token: int) -> float:
        """Return the model's probability of `token`; 0 while the text is shorter than n - 1.

        For i = n - 1 .. 0, with c the count of the token after the last i tokens and t the count of
        all tokens there: ``rest * beta * c / (t + 1)``, or ``rest * c / t`` for i = 0; each order
        in which the token occurred leaves ``1 - beta`` of the rest to the shorter ones.
        """
        if len(self.tokens) < self.n - 1:
            return 0.0
        found, rest = 0.0, 1.0
        for i in range(self.n - 1, -1, -1):
            counts = self._after.get(self._context(i))
            count = counts[token] if counts else 0
            if not counts or not count:
                continue
            total = counts.total()
            found += rest * (self.beta * count / (total + 1) if i else count / total)
            rest *= 1.0 - self.beta
        return found

    def _context(self, i: int) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.tokens) - i :])
