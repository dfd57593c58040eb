"""What a family or model file says, in words, without any weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbflow.spec.family import ConfigRule, Family
from nbflow.spec.fields import FIELDS, REQUIRED
from nbflow.spec.model_file import ModelFile, load_model_file

Row = tuple[str, str, str]
"""A field, where its value comes from, what it means."""


def explain(path: Path) -> tuple[ModelFile, list[Row]]:
    """Check a file and return, for every field, where its value comes from.

    Parameters
    ----------
    path : Path
        A family file or a model file.

    Returns
    -------
    model_file : ModelFile
        The file; a family file is a model of that family with nothing else.
    rows : list of (field, source, meaning)

    Raises
    ------
    UsageError
        If the file is wrong; the message names the place.
    """
    model_file = load_model_file(path)
    family, override = model_file.family, model_file.override
    rows = []
    for name, field in FIELDS.items():
        if name in override:
            source = f"= {_shown(override[name])}  (override)"
        else:
            source = _source(family, name, field.default)
        rows.append((name, source, field.doc))
    return model_file, rows


def _source(family: Family, name: str, default: Any) -> str:
    """Return how a family comes by a field."""
    if name in family.structure:
        return f"= {_shown(family.structure[name])}"
    rules = family.config.get(name, ())
    if not rules:
        return "must be overridden" if default is REQUIRED else f"= {_shown(default)}  (default)"
    return "; else ".join(" or ".join(_ways(rule)) or "none" for rule in rules)


def _ways(rule: ConfigRule) -> Iterator[str]:
    """Yield the ways in which a rule finds a value."""
    when = ", ".join(f"{key} is {_shown(value)}" for key, value in rule.when.items())
    if rule.stored is not None:
        when = ", ".join(filter(None, (when, f"the checkpoint has {rule.stored}")))
    prefix = f"if {when}: " if when else ""
    if rule.keys:
        yield prefix + "key " + " or ".join(rule.keys)
        prefix = ""
    for sign, value in (("as ", rule.same_as), ("= ", rule.formula), ("= ", rule.default)):
        if value is not None:
            yield f"{prefix}{sign}{_shown(value)}"
            prefix = ""
    if rule.optional:
        yield f"{prefix}none"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
