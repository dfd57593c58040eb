"""Kind of each layer, from what a configuration says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nbflow.spec.family import ConfigRule, Family
from nbflow.spec.fields import FIELDS, MAX_ITEMS, check_field
from nbflow.spec.layer_specs import LAYER_KINDS, LayerKind
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError


def types_of(
    stated: Any, rule: ConfigRule, n: int, where: str, offset: Any = None
) -> tuple[str, ...]:
    """Return layer_types from numbers of layers, n for every n-th layer, or a boolean for each.

    The first of every n layers is `offset`, by default n - 1; false is the first kind.
    """
    if isinstance(stated, list) and stated and all(isinstance(item, bool) for item in stated):
        return tuple(rule.kinds[item] for item in stated[:MAX_ITEMS])
    if rule.from_one and isinstance(stated, list):
        stated = [i - 1 if type(i) is int else i for i in stated]
    if isinstance(stated, int) and not isinstance(stated, bool):
        if not 1 <= stated <= MAX_ITEMS:
            raise UsageError(f"{where}: must be 1..{MAX_ITEMS}, got {shown(stated)}")
        first = stated - 1 if offset is None else check_value(offset, f"{where}: offset", int)
        if not 0 <= first < stated:
            raise UsageError(f"{where}: offset must be 0..{stated - 1}, got {shown(first)}")
        chosen = set(range(first, n, stated))
    else:
        chosen = set(check_field(stated, where, FIELDS["dense_layers"]))
    if not chosen <= set(range(n)):
        raise UsageError(f"{where}: layers must be 0..{n - 1}, got {max(chosen)}")
    return tuple(rule.kinds[i not in chosen] for i in range(n))


def words_by_tensor(
    tensors: Mapping[str, str], n: int, held: Collection[str]
) -> tuple[str, ...] | None:
    """Return for each of `n` layers the first word whose tensor a checkpoint has, else "".

    None without a checkpoint.
    """
    if not held:
        return None
    return tuple(
        next((word for word, name in tensors.items() if name.replace("{i}", str(i)) in held), "")
        for i in range(min(n, len(held)))
    )


def layers_with(word: str, words: Sequence[str] | None) -> tuple[int, ...] | None:
    """Return the layers with a word, of one for each layer."""
    return None if words is None else tuple(i for i, other in enumerate(words) if other == word)


def layer_kinds(family: Family, values: Mapping[str, Any], where: str) -> tuple[LayerKind, ...]:
    """Return the kind of each layer; empty if layer_types has no effect."""
    types, n, last = values["layer_types"], values["n_layers"], values["last_layer_type"]
    masked = values["window"] is not None or values["attention_chunk"] is not None
    if not masked and family.layers.keys() == LAYER_KINDS.keys():
        return ()
    if last is not None and not types:
        every = values["full_layer_every"]
        of_full = (every and (i + 1) % every == 0 for i in range(n))
        types = tuple("full_attention" if full else "sliding_attention" for full in of_full)
    for kind in types:
        check_value(kind, f"{where}: layer_types", tuple(family.layers))
    if len(types) == 1:
        types = types * n
    if types and len(types) != n:
        raise UsageError(f"{where}: layer_types must have {n} entries, got {len(types)}")
    if last is not None:
        check_value(last, f"{where}: last_layer_type", tuple(family.layers))
        types = (*types[:-1], last)
    return tuple(family.layers[kind] for kind in types)


def first_layers(
    n: int, kinds: Sequence[LayerKind], experts: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """Return a layer of each kind, one with experts, and the last one."""
    first = (kinds.index(kind) for kind in dict.fromkeys(kinds))
    return tuple(dict.fromkeys((0, n - 1, *first, *sorted(experts)[:1])))
