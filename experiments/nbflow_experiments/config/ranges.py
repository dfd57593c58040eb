"""Integer ranges of sweep files and command lines.

======================================  ===========================================
``"2..8"``, ``"2-8"``                   2 3 4 5 6 7 8
``"8-32+8"``                            8 16 24 32  (llama-bench)
``"16-128*2"``                          16 32 64 128  (llama-bench)
``{start = 8, stop = 32, step = 8}``    8 16 24 32
``{start = 16, stop = 128, factor = 2}``  16 32 64 128
======================================  ===========================================

Both ends are included, the second one if a step reaches it.
"""

from __future__ import annotations

import re
from typing import Any

from nbflow_kernels.errors import UsageError, unknown_name

_TEXT = re.compile(r"\s*(\d+)\s*(?:\.\.|-)\s*(\d+)\s*(?:([+*])\s*(\d+)\s*)?")
_KEYS = ("start", "stop", "step", "factor")
_MOST = 100_000  # certainly a typo


def expand_range(name: str, item: str | dict[str, Any], where: str) -> list[int]:
    """Expand a range.

    Raises
    ------
    UsageError
        If it is not a range, does not increase, or has more than 100,000 numbers.

    Examples
    --------
    >>> expand_range("batch", "1-8*2", "--batch")
    [1, 2, 4, 8]
    >>> expand_range("batch", {"start": 1, "stop": 6, "step": 2}, "[axes]")
    [1, 3, 5]
    """
    start, stop, step, factor = (
        _of_text(name, item, where) if isinstance(item, str) else _of_table(name, item, where)
    )
    grows = (factor > 1 and start >= 1) if factor else step >= 1
    if stop < start or not grows:
        raise UsageError(f"{where}: {name}: the range {item!r} does not go up from start to stop")
    values: list[int] = []
    while start <= stop:
        values.append(start)
        if len(values) > _MOST:
            raise UsageError(f"{where}: {name}: the range {item!r} has more than {_MOST} numbers")
        start = start * factor if factor else start + step
    return values


def is_range(text: str) -> bool:
    """Return whether a text is a range."""
    return _TEXT.fullmatch(text) is not None


def _of_text(name: str, text: str, where: str) -> tuple[int, int, int, int]:
    """Return start, stop, step and factor (0: none) of a range in a text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(
            f'{where}: {name}: {text!r} is not a range; write "2..8", "8-32+8" or "16-128*2"'
        )
    start, stop, by = int(match[1]), int(match[2]), int(match[4] or 1)
    return (start, stop, 0, by) if match[3] == "*" else (start, stop, by, 0)


def _of_table(name: str, table: dict[str, Any], where: str) -> tuple[int, int, int, int]:
    """Return start, stop, step and factor (0: none) of a range in a table."""
    wrong = [key for key in table if key not in _KEYS]
    if wrong:
        raise unknown_name(f"entry of the range of {name}", wrong[0], _KEYS)
    if "start" not in table or "stop" not in table or ("step" in table and "factor" in table):
        raise UsageError(f"{where}: {name}: a range has start, stop, and either step or factor")
    if any(not isinstance(v, int) or isinstance(v, bool) for v in table.values()):
        raise UsageError(f"{where}: {name}: a range is made of integers, got {table!r}")
    if "factor" in table:
        return table["start"], table["stop"], 0, table["factor"] or -1
    return table["start"], table["stop"], table.get("step", 1), 0
