"""From a family and a checkpoint's configuration to a `ModelSpec`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from nbflow.spec.family import FIELDS, LINEARS, ConfigRule, Family
from nbflow.spec.model_spec import ModelSpec, RopeSpec
from nbflow.spec.toml_schema import check_value
from nbflow_kernels.errors import UsageError

_NORMS = ("layers.{i}.attn_norm", "layers.{i}.ffn_norm", "final_norm")
_MAY_BE_ABSENT = {
    "bos_token_id",
    "eos_token_ids",
    "logits_soft_cap",
    "rope_dim",
    "sm_scale",
    "tied_head",
    "window",
}


def build_spec(
    family: Family,
    config: Mapping[str, Any],
    *,
    name: str,
    where: str,
    override: Mapping[str, Any] | None = None,
    tensors: Mapping[str, str] | None = None,
    ignored_tensors: tuple[str, ...] = (),
    checkpoint_tensors: Collection[str] = (),
) -> ModelSpec:
    """Resolve every number and name of a model.

    Parameters
    ----------
    family : Family
        How the architecture is made.
    config : mapping
        The checkpoint's configuration (config.json, or a header's numbers).
    name : str
        What the model is called.
    where : str
        Where `config` comes from; begins the error messages.
    override : mapping, optional
        Our fields that win over `config`.
    tensors : mapping, optional
        Tensor names that win over the family's.
    ignored_tensors : tuple of str
        Patterns of tensors to ignore, besides the family's.
    checkpoint_tensors : collection of str
        Names the checkpoint holds; they decide whether the head is tied if nothing else does.

    Returns
    -------
    ModelSpec
        The description the engine works from.

    Raises
    ------
    UsageError
        If a field is missing or of a wrong type, or the configuration asks for a computation that
        the family does not describe.
    """
    _refuse_unsupported(family, config, where)
    values = _values(family, config, where, override or {})
    names = {**family.tensors, **(tensors or {})}
    biases = frozenset(
        part
        for switch, parts in family.biases.items()
        if _switch(config, switch, where)
        for part in parts
        if values["gated"] or part != "ffn.gate"
    )
    biased = [f"layers.{{i}}.{part}" for part in LINEARS if part in biases]
    for part in (*biased, *(_NORMS if values["norm"] == "layer" else ())):
        if f"{part}.weight" in names:
            default = names[f"{part}.weight"].removesuffix(".weight") + ".bias"
            names.setdefault(f"{part}.bias", default)
    head_dim = values["head_dim"]
    rope_dim = values.pop("rope_dim", head_dim)
    tied_head = _tied(values.pop("tied_head", None), names, checkpoint_tensors)
    rope = RopeSpec(values.pop("rope_style"), values.pop("rope_theta"), rope_dim)
    return ModelSpec(
        **{"window": None, "logits_soft_cap": None, "sm_scale": 1 / math.sqrt(head_dim)} | values,
        name=name,
        family=family.name,
        rope=rope,
        tied_head=tied_head,
        tensors=names,
        ignored_tensors=(*family.ignored_tensors, *ignored_tensors),
        biases=biases,
    )


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if it is null or absent."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refuse_unsupported(family: Family, config: Mapping[str, Any], where: str) -> None:
    """Raise for the first key whose value changes the computation in a way the family lacks."""
    for key, allowed in family.only.items():
        value = lookup(config, key)
        if value is not None and not any(_same(value, other) for other in allowed):
            can = " or ".join(["null", *(repr(other) for other in allowed)])
            raise UsageError(
                f"{where}: {key} = {value!r:.120} is not supported by family {family.name!r}; "
                f"it must be {can}"
            )


def _same(value: Any, other: Any) -> bool:
    """Return whether two configuration values are equal; true is not 1 here."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _switch(config: Mapping[str, Any], key: str, where: str) -> bool:
    """Return the value of a switch, false if absent."""
    value = lookup(config, key)
    return value is not None and bool(check_value(value, f"{where}: {key}", bool))


def _values(
    family: Family, config: Mapping[str, Any], where: str, override: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the value of every field, or name those that are missing."""
    values: dict[str, Any] = {}
    missing = []
    member = config.get("model_type", family.model_types[0])
    for field in dict.fromkeys([*family.config, *FIELDS]):
        rule = family.config.get(field)
        if field in override:
            value = override[field]
        elif field in family.structure:
            value = family.structure[field]
        elif rule is None or (rule.model_types and member not in rule.model_types):
            value = None
        else:
            value = _from_config(field, rule, config, where, values)
        if value is not None:
            values[field] = value
        elif field not in _MAY_BE_ABSENT:
            missing.append(f"{field} ({' or '.join(rule.keys) if rule else 'no key'})")
    if missing:
        raise UsageError(
            f"{where}: the configuration does not say {', '.join(missing)}; "
            "add the key, or set the field under [override] of a spec file"
        )
    return values


def _from_config(
    field: str, rule: ConfigRule, config: Mapping[str, Any], where: str, values: Mapping[str, Any]
) -> Any:
    """Return one field by its rule, None if the configuration does not say it."""
    for key in rule.keys:
        value = lookup(config, key)
        if value is None:
            continue
        if rule.values:
            check_value(value, f"{where}: {key}", tuple(rule.values))
            value = rule.values[value]
        return check_value(value, f"{where}: {key}", FIELDS[field])
    if rule.same_as is not None:
        return values.get(rule.same_as)
    if rule.quotient and all(name in values for name in rule.quotient):
        whole, parts = (values[name] for name in rule.quotient)
        if parts < 1 or whole % parts:
            raise UsageError(
                f"{where}: {field} is not stated, and {rule.quotient[0]} = {whole} is not a "
                f"multiple of {rule.quotient[1]} = {parts}"
            )
        return whole // parts
    return rule.default


def _tied(stated: bool | None, names: Mapping[str, str], checkpoint: Collection[str]) -> bool:
    """Use the file's head if it has one; else tie, unless the configuration forbids it."""
    if names.get("head.weight") in checkpoint:
        return False
    return stated is not False
