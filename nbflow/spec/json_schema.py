"""JSON schemas of family and model files, made from the tables that check them.

Editors that know TOML read them; a file names its schema in a comment, ``#:schema PATH``.
`tools/docs/spec_schema.py` writes them to ``docs/schema/``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nbflow.spec.family import ANY, PARTS, ConfigRule
from nbflow.spec.fields import FIELDS, LINEARS, REQUIRED, TENSOR_NAMES
from nbflow.spec.model_file import GENERATION, WORDS
from nbflow.utils.toml_schema import Kind

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_STRINGS = {"type": "array", "items": {"type": "string"}}


def family_schema() -> dict[str, Any]:
    """Return the schema of a family file."""
    rule = _rule_schema()
    return {
        "$schema": DRAFT,
        "title": "nbflow family file: how an architecture is made of known parts",
        **_table(
            {
                "description": {"type": "string"},
                "model_types": _STRINGS,
                "extends": {"type": "string"},
                "encoder": {"type": "string"},
                "prefix": {"type": "string"},
                "structure": _fields_schema(),
                "config": _table(
                    {name: {"anyOf": [rule, {"type": "array", "items": rule}]} for name in FIELDS}
                ),
                "biases": _map({"type": "array", "items": {"enum": list(LINEARS)}}),
                "only": _map({"anyOf": [{"type": "array"}, _only_schema(), {"const": ANY}]}),
                "tensors": _tensors_schema(),
                "ignored": _table({"tensors": _STRINGS}),
            },
            docs=PARTS,
        ),
        "required": ["description"],
    }


def model_schema() -> dict[str, Any]:
    """Return the schema of a model file."""
    words: dict[str, Any] = {word: {"type": "string"} for word in WORDS}
    return {
        "$schema": DRAFT,
        "title": "nbflow model file: a model as a family and what differs",
        **_table(
            {
                **words,
                "config": {"type": "object", "description": "the published config.json"},
                "override": _fields_schema(),
                "tensors": _tensors_schema(),
                "ignored": _table({"tensors": _STRINGS}),
                "defaults": _table({name: _kind(field.kind) for name, field in GENERATION.items()}),
            },
            docs=WORDS,
        ),
        "required": ["family"],
    }


def fields_table() -> str:
    """Return all fields as a table in Markdown."""
    rows = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, entry in FIELDS.items():
        default = "must be stated" if entry.default is REQUIRED else _shown(entry.default)
        meaning = entry.doc.replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind_in_words(entry.kind)} | {default} | {meaning} |")
    return "\n".join(rows)


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kind_in_words(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return ", ".join(kind)
    if isinstance(kind, list):
        return f"list of {_TYPES[kind[0]]}s"
    return "table" if kind is dict else _TYPES[kind]


def _kind(kind: Kind) -> dict[str, Any]:
    """Return the schema of a value."""
    if isinstance(kind, tuple):
        return {"enum": list(kind)}
    if isinstance(kind, list):
        one = {"type": _TYPES[kind[0]]}
        return {"anyOf": [one, {"type": "array", "items": one}]}
    return {"type": "object"} if kind is dict else {"type": _TYPES[kind]}


def _table(properties: dict[str, Any], docs: Any = ()) -> dict[str, Any]:
    """Return the schema of a table with these keys and no others."""
    described = {
        name: {**schema, "description": docs[name]} if name in docs else schema
        for name, schema in properties.items()
    }
    return {"type": "object", "properties": described, "additionalProperties": False}


def _map(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _fields_schema() -> dict[str, Any]:
    return _table({name: {**_kind(f.kind), "description": f.doc} for name, f in FIELDS.items()})


def _only_schema() -> dict[str, Any]:
    return _table({"values": {"type": "array"}, "when": {"type": "object"}})


def _tensors_schema() -> dict[str, Any]:
    names = {"anyOf": [{"type": "string"}, _STRINGS]}
    return _table(dict.fromkeys(TENSOR_NAMES, names))


def _rule_schema() -> dict[str, Any]:
    special = {"keys": _STRINGS, "optional": {"type": "boolean"}, "default": {}}
    texts = {key: {"type": "string"} for key in ("same_as", "formula", "stored")}
    tables = {"values": {"type": "object"}, "when": {"type": "object"}}
    known: dict[str, Any] = {**special, **texts, **tables}
    return _table({field.name: known[field.name] for field in fields(ConfigRule)})
