"""Setters of an ini file's keys: convert, ignore with a note, or refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from nbflow.compat.inferflow.ini_file import Macros
from nbflow_kernels.errors import UsageError, unknown_name

Table = dict[str, Any]
Setter = Callable[[Table, str, str], None]
"""``set(table, value, where)``: store a key's value in a table, or raise."""
_OFF = ("", "0", "false", "no", "off")


def apply(
    keys: Mapping[str, str],
    setters: Mapping[str, Setter],
    table: Table,
    where: str,
    macros: Macros,
    more: Mapping[str, str] | None = None,
) -> None:
    """Convert the keys of a section."""
    for key, value in keys.items():
        if key not in setters:
            raise UsageError(f"{where}: {unknown_name('key', key, setters)}")
        setters[key](table, macros(value, more), f"{where} {key}")


def take_note(text: str) -> None:
    """Print a note to standard error."""
    print(f"note: {text}", file=sys.stderr)


def stores(name: str, read: Callable[[str, str], Any] = lambda value, _: value) -> Setter:
    """Return a setter that stores the value under a name."""

    def put(table: Table, value: str, where: str) -> None:
        table[name] = read(value, where)

    return put


def elsewhere(_: Table, __: str, ___: str) -> None:
    """Ignore a key that another function reads."""


def no_effect(reason: str) -> Setter:
    """Return a setter that prints why a key is ignored."""

    def tell(_: Table, value: str, where: str) -> None:
        if value:
            take_note(f"{where} = {value:.80} has no effect: {reason}")

    return tell


def unless(on: Callable[[str, str], bool], reason: str) -> Setter:
    """Return a setter that prints why a key is ignored if its value switches something on."""
    tell = no_effect(reason)

    def check(table: Table, value: str, where: str) -> None:
        if on(value, where):
            tell(table, value, where)

    return check


def only(on: Callable[[str, str], bool], instead: str) -> Setter:
    """Return a setter that refuses values that switch something on."""

    def check(_: Table, value: str, where: str) -> None:
        if on(value, where):
            raise UsageError(f"{where} = {value}: not offered; {instead}")

    return check


def flag(value: str, _: str) -> bool:
    """Return False for an empty value, 0, false, no and off."""
    return value.strip().lower() not in _OFF


def number(value: str, where: str) -> float:
    """Return a number."""
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{where} must be a number, got {value!r:.80}") from None


def whole(value: str, where: str) -> int:
    """Return a whole number."""
    result = number(value, where)
    if not result.is_integer():
        raise UsageError(f"{where} must be a whole number, got {value!r:.80}")
    return int(result)


def names(value: str, _: str) -> list[str]:
    """Return the names of a list."""
    return [name.strip() for name in value.replace(";", ",").split(",") if name.strip()]
