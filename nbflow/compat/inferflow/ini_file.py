"""Sections, keys and macros of Inferflow's ini files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from configparser import DuplicateOptionError, DuplicateSectionError, Error, RawConfigParser
from pathlib import Path

from nbflow.utils.binary_file import read_text
from nbflow_kernels.errors import UsageError

MAX_BYTES = 1_000_000
_MACRO = re.compile(r"\$\{([^{}]{1,200})\}|\$\(([^()]{1,200})\)")
_MAX_DEPTH = 8
_MAX_VALUE = 100_000

Sections = dict[str, dict[str, str]]


def read_sections(path: Path) -> Sections:
    """Read sections and keys, in lower case, without expanding macros.

    A repeated section or key is an error.
    """
    text = read_text(path, MAX_BYTES, "an ini file").removeprefix("\ufeff")
    # Inferflow has neither default sections nor line continuation: indented lines are keys
    parser = RawConfigParser(delimiters=("=",), default_section="")
    lines = (
        line.lower() if line[:1] == "[" else line for line in map(str.strip, text.splitlines())
    )
    try:
        parser.read_file(lines, str(path))
    except (DuplicateSectionError, DuplicateOptionError) as error:
        name = getattr(error, "option", error.section)
        raise UsageError(f"{path}:{error.lineno}: {name!r} is stated twice") from error
    except Error as error:
        found = " ".join(str(error).split())
        raise UsageError(f"{path}: lines must be [section] or key = value; {found:.300}") from error
    return {name.strip(): dict(parser.items(name)) for name in parser.sections()}


class Macros:
    """Expansion of the macros ``${name}`` and ``$(name)``.

    Names of the form ``section/key`` are values of the file; others are in `known`.
    """

    def __init__(self, sections: Sections, known: Mapping[str, str], where: str) -> None:
        self._sections = sections
        self._known = {name.lower(): value for name, value in known.items()}
        self._where = where

    def __call__(self, value: str, more: Mapping[str, str] | None = None, depth: int = 0) -> str:
        """Return `value` with its macros expanded; `more` defines further names."""
        if depth > _MAX_DEPTH:
            raise UsageError(f"{self._where}: macros refer to each other: {value!r:.80}")

        def one(found: re.Match[str]) -> str:
            name = (found[1] or found[2]).strip().lower()
            return self(self._value(name, more or {}), more, depth + 1)

        result = _MACRO.sub(one, value)
        if len(result) > _MAX_VALUE:
            raise UsageError(f"{self._where}: a value grows beyond {_MAX_VALUE} characters")
        return result

    def _value(self, name: str, more: Mapping[str, str]) -> str:
        for table in (more, self._known):
            if name in table:
                return table[name]
        section, _, key = name.rpartition("/")
        if section in self._sections and key in self._sections[section]:
            return self._sections[section][key]
        known = ", ".join([*more, *self._known])
        raise UsageError(
            f"{self._where}: unknown macro ${{{name}}}; known are {known}, and section/key"
        )
