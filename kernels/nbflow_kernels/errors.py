"""Errors that a user can cause, and helpers for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 120  # characters shown of an untrusted name, which may have millions


class UsageError(ValueError):
    """A wrong argument, file or configuration.

    The message names the parameter, the expected and the found value and the remedy.  The command
    line prints it without a traceback and exits with code 2.  `param` is the name of the
    parameter alone, where callers report it separately.
    """

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MissingExtraError(ImportError):
    """A feature that needs an optional dependency; the message names the extra to install."""


def install_command(extra: str) -> str:
    """Return the command that installs an optional extra from nbflow's checkout."""
    return f"pip install -e '.[{extra}]' (in nbflow's checkout)"


def unknown_name(
    kind: str, name: object, available: Iterable[str], param: str | None = None
) -> UsageError:
    """Return the error for an unknown name, with close matches and all available names.

    Of more than a hundred names the close ones are enough.
    """
    names = list(available)
    short = str(name)[:_SHOWN]
    close = difflib.get_close_matches(short, names, n=3)
    close = close or difflib.get_close_matches(short.lower(), names, n=3)
    hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ";"
    listed = f"{len(names)} names" if close and len(names) > 100 else ", ".join(names)
    text = f"unknown {kind} {name!r:.{_SHOWN}}{hint} available: {listed}"
    return UsageError(text, param)
