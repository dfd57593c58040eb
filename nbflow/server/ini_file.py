"""Inferflow's ini syntax: sections, ``key = value``, comments, macros like ``${model_name}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nbflow_kernels.errors import UsageError

MAX_BYTES = 1_000_000
_MACRO = re.compile(r"\$\{([^{}]{1,200})\}|\$\(([^()]{1,200})\)")
_MAX_DEPTH = 8
_MAX_VALUE = 100_000

Sections = dict[str, dict[str, str]]


def read_sections(path: Path) -> Sections:
    """Return the sections of a file, keys in lower case, macros not yet replaced.

    Raises
    ------
    UsageError
        If a line is none of section, ``key = value`` and comment, or a key is stated twice.
    """
    try:
        data = path.read_bytes()[: MAX_BYTES + 1]
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: an ini file may have at most {MAX_BYTES} bytes")
    sections: Sections = {}
    current: dict[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in ";#":
            continue
        where = f"{path}:{number}"
        if line.startswith("[") and line.endswith("]"):
            current = sections.setdefault(line[1:-1].strip().lower(), {})
            continue
        key, equals, value = line.partition("=")
        if not equals or current is None:
            raise UsageError(f"{where}: must be [section] or key = value, got {line!r:.80}")
        key = key.strip().lower()
        if key in current:
            raise UsageError(f"{where}: the key {key!r} is stated twice in its section")
        current[key] = value.strip()
    return sections


class Macros:
    """Replaces ``${name}`` and ``$(name)``.

    Parameters
    ----------
    sections : Sections
        For names of the form ``section/key``.
    known : mapping of str to str
        Other names.
    where : str
        The file, for messages.
    """

    def __init__(self, sections: Sections, known: Mapping[str, str], where: str) -> None:
        self._sections = sections
        self._known = {name.lower(): value for name, value in known.items()}
        self._where = where

    def __call__(self, value: str, more: Mapping[str, str] | None = None, depth: int = 0) -> str:
        """Return `value` with its macros replaced; `more` are further names."""
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


def number(value: str, where: str) -> float:
    """Return a number."""
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{where} must be a number, got {value!r:.80}") from None


def whole(value: str, where: str) -> int:
    """Return a whole number."""
    result = number(value, where)
    if result != int(result):
        raise UsageError(f"{where} must be a whole number, got {value!r:.80}")
    return int(result)
