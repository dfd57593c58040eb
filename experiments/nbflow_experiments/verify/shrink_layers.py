"""A few layers of a configuration that show each kind of layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbflow.spec.family import ConfigRule, Family

OVERRIDES = "per_layer_config"
"""Table of transformers: number of a layer -> keys of this layer alone."""


def shrink_layers(
    tables: list[dict[str, Any]], family: Family, n_layers: int | None, most: int
) -> None:
    """Keep some layers of a configuration: of each kind the first one, as far as `most` allow.

    Lists, words of a letter per layer, tables and lists of numbers of layers are cut to them.

    Parameters
    ----------
    tables : list of dict
        Tables with the keys of the text model, the inner first; they are changed.
    family : Family
        The family, whose rules say what keys mean.
    n_layers : int or None
        Number of layers, if a key states it.
    most : int
        Layers to keep.
    """
    n = n_layers or _entries(tables, family)
    if not n or n <= most:
        return
    kept = _kept(tables, family, n, most)
    for table in tables:
        for key, value in table.items():
            if isinstance(value, list) and len(value) == n:
                table[key] = [value[i] for i in kept]
            elif isinstance(value, dict) and key == OVERRIDES:
                table[key] = {
                    str(kept.index(i)): each
                    for i, each in sorted(_numbered(value).items())
                    if i in kept
                }
    for name, rules in family.config.items():
        for rule in rules:
            for table, key in _stated(tables, rule):
                table[key] = _cut(name, rule, table, key, kept, n)


def _entries(tables: list[dict[str, Any]], family: Family) -> int | None:
    """Return the number of layers that a list of their kinds has."""
    for rule in family.config.get("layer_types", ()):
        for table, key in _stated(tables, rule):
            if isinstance(table[key], list) and not rule.kinds:
                return len(table[key])
    return None


def _stated(tables: list[dict[str, Any]], rule: ConfigRule) -> Iterable[tuple[dict[str, Any], str]]:
    """Yield tables and keys that the rule reads and a configuration states."""
    for path in rule.keys:
        *outer, key = path.split(".")
        for table in tables:
            inner: Any = table
            for part in outer:
                inner = inner.get(part) if isinstance(inner, dict) else None
            if isinstance(inner, dict) and inner.get(key) is not None:
                yield inner, key


def _numbered(overrides: dict[str, Any]) -> dict[int, Any]:
    return {int(i): each for i, each in overrides.items() if str(i).isdecimal()}


def _kept(tables: list[dict[str, Any]], family: Family, n: int, most: int) -> list[int]:
    """Return the layers to keep.

    Where the last layers use the keys and values of earlier ones, half of the layers are of these,
    and both halves have the same kinds.
    """
    shared = _number(tables, family, "kv_shared_layers")
    if not shared or shared >= n:
        return _first(_kinds(tables, family, n), range(n), most)
    words = _kinds(tables, family, n, only_words=True)
    own = _first(words, range(n - shared), most - most // 2)
    return own + _first(words, range(n - shared, n), most // 2)


def _first(kinds: list[tuple[Any, ...]], layers: range, most: int) -> list[int]:
    """Return the first layer of each kind, and the first others up to `most`."""
    found = [i for i in layers if kinds[i] not in kinds[layers.start : i]][:most]
    others = [i for i in layers if i not in found]
    return sorted(found + others[: most - len(found)])


def _kinds(
    tables: list[dict[str, Any]], family: Family, n: int, only_words: bool = False
) -> list[tuple[Any, ...]]:
    """Return what the configuration says of each layer."""
    said: list[list[Any]] = []
    """Values of a key, one for each layer."""
    for key, value in (item for table in tables for item in table.items()):
        if isinstance(value, list) and len(value) == n:
            if not only_words or all(isinstance(item, str) for item in value):
                said.append(list(map(repr, value)))
        elif isinstance(value, dict) and key == OVERRIDES and not only_words:
            said.append([repr(_numbered(value).get(i)) for i in range(n)])
    if only_words:
        return list(zip(*said, strict=True)) if said else [()] * n
    for name, rule in ((name, rule) for name, rules in family.config.items() for rule in rules):
        for table, key in _stated(tables, rule):
            value = table[key]
            if isinstance(value, str) and len(value) == n and (rule.values or rule.where):
                said.append(list(value))
            elif _holds_numbers(name, rule, value):
                said.append([i + rule.from_one in value for i in range(n)])
            elif name == "dense_first" and isinstance(value, int):
                said.append([i < value for i in range(n)])
    return list(zip(*said, strict=True)) if said else [()] * n


def _holds_numbers(name: str, rule: ConfigRule, value: Any) -> bool:
    """Return whether a list holds numbers of layers."""
    is_of_numbers = bool(rule.kinds) or (name == "dense_layers" and rule.where is None)
    return is_of_numbers and isinstance(value, list)


def _cut(name: str, rule: ConfigRule, table: Any, key: str, kept: list[int], n: int) -> Any:
    """Return the value of a key for the kept layers alone."""
    value = table[key]
    if isinstance(value, str) and len(value) == n and (rule.values or rule.where):
        return "".join(value[i] for i in kept)
    if _holds_numbers(name, rule, value):
        return [new + rule.from_one for new, i in enumerate(kept) if i + rule.from_one in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name == "n_layers":
        return len(kept)
    if name == "dense_first":
        return sum(i < value for i in kept)
    if name == "kv_shared_layers":
        return min(value, len(kept) // 2)
    if rule.kinds:  # every n-th layer
        if rule.offset in table:
            table[rule.offset] = min(table[rule.offset], len(kept) - 1)
        return min(value, len(kept))
    return value


def _number(tables: list[dict[str, Any]], family: Family, name: str) -> int | None:
    for rule in family.config.get(name, ()):
        for table, key in _stated(tables, rule):
            if isinstance(table[key], int):
                return int(table[key])
    return None
