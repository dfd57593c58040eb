"""Names of gpt-oss' gated activation: ``swigluoai``, or with other numbers.

``swigluoai:4.5`` has another limit, ``swigluoai:7.0:1.5`` another factor of the exponent, too.
"""

from __future__ import annotations

import math

NAME = "swigluoai"
ALPHA, LIMIT = 1.702, 7.0
"""Numbers of gpt-oss."""


def swigluoai_name(limit: float = LIMIT, alpha: float = ALPHA) -> str:
    """Return the name of the activation with a limit and a factor of the exponent.

    Examples
    --------
    >>> swigluoai_name(7.0), swigluoai_name(4.5), swigluoai_name(7.0, 1.5)
    ('swigluoai', 'swigluoai:4.5', 'swigluoai:7.0:1.5')
    """
    if alpha != ALPHA:
        return f"{NAME}:{limit!r}:{alpha!r}"
    return NAME if limit == LIMIT else f"{NAME}:{limit!r}"


def swigluoai_numbers(activation: str) -> tuple[float, float] | None:
    """Return alpha and limit in a name of the activation, None for any other name.

    Examples
    --------
    >>> swigluoai_numbers("swigluoai:4.5"), swigluoai_numbers("silu")
    ((1.702, 4.5), None)
    """
    name, *numbers = activation.split(":")
    if name != NAME or len(numbers) > 2:
        return None
    try:
        stated = [float(number) for number in numbers]
    except ValueError:
        return None
    limit, alpha = [*stated, *(LIMIT, ALPHA)[len(stated) :]]
    is_valid = math.isfinite(limit) and limit > 0 and math.isfinite(alpha) and alpha > 0
    return (alpha, limit) if is_valid else None
