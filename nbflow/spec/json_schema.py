"""JSON schemas of family and model files, derived from the tables that check them.

TOML editors read them; a file names its schema in a comment, ``#:schema PATH``.
`tools/docs/spec_schema.py` writes them to ``docs/schema/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nbflow.spec.family import ANY, FAMILY_KEYS, ConfigRule, OnlyRule
from nbflow.spec.fields import FIELDS, LAYER_FIELDS, REQUIRED, Field, show
from nbflow.spec.model_file import GENERATION, MODEL_KEYS, MODEL_TABLES
from nbflow.spec.tensor_names import LINEARS, TENSOR_NAMES
from nbflow.utils.toml_schema import Kind

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_STRINGS = {"type": "array", "items": {"type": "string"}}
_NAMES = {"anyOf": [{"type": "string"}, _STRINGS]}
_ANNOTATIONS: dict[str, dict[str, Any]] = {
    "Any": {},
    "bool": {"type": "boolean"},
    "str | None": {"type": "string"},
    "tuple[str, ...]": _STRINGS,
    "tuple[Any, ...]": {"type": "array"},
    "dict[str, Any]": {"type": "object"},
    "dict[str, str]": {"type": "object", "additionalProperties": {"type": "string"}},
}


def family_schema() -> dict[str, Any]:
    """Return the schema of a family file."""
    rule = _rule_schema(ConfigRule)
    definitions = {"rule": {"anyOf": [rule, {"type": "array", "items": rule}]}, "names": _NAMES}
    return {
        "$schema": DRAFT,
        "title": "nbflow family file: an architecture as a choice of known parts",
        "$defs": definitions,
        **_table(
            {
                "description": {"type": "string"},
                "model_types": _STRINGS,
                "extends": {"type": "string"},
                "encoder": {"type": "string"},
                "text_config": {"type": "string"},
                "prefix": {"type": "string"},
                "prefixes": _map(_STRINGS),
                "structure": _fields_schema(),
                "absent": {"type": "object"},
                "config": _table({name: {"$ref": "#/$defs/rule"} for name in FIELDS}),
                "layer": _map(_fields_schema(LAYER_FIELDS)),
                "biases": _map({"type": "array", "items": {"enum": list(LINEARS)}}),
                "only": _map(
                    {"anyOf": [{"type": "array"}, _rule_schema(OnlyRule), {"const": ANY}]}
                ),
                "tensors": _tensors_schema(),
                "ignored": _table({"tensors": _STRINGS}),
            },
            docs=FAMILY_KEYS,
        ),
        "required": ["description"],
    }


def model_schema() -> dict[str, Any]:
    """Return the schema of a model file."""
    words: dict[str, Any] = {word: {"type": "string"} for word in MODEL_KEYS}
    return {
        "$schema": DRAFT,
        "title": "nbflow model file: a model as a family and its differences",
        "$defs": {"names": _NAMES},
        **_table(
            {
                **words,
                "aliases": _STRINGS,
                "config": {"type": "object"},
                "override": _fields_schema(),
                "tensors": _tensors_schema(),
                "ignored": _table({"tensors": _STRINGS}),
                "defaults": _table({name: _kind(field.kind) for name, field in GENERATION.items()}),
            },
            docs=MODEL_KEYS | MODEL_TABLES,
        ),
        "required": ["family"],
    }


def fields_table(known: Mapping[str, Field] = FIELDS) -> str:
    """Return a Markdown table of fields, all by default."""
    rows = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, entry in known.items():
        default = "must be stated" if entry.default is REQUIRED else show(entry.default)
        meaning = entry.doc.replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind_in_words(entry.kind)} | {default} | {meaning} |")
    return "\n".join(rows)


def _kind_in_words(kind: Kind) -> str:
    if isinstance(kind, tuple):
        return ", ".join(kind)
    if isinstance(kind, list):
        one = kind[0]
        return f"list of {', '.join(one) if isinstance(one, tuple) else f'{_TYPES[one]}s'}"
    return "table" if kind is dict else _TYPES[kind]


def _kind(kind: Kind) -> dict[str, Any]:
    """Return the schema of a value."""
    if isinstance(kind, tuple):
        return {"enum": list(kind)}
    if isinstance(kind, list):
        one = _kind(kind[0])
        return {"anyOf": [one, {"type": "array", "items": one}]}
    return {"type": "object"} if kind is dict else {"type": _TYPES[kind]}


def _table(properties: dict[str, Any], docs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the schema of a table with these keys and no others."""
    docs = docs or {}
    described = {
        name: {**schema, "description": docs[name]} if name in docs else schema
        for name, schema in properties.items()
    }
    return {"type": "object", "properties": described, "additionalProperties": False}


def _map(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def _fields_schema(known: Mapping[str, Field] = FIELDS) -> dict[str, Any]:
    return _table({name: {**_kind(f.kind), "description": f.doc} for name, f in known.items()})


def _tensors_schema() -> dict[str, Any]:
    return _table({name: {"$ref": "#/$defs/names"} for name in TENSOR_NAMES})


def _rule_schema(rule: type[ConfigRule] | type[OnlyRule]) -> dict[str, Any]:
    return _table({field.name: _ANNOTATIONS[str(field.type)] for field in fields(rule)})
