"""Which tokens of which requests run in the next step.  Plain Python, no arrays.

Requests that are generating go first, one token each; what is left of the budget goes to prompts,
in the order of arrival, cut into pieces where they are longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbflow.engine.request import Request


def next_tokens(requests: Sequence[Request], budget: int) -> list[tuple[int, int]]:
    """Return (index of a request, number of its pending tokens) for the next step.

    Parameters
    ----------
    requests : sequence of Request
        All requests, in order of arrival.
    budget : int
        Most tokens in one step.
    """
    running = [(i, len(r.pending)) for i, r in enumerate(requests) if r.finish_reason is None]
    chosen = []
    for i, n in sorted(running, key=lambda item: item[1] > 1):
        n = min(n, budget)
        if n:
            chosen.append((i, n))
            budget -= n
    return chosen
