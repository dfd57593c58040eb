"""A small configuration with the structure of a large one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from nbflow.spec.family import Family
from nbflow_experiments.verify.shrink_layers import shrink_layers

VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, WINDOW, EXPERTS = 160, 4, 4, 2, 16, 96, 16, 8
"""Sizes of a small model; those that a configuration has are never enlarged."""
STATE_HEADS, STATE_DIM = 8, 16
"""Heads and width of recurrent states."""


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
    shrink_layers(_tables(small, family), family, sizes.get("n_layers"), LAYERS)
    if sizes.get("n_heads"):
        _shrink_heads(small, family, sizes)
    else:
        _lower(small, family, "hidden_size", HEADS * HEAD_DIM)
    for name, most in (
        ("vocab_size", VOCABULARY), ("intermediate_size", WIDTH),
        ("expert_size", WIDTH // 2), ("shared_size", WIDTH // 2), ("window", WINDOW),
        ("type_vocab_size", 2), ("layer_embed_vocab_size", VOCABULARY),
        ("layer_embed_size", HEAD_DIM), ("laurel_rank", HEAD_DIM // 2),
        ("linear_key_dim", STATE_DIM), ("linear_value_dim", STATE_DIM),
        ("ssm_state_dim", STATE_DIM), ("mamba1_dt_rank", STATE_DIM // 2),
    ):  # fmt: skip
        _lower(small, family, name, most)
    _shrink_states(small, family, sizes)
    heads = sizes.get("n_heads")
    per_token, groups = sizes.get("experts_per_token"), sizes.get("router_groups") or 1
    if sizes.get("n_experts") and per_token:
        wanted = -(-max(EXPERTS, 2 * per_token) // groups) * groups
        _lower(small, family, "n_experts", wanted)
    for table in _tables(small, family):
        for key, value in table.items():
            if key.endswith("_token_id"):
                table[key] = _known_ids(value)
            elif key == "num_key_value_heads" and value == heads and _reads_no(family, key):
                table[key] = _value(small, family, "n_heads")  # of latent attention
    return small


def _shrink_heads(small: dict[str, Any], family: Family, sizes: Mapping[str, Any]) -> None:
    """Lower heads, their widths, and the residual stream to the heads' columns."""
    heads, kv_heads = sizes["n_heads"], sizes.get("n_kv_heads")
    group = max(1, heads // (kv_heads or heads))
    new_kv = 1 if kv_heads == 1 else KV_HEADS
    new_heads = new_kv * min(group, 4) if kv_heads and kv_heads != heads else HEADS
    new_heads = min(heads, new_heads)
    _set(small, family, "n_heads", new_heads)
    _set(small, family, "n_kv_heads", new_heads if kv_heads == heads else min(new_kv, new_heads))
    local = sizes.get("local_n_kv_heads")
    if local:
        _set(small, family, "local_n_kv_heads", min(local, KV_HEADS, new_heads))
    dim = _head_dim(small, family, sizes)
    for name in ("hidden_size", "embed_size"):
        if sizes.get(name) is not None and sizes[name] == sizes.get("hidden_size"):
            _set(small, family, name, min(new_heads * dim, sizes[name]))
    usual, local = sizes.get("head_dim"), sizes.get("local_head_dim")
    # the layers with a window come last: both fields may have one key
    _lower(small, family, "head_dim", 2 * dim if usual and local and usual > local else dim)
    _lower(small, family, "local_head_dim", dim)
    rotated = sizes.get("rope_dim")
    if rotated and rotated > dim and not sizes.get("kv_rank"):
        _set(small, family, "rope_dim", dim // 2)


def _head_dim(small: dict[str, Any], family: Family, sizes: Mapping[str, Any]) -> int:
    """Return a width of heads of which an even number of columns is rotated."""
    share = _value(small, family, "rope_fraction", float) or 1.0
    most = sizes.get("head_dim") or sizes.get("hidden_size", 0) // sizes["n_heads"]
    small_ones = range(HEAD_DIM, max(HEAD_DIM, most) + 1, 2)
    return next((dim for dim in small_ones if int(dim * share) % 2 == 0), most or HEAD_DIM)


def _shrink_states(small: dict[str, Any], family: Family, sizes: Mapping[str, Any]) -> None:
    """Lower the heads of recurrent layers; their columns stay the same share of the stream."""
    keys, values = sizes.get("linear_key_heads"), sizes.get("linear_value_heads")
    if keys:
        new_keys = min(keys, KV_HEADS if values and values != keys else HEADS)
        _set(small, family, "linear_key_heads", new_keys)
        if values:
            _set(small, family, "linear_value_heads", new_keys * min(values // keys, 4))
    heads, hidden = sizes.get("ssm_heads"), sizes.get("hidden_size")
    new_hidden = _value(small, family, "hidden_size")
    if not heads or not hidden or not new_hidden:
        return
    groups = min(sizes.get("ssm_groups") or 1, KV_HEADS)
    new_heads = min(heads, STATE_HEADS)
    _set(small, family, "ssm_groups", groups)
    _set(small, family, "ssm_heads", new_heads)
    for table in _tables(small, family):
        width = table.get("mamba_d_ssm")
        if isinstance(width, int):
            table["mamba_d_ssm"] = max(width * new_hidden // hidden // new_heads, 1) * new_heads
        if isinstance(table.get("mamba_d_head"), int):  # stated twice
            columns = heads * table["mamba_d_head"] * new_hidden // hidden
            table["mamba_d_head"] = max(columns // new_heads, 1)
    dim = sizes.get("ssm_head_dim")
    if dim:
        _set(small, family, "ssm_head_dim", max(heads * dim * new_hidden // hidden // new_heads, 1))


def _known_ids(value: Any) -> Any:
    """Return token ids within the small vocabulary; configurations may need some."""
    if isinstance(value, list):
        return [_known_ids(item) for item in value]
    return value % VOCABULARY if type(value) is int else value


def _reads_no(family: Family, key: str) -> bool:
    """Return whether no rule of a family reads a key."""
    return all(key not in rule.keys for rules in family.config.values() for rule in rules)


def _tables(config: dict[str, Any], family: Family) -> list[dict[str, Any]]:
    """Return the tables of a configuration that hold the text model's keys, the inner first."""
    inner = config.get(family.text_config) if family.text_config else None
    return [inner, config] if isinstance(inner, dict) else [config]


def _places(
    config: dict[str, Any], family: Family, name: str, kind: type = int
) -> list[tuple[dict[str, Any], str]]:
    """Return tables and the key in them that state a field as a number; several for ``*``."""
    for rule in family.config.get(name, ()):
        for key in rule.keys:
            for table in _tables(config, family):
                *outer, last = key.split(".")
                inner: list[Any] = [table]
                for part in outer:
                    inner = [
                        found
                        for each in inner
                        if isinstance(each, dict)
                        for found in (each.values() if part == "*" else [each.get(part)])
                    ]
                found = [(e, last) for e in inner if isinstance(e, dict) and _is(e.get(last), kind)]
                if found:
                    return found
    return []


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _value(config: dict[str, Any], family: Family, name: str, kind: type = int) -> Any:
    places = _places(config, family, name, kind)
    return places[0][0][places[0][1]] if places else None


def _set(config: dict[str, Any], family: Family, name: str, value: int) -> None:
    for table, key in _places(config, family, name):
        table[key] = value


def _lower(config: dict[str, Any], family: Family, name: str, most: int) -> None:
    value = _value(config, family, name)
    if value is not None and value > most:
        _set(config, family, name, most)
