"""Command-line options made from the fields of option sets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nbflow.option_fields import OptionField, OptionSet, accepts, default_text, fields
from nbflow_kernels.errors import UsageError

_MAX_TEXT_BYTES = 100_000_000


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    kind: type[OptionSet],
    names: Collection[str] = (),
    *,
    converters: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
    unset: bool = False,
    http: bool = False,
) -> None:
    """Add a command-line option for each field of an option set.

    Without `names`, all its fields are added.  `converters` turn the argument's text into the
    value.  With `unset` the default is None instead of the field's; with `http` the bounds and
    defaults are those of HTTP requests.
    """
    for known in fields(kind).values():
        if (known.name in names) if names else known.option.cli:
            settings = _argument(known, converters.get(known.name), http)
            default = None if unset else known.default
            parser.add_argument(*known.flags, dest=known.name, default=default, **settings)


def _argument(
    known: OptionField, converter: Callable[[str], Any] | None, http: bool
) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field."""
    here, default = known.option, default_text(known)
    default = here.http_default if http and here.http_default else default
    ending = f" ({default})" if default and known.default is not True else ""
    settings: dict[str, Any] = {"help": f"{here.help}{'; repeatable' * here.repeat}{ending}"}
    if known.hint is bool:
        on: Any = argparse.BooleanOptionalAction if known.default else "store_true"
        return {**settings, "action": on}
    settings |= {"action": _Checked, "known": known, "converter": converter, "http": http}
    if not here.repeat and accepts(known.outside_hint, [1]):
        return {**settings, "type": int, "nargs": "+", "metavar": "ID"}
    hints = {int: "N", float: "X"}
    kind = next((number for number in hints if known.outside_hint is number), str)
    return {**settings, "type": kind, "metavar": here.metavar or hints.get(kind, "TEXT")}


class _Checked(argparse.Action):
    """Action that stores a validated value, or raises the field's `UsageError`."""

    def __init__(
        self,
        *,
        known: OptionField,
        converter: Callable[[str], Any] | None,
        http: bool,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._known, self._converter, self._http = known, converter, http

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        value = values if self._converter is None else self._converter(values)
        if self._known.option.repeat:
            value = [*(getattr(namespace, self.dest) or ()), value]
        setattr(namespace, self.dest, self._known.checked(value, outside=True, http=self._http))


def given_options(kind: type[OptionSet], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that are fields of an option set and not None."""
    found = {name: getattr(arguments, name, None) for name in fields(kind)}
    return {name: value for name, value in found.items() if value is not None}


def read_argument(name: str) -> str:
    """Return the text of a file, or of standard input for ``-``."""
    if name == "-":
        return sys.stdin.read(_MAX_TEXT_BYTES)
    path = Path(name)
    if path.is_file() and path.stat().st_size > _MAX_TEXT_BYTES:
        raise UsageError(f"{path}: may have at most {_MAX_TEXT_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
