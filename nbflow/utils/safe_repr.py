"""Bounded `repr` of untrusted values for error messages: short, escaped, cheap for large values."""

from __future__ import annotations

import reprlib
from typing import Any

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = 120


def shown(value: Any) -> str:
    """Return a value as in `repr`, of at most a few hundred characters.

    Examples
    --------
    >>> shown("a" * 1000)[:10], len(shown("a" * 1000))
    ("'aaaaaaaaa", 120)
    """
    return _REPR.repr(value)
