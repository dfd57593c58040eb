"""Tables: pandas is imported where it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbflow_experiments.extras import require

Table = Any
"""A pandas.DataFrame."""


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows as a table."""
    return require("pandas").DataFrame(list(rows))
