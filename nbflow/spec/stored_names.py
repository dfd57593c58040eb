"""Names of a checkpoint's tensors, and the biases that it has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nbflow.spec.config_lookup import lookup
from nbflow.spec.family import ALWAYS, STORED, Family
from nbflow.spec.layer_specs import LayerKind
from nbflow.spec.layer_types import first_layers
from nbflow.spec.tensor_names import FUSED
from nbflow.utils.toml_schema import check_value

_EXPERT = "layers.{i}.moe.{j}"
N_BEHIND = 4
"""Layers for the prediction of several tokens that a checkpoint may hold behind the last one."""


def ignored_patterns(patterns: Sequence[str], n_layers: int) -> tuple[str, ...]:
    """Return patterns of tensors with numbers for ``{behind}``, layers behind the last one."""
    numbers = range(n_layers, n_layers + N_BEHIND)
    found = (pattern.replace("{behind}", str(n)) for pattern in patterns for n in numbers)
    return tuple(dict.fromkeys(found))


def stored_names(
    family: Family,
    tensors: Mapping[str, Sequence[str]],
    layers: Sequence[int],
    checkpoint: Collection[str],
) -> dict[str, str]:
    """Return the name of each tensor: the first allowed one that the checkpoint has."""

    def present(name: str) -> bool:
        return any(name.replace("{i}", str(i)).replace("{j}", "0") in checkpoint for i in layers)

    chosen = {}
    named = {**family.tensors, **tensors}
    for ours, allowed in {**_with_stacked_experts(named), **tensors}.items():
        if ours in tensors or not family.prefix:
            candidates = list(allowed)
        else:
            bare = [name.removeprefix(family.prefix) for name in allowed]
            candidates = [*allowed, *bare, *(family.prefix + name for name in bare)]
        candidates += [
            other + name.removeprefix(prefix)
            for prefix, others in family.prefixes.items()
            for name in allowed
            for other in others
            if name.startswith(prefix)
        ]
        if candidates:
            chosen[ours] = next(filter(present, candidates), candidates[0])
    _prefer_stored(chosen, present)
    return chosen


def _with_stacked_experts(
    names: Mapping[str, Sequence[str]],
) -> dict[str, Sequence[str]]:
    """Return names of tensors, and those of the experts' matrices as transformers 5 has them.

    It stacks the matrices of all experts, and writes them so on request; quantizers divide them
    again, into matrices with the names of its modules.
    """
    found = dict(names)
    gate = f"{_EXPERT}.gate.weight"
    stacked = {_EXPERT + ".down": "down_proj", _EXPERT + ".up": "up_proj"}
    if names.get(gate):
        stacked = {_EXPERT + ".down": "down_proj", _EXPERT + ".gate_up": "gate_up_proj"}
    for part, module in stacked.items():
        of_each = names.get(f"{part}.weight") or names.get(gate, ())
        added = (f"{whole}.{module}" for whole in _wholes(of_each))
        found[f"{part}.weight"] = (*names.get(f"{part}.weight", ()), *added)
    for part in ("gate", "up", "down"):
        ours = f"{_EXPERT}.{part}.weight"
        if names.get(ours):
            added = (f"{whole}.{{j}}.{part}_proj.weight" for whole in _wholes(names[ours]))
            found[ours] = tuple(dict.fromkeys((*found[ours], *added)))
    return found


def _wholes(of_each: Sequence[str]) -> Sequence[str]:
    """Return the names of what holds all experts, by names of a matrix of each."""
    found = (name.partition(".{j}.")[0] for name in of_each if ".experts.{j}." in name)
    return tuple(dict.fromkeys(found))


def _prefer_stored(names: dict[str, str], present: Any) -> None:
    """Keep either a fused matrix or its members, as the checkpoint stores them."""
    for fused, parts in FUSED.items():
        for kind in ("weight", "bias"):
            whole = f"layers.{{i}}.{fused}.{kind}"
            if whole in names and present(names[whole]):
                within = (other for other, inner in FUSED.items() if set(inner) < set(parts))
                for part in (*parts, *within):
                    names.pop(f"layers.{{i}}.{part}.{kind}", None)
            elif all(f"layers.{{i}}.{part}.{kind}" in names for part in parts):
                names.pop(whole, None)


def name_biases(names: dict[str, str]) -> None:
    """Name each bias like its weight, unless the family names it."""
    for ours, theirs in list(names.items()):
        if ours.endswith(".weight") and theirs.endswith(".weight"):
            bias = ours.removesuffix(".weight") + ".bias"
            names.setdefault(bias, theirs.removesuffix(".weight") + ".bias")


def stored_biases(
    family: Family,
    config: Mapping[str, Any],
    where: str,
    names: Mapping[str, str],
    checkpoint: Collection[str],
    values: Mapping[str, Any],
    kinds: Sequence[LayerKind],
) -> frozenset[str]:
    """Return the matrices that have a bias."""
    biases: set[str] = set()
    for switch, parts in family.biases.items():
        if switch == STORED:
            layers = first_layers(values["n_layers"], kinds)
            biases.update(part for part in parts if _bias_stored(part, names, checkpoint, layers))
        elif switch == ALWAYS or _switch(config, switch, where):
            biases.update(parts)
    return frozenset(biases if values["gated"] else biases - {"ffn.gate", "shared.gate"})


def _bias_stored(
    part: str, names: Mapping[str, str], checkpoint: Collection[str], layers: Sequence[int]
) -> bool:
    """Return whether the checkpoint has the bias of a matrix, possibly fused."""
    wholes = [part, *(fused for fused, parts in FUSED.items() if part in parts)]
    keys = [names.get(f"layers.{{i}}.{whole}.bias") for whole in wholes]
    return any(
        key is not None and key.replace("{i}", str(i)) in checkpoint for key in keys for i in layers
    )


def _switch(config: Mapping[str, Any], key: str, where: str) -> bool:
    """Return a boolean key, false if absent."""
    value = lookup(config, key)
    return value is not None and bool(check_value(value, f"{where}: {key}", bool))
