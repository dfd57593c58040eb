"""Names of gpt-oss' gated activation: ``swigluoai``, or ``swigluoai:4.5`` with another limit."""

from __future__ import annotations

import math

NAME = "swigluoai"
ALPHA, LIMIT = 1.702, 7.0
"""Numbers of gpt-oss."""


def swigluoai_name(limit: float = LIMIT) -> str:
    """Return the name of the activation with a limit.

    Examples
    --------
    >>> swigluoai_name(7.0), swigluoai_name(4.5)
    ('swigluoai', 'swigluoai:4.5')
    """
    return NAME if limit == LIMIT else f"{NAME}:{limit!r}"


def swigluoai_limit(activation: str) -> float | None:
    """Return the limit in a name of the activation, None for any other name.

    Examples
    --------
    >>> swigluoai_limit("swigluoai:4.5"), swigluoai_limit("silu")
    (4.5, None)
    """
    name, _, number = activation.partition(":")
    if name != NAME:
        return None
    try:
        limit = float(number) if number else LIMIT
    except ValueError:
        return None
    return limit if math.isfinite(limit) and limit > 0 else None
