"""A small configuration with the structure of a large one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from nbflow.spec.family import Family

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, WINDOW, EXPERTS = 160, 4, 4, 2, 16, 96, 16, 8
"""Sizes of a small model; those that a configuration has are never enlarged."""


def shrink(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a configuration with fewer layers, heads, columns, experts and tokens.

    The family says which keys hold them.  Everything else stays: kinds of norms, activation,
    rotation, biases, special fields of the architecture.

    Parameters
    ----------
    config : mapping
        Content of config.json.
    family : Family
        The family, whose rules name the keys.

    Returns
    -------
    dict
        The small configuration.
    """
    small = copy.deepcopy(dict(config))
    sizes = {name: _value(small, family, name) for name in family.config}
    heads, kv_heads = sizes.get("n_heads"), sizes.get("n_kv_heads")
    if heads:
        group = max(1, heads // (kv_heads or heads))
        new_kv = 1 if kv_heads == 1 else KV_HEADS
        new_heads = new_kv * min(group, 4) if kv_heads and kv_heads != heads else HEADS
        new_heads = min(heads, new_heads)
        _set(small, family, "n_heads", new_heads)
        _set(
            small, family, "n_kv_heads", new_heads if kv_heads == heads else min(new_kv, new_heads)
        )
        hidden = new_heads * HEAD_DIM
        for name in ("hidden_size", "embed_size"):
            if sizes.get(name) is not None and sizes[name] == sizes.get("hidden_size"):
                _set(small, family, name, min(hidden, sizes[name]))
        _lower(small, family, "head_dim", HEAD_DIM)
    for name, most in (
        ("vocab_size", VOCABULARY), ("n_layers", LAYERS), ("intermediate_size", WIDTH),
        ("expert_size", WIDTH // 2), ("shared_size", WIDTH // 2), ("window", WINDOW),
        ("type_vocab_size", 2), ("layer_embed_vocab_size", VOCABULARY),
        ("layer_embed_size", HEAD_DIM), ("laurel_rank", HEAD_DIM // 2),
        ("local_head_dim", HEAD_DIM),
    ):  # fmt: skip
        _lower(small, family, name, most)
    per_token, groups = sizes.get("experts_per_token"), sizes.get("router_groups") or 1
    if sizes.get("n_experts") and per_token:
        wanted = -(-max(EXPERTS, 2 * per_token) // groups) * groups
        _lower(small, family, "n_experts", wanted)
    n_layers = _value(small, family, "n_layers")
    is_shared = bool(n_layers and sizes.get("kv_shared_layers"))
    if is_shared:
        _set(small, family, "kv_shared_layers", n_layers // 2)
    for table in _tables(small, family):
        for key, value in table.items():
            if isinstance(value, list) and n_layers and len(value) == sizes.get("n_layers"):
                table[key] = _first(value, n_layers, is_shared)  # one entry per layer
            elif key.endswith("_token_id"):
                table[key] = _known_ids(value)
            elif key == "num_key_value_heads" and value == heads and _reads_no(family, key):
                table[key] = _value(small, family, "n_heads")  # of latent attention
    return small


def _known_ids(value: Any) -> Any:
    """Return token ids within the small vocabulary; configurations may need some."""
    if isinstance(value, list):
        return [_known_ids(item) for item in value]
    return value % VOCABULARY if type(value) is int else value


def _reads_no(family: Family, key: str) -> bool:
    """Return whether no rule of a family reads a key."""
    return all(key not in rule.keys for rules in family.config.values() for rule in rules)


def _first(each: list[Any], n: int, is_shared: bool) -> list[Any]:
    """Return the entries of the first n layers.

    Where the second half uses the keys and values of the first, both have two kinds of layers.
    """
    kinds = list(dict.fromkeys(each)) if all(isinstance(item, str) for item in each) else []
    if not is_shared or len(kinds) < 2:
        return each[:n]
    return [kinds[i % 2] for i in range(n)]


def _tables(config: dict[str, Any], family: Family) -> list[dict[str, Any]]:
    """Return the tables of a configuration that hold the text model's keys, the inner first."""
    inner = config.get(family.text_config) if family.text_config else None
    return [inner, config] if isinstance(inner, dict) else [config]


def _place(config: dict[str, Any], family: Family, name: str) -> tuple[dict[str, Any], str] | None:
    """Return the table and the key that state a field as a number."""
    for rule in family.config.get(name, ()):
        for key in rule.keys:
            for table in _tables(config, family):
                *outer, last = key.split(".")
                inner: Any = table
                for part in outer:
                    inner = inner.get(part) if isinstance(inner, dict) else None
                value = inner.get(last) if isinstance(inner, dict) else None
                if isinstance(value, int) and not isinstance(value, bool):
                    return inner, last
    return None


def _value(config: dict[str, Any], family: Family, name: str) -> Any:
    place = _place(config, family, name)
    return None if place is None else place[0][place[1]]


def _set(config: dict[str, Any], family: Family, name: str, value: int) -> None:
    place = _place(config, family, name)
    if place is not None:
        place[0][place[1]] = value


def _lower(config: dict[str, Any], family: Family, name: str, most: int) -> None:
    value = _value(config, family, name)
    if value is not None and value > most:
        _set(config, family, name, most)
