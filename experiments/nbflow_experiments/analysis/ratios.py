"""Ratios with a defined value for 0 / 0, and the tables that hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nbflow_experiments.optional_packages import require


def ratio(part: float, whole: float) -> float:
    """Return part / whole; NaN if `whole` is 0.

    Examples
    --------
    >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
    (0.25, nan)
    """
    return part / whole if whole else math.nan


def relative_error(lost: float, norm: float) -> float:
    """Return sqrt(lost / norm) of squared norms; 0 / 0 is 0.

    Examples
    --------
    >>> relative_error(1.0, 4.0), relative_error(0.0, 0.0), relative_error(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    if norm == 0:
        return 0.0 if lost == 0 else math.inf
    return math.sqrt(lost / norm)


Table = Any
"""A pandas.DataFrame."""


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Build a DataFrame from rows."""
    return require("pandas").DataFrame(list(rows))
