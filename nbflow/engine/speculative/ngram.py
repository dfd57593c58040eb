"""N-gram proposer: draft tokens from the last earlier occurrence of the final n-gram.

A. Saxena, "Prompt Lookup Decoding", 2023; vLLM's ``ngram`` method.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbflow_kernels.errors import UsageError


class NgramProposer:
    """Prompt-lookup proposer for one growing sequence.

    Parameters
    ----------
    min_n, max_n : int
        The last `max_n` tokens are looked up first, then fewer, down to `min_n`; vLLM's
        ``prompt_lookup_min`` and ``prompt_lookup_max``.

    Examples
    --------
    >>> NgramProposer()([1, 2, 3, 4, 1, 2], 3)
    [3, 4, 1]
    """

    def __init__(self, min_n: int = 1, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise UsageError(f"1 <= min_n <= max_n is required, got min_n={min_n}, max_n={max_n}")
        self._sizes = range(max_n, min_n - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._n = 0

    def __call__(self, ids: Sequence[int], n: int) -> list[int]:
        """Return at most `n` draft tokens."""
        if len(ids) < self._n:
            self._after, self._n = {}, 0
        # last end of each n-gram; the final n-gram is looked up, not entered
        for end in range(max(1, self._n), len(ids)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(ids[end - size : end])] = end
        self._n = len(ids)
        for size in self._sizes:
            start = self._after.get(tuple(ids[len(ids) - size :])) if size <= len(ids) else None
            if start is not None:
                return list(ids[start : start + n])
        return []
