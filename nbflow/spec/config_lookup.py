"""Values of a configuration by their dotted keys."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from nbflow.spec.family import ABSENT, Family
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError

MULTIMODAL = "multimodal_type"
"""Key for rules: the model_type of the model that holds a text model."""


def complete(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return a configuration with the text model's keys at its top, and keys not stated."""
    nested = config.get(family.text_config) if family.text_config else None
    if isinstance(nested, Mapping):
        own = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        outer = {MULTIMODAL: config.get("model_type")}
        config = {**config, **nested, **own, **outer}  # the head is that of the whole model
    return {**family.absent, **config}


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if it is null or absent.

    A number enters a list, -1 its end; ``*`` stands for every key of a table, if all say the same.
    """
    value: Any = config
    first, *rest = full_key(config, key).split(".*.", 1)
    if rest:
        found = lookup(config, first)
        inner = (
            [lookup(item, rest[0]) for item in found.values()] if isinstance(found, dict) else []
        )
        return inner[0] if inner and all(same_value(item, inner[0]) for item in inner) else None
    for part in first.split("."):
        if isinstance(value, list) and part.removeprefix("-").isdecimal():
            value = value[int(part)] if -len(value) <= int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def check_types(
    family: Family, config: Mapping[str, Any], where: str, given: Container[str]
) -> None:
    """Raise `UsageError` unless switches are true or false, and keys with a dot are in tables.

    Otherwise rules would pass over them, as if the keys were absent.  Fields in `given` count not.
    """
    for rule in (r for field, rules in family.config.items() if field not in given for r in rules):
        for key in (*rule.keys, *rule.when):
            _check_tables(config, full_key(config, key), where)
        for key, wanted in rule.when.items():
            value = lookup(config, key) if isinstance(wanted, bool) else None
            if value is not None:
                check_value(value, f"{where}: {full_key(config, key)}", bool)


def _check_tables(config: Mapping[str, Any], key: str, where: str) -> None:
    """Raise `UsageError` if a value on the path of a dotted key is not a table."""
    first, *rest = key.split(".")
    value: Any = config
    for i, part in enumerate(rest):
        value = value.get(first) if isinstance(value, Mapping) else None
        first = part
        if isinstance(value, Mapping) or value is None or part.removeprefix("-").isdecimal():
            continue
        at = ".".join(key.split(".")[: i + 1])
        raise UsageError(f"{where}: {at}: must be a table, got {shown(value):.80}")


def full_key(config: Mapping[str, Any], key: str) -> str:
    """Return a key with ``{arch}`` replaced by the architecture of a GGUF file."""
    if "{arch}" not in key:
        return key
    return key.replace("{arch}", str(lookup(config, "general.architecture")))


def holds(when: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the configuration meets the conditions of a rule."""
    found = ((lookup(config, key), wanted) for key, wanted in when.items())
    return all(v is None if wanted == ABSENT else same_value(v, wanted) for v, wanted in found)


def same_value(value: Any, other: Any) -> bool:
    """Return whether two configuration values are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
