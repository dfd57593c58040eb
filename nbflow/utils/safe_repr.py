"""Values of untrusted files in error messages: short, escaped, and cheap however large they are."""

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
