"""Build a `ModelSpec` from a family and a checkpoint's configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from nbflow.checkpoint.quantization_config import read_quantization
from nbflow.spec.config_lookup import check_types, complete, full_key, holds, lookup, same_value
from nbflow.spec.family import ConfigRule, Family, encoder_of
from nbflow.spec.fields import FIELDS, MAX_ITEMS, REQUIRED, check_field
from nbflow.spec.formula import evaluate
from nbflow.spec.layer_specs import (
    ClassifierSpec,
    HeadShape,
    IndexerSpec,
    LatentSpec,
    LayerKind,
    MoeSpec,
)
from nbflow.spec.layer_types import (
    first_layers,
    layer_kinds,
    layers_with,
    types_of,
    words_by_tensor,
)
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.per_layer_config import check_layer_keys
from nbflow.spec.positions import ropes, temperature, theta_by_layer, unrotated
from nbflow.spec.recurrent import delta, selective, state_space
from nbflow.spec.stored_names import ignored_patterns, name_biases, stored_biases, stored_names
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError

WAY_AROUND = (
    'Where other fields say what the value means, or it means nothing, write extends = "{}", '
    '[only] "{}" = "any" and these fields to a file for --spec; a computation without a field can '
    "be the op of a plugin (docs/bring_your_own_architecture.md)"
)
"""Format of the advice on an unsupported value: family and key."""


def build_spec(
    family: Family,
    config: Mapping[str, Any],
    *,
    name: str,
    where: str,
    override: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Sequence[str]] | None = None,
    ignored_tensors: tuple[str, ...] = (),
    checkpoint_tensors: Collection[str] | None = (),
    rope_divisors: Mapping[str, Sequence[float]] | None = None,
) -> ModelSpec:
    """Resolve every number and name of a model.

    Parameters
    ----------
    family : Family
        Structure, config keys and tensor names of the architecture.
    config : mapping
        The checkpoint's configuration (config.json, or the header of a file).
    name : str
        Name of the model.
    where : str
        Source of `config`; begins the error messages.
    override : mapping, optional
        Our fields that win over `config`.
    tensors : mapping, optional
        Tensor names that win over the family's.
    ignored_tensors : tuple of str
        Further patterns of tensors to ignore.
    checkpoint_tensors : collection of str
        Tensor names of the checkpoint, which select among the names that a family allows and tell
        a tied head.  None without a checkpoint: the first name and the configuration decide.
    rope_divisors : mapping, optional
        Divisors of the rotary frequencies stored in the checkpoint, by our names
        (`nbflow.spec.fields.DIVISORS`).

    Raises
    ------
    UsageError
        If a field is missing or of a wrong type, or the configuration requires a computation that
        the family does not describe.
    """
    config = complete(config, family)
    _refuse_unsupported(family, config, where)
    check_types(family, config, where, override or ())
    held = () if checkpoint_tensors is None else checkpoint_tensors
    values = _values(family, config, where, override or {}, held)
    if values["dynamic_mask_keys"]:  # longer contexts would leave keys out
        values["max_context"] = min(values["max_context"], values["dynamic_mask_keys"])
    _check_layers(values["n_layers"], family, config, held, where)
    encoder = _encoder(family, config, name, where, checkpoint_tensors)
    kinds = layer_kinds(family, values, where)
    check_layer_keys(family, config, kinds, values["n_layers"], where)
    moe = _moe(values)
    layers = first_layers(values["n_layers"], kinds, frozenset() if moe is None else moe.layers)
    names = stored_names(family, tensors or {}, layers, held)
    name_biases(names)
    values |= _heads(values, config, where, names, checkpoint_tensors)
    full_layers = _full_layers(values, kinds)
    values |= theta_by_layer(values, full_layers, where)
    rope, local_rope, softmax_factor = ropes(values, where, rope_divisors)
    same = {field.name: values[field.name] for field in fields(ModelSpec) if field.name in FIELDS}
    same |= {
        "embed_size": values["embed_size"] or 0, "sm_scale": _sm_scale(values, softmax_factor)
    }  # fmt: skip
    try:
        return ModelSpec(
            **same,
            name=name,
            family=family.name,
            encoder=encoder,
            rope=rope,
            local_rope=local_rope,
            layer_kinds=kinds,
            full_layers=full_layers,
            unrotated_layers=unrotated(values, full_layers, where),
            temperature=temperature(values, where),
            latent=_latent(values),
            heads_value_dim=0 if values["kv_rank"] else values["value_dim"] or 0,
            local_heads=_local_heads(values),
            indexer=_indexer(values, where),
            delta=delta(values),
            ssm=state_space(values),
            selective=selective(values),
            moe=moe,
            tensors=names,
            ignored_tensors=ignored_patterns(
                (*family.ignored_tensors, *ignored_tensors), values["n_layers"]
            ),
            biases=stored_biases(family, config, where, names, held, values, kinds),
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _encoder(
    family: Family,
    config: Mapping[str, Any],
    name: str,
    where: str,
    checkpoint_tensors: Collection[str] | None,
) -> ModelSpec | None:
    """Return the specification of the encoder of a model with one."""
    own = encoder_of(family)
    if own is None:
        return None
    name = f"{name} (encoder)"
    return build_spec(own, config, name=name, where=where, checkpoint_tensors=checkpoint_tensors)


def _heads(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    where: str,
    names: Mapping[str, str],
    checkpoint_tensors: Collection[str] | None,
) -> dict[str, Any]:
    """Return the fields of the heads that the checkpoint holds."""
    parts = ("head", "transform", "pooler", "classifier")
    held = {part for part in parts if names.get(f"{part}.weight") in (checkpoint_tensors or ())}
    found: dict[str, Any] = {
        # the file's head if it has one; else tied, unless the configuration forbids it
        "tied_head": "head" not in held and values["tied_head"] is not False,
        "classifier": None,
    }
    if held >= {"pooler", "classifier"}:
        found["classifier"] = _classifier(values["classifier"], config, where)
    if values["head_transform"] and checkpoint_tensors is not None and "transform" not in held:
        # an encoder without the head it was trained with
        found |= {"head": False, "head_transform": False, "head_bias": False}
    return found


def _sm_scale(values: Mapping[str, Any], factor: float) -> float:
    """Return the factor of attention scores; `factor` comes from a scaling of the rotation."""
    given: float | None = values["sm_scale"]
    return factor / math.sqrt(values["head_dim"]) if given is None else given * factor


# ---- fields -----------------------------------------------------------------------------------


def _refuse_unsupported(family: Family, config: Mapping[str, Any], where: str) -> None:
    """Raise for the first key whose value requires an unsupported computation."""
    read_quantization(config, where)
    for key, rule in family.only.items():
        value = lookup(config, key)
        if value is None or any(same_value(value, other) for other in rule.values):
            continue
        if holds(rule.when, config):
            can = " or ".join(["null", *map(repr, rule.values)])
            also = "".join(f", with {k} = {v!r}," for k, v in rule.when.items())
            raise UsageError(
                f"{where}: {full_key(config, key)} = {shown(value):.120}{also} is not supported by "
                f"family {family.name!r}; it must be {can}.  {WAY_AROUND.format(family.name, key)}"
            )


def _values(
    family: Family,
    config: Mapping[str, Any],
    where: str,
    override: Mapping[str, Any],
    held: Collection[str],
) -> dict[str, Any]:
    """Return the value of every field, or raise for missing ones."""
    values: dict[str, Any] = {}
    missing = []
    for field in dict.fromkeys([*family.config, *FIELDS]):
        rules = family.config.get(field, ())
        value = None
        if field in override:
            value = override[field]
        elif field in family.structure:
            value = family.structure[field]
        else:
            for rule in rules:
                if rule.stored is not None and rule.stored not in held:
                    continue
                value = _from_config(field, rule, config, where, values, held)
                if value is not None:
                    break
        default = FIELDS[field].default
        if value is None and (default is REQUIRED or not (rules == () or _optional(rules))):
            missing.append(f"{field} ({_sources(rules) or 'no key'})")
        values[field] = default if value is None else value
    if missing:
        raise UsageError(
            f"{where}: the configuration does not say {', '.join(missing)}; "
            "add the key, or set the field under [override] of a spec file"
        )
    return values


def _sources(rules: Sequence[ConfigRule]) -> str:
    """Return the keys and formulas of the rules of a field, for messages."""
    found = [key for rule in rules for key in rule.keys]
    found += [f"the formula {rule.formula!r}" for rule in rules if rule.formula and not rule.keys]
    return " or ".join(found)


def _optional(rules: Sequence[ConfigRule]) -> bool:
    """Return whether the rules of a field allow it to have no value."""
    return any(rule.optional or rule.when or rule.stored for rule in rules)


def _from_config(
    field: str,
    rule: ConfigRule,
    config: Mapping[str, Any],
    where: str,
    values: Mapping[str, Any],
    held: Collection[str],
) -> Any:
    """Return the value of a field by one rule, or None."""
    if not holds(rule.when, config):
        return None
    if (rule.has or rule.kinds) and not isinstance(values["n_layers"], int):
        return None  # reported as missing
    if rule.has:
        words = words_by_tensor(rule.has, values["n_layers"], held)
        return words if rule.where is None else layers_with(rule.where, words)
    for key in rule.keys:
        value = lookup(config, key)
        if value is None and _is_switch(field, rule) and key in config:
            value = False  # as in the published code, where null is not true
        if value is not None and value != {}:  # an empty table of scalings is absent
            return _of_key(field, rule, key, value, config, where, values)
    if rule.same_as is not None:
        other = values.get(rule.same_as)
        if other is None or other is REQUIRED:
            return None
        return check_field(other, f"{where}: {field}", FIELDS[field])
    if rule.formula is not None:
        return _computed(field, rule.formula, config, where, values)
    if rule.kinds and rule.default is not None:
        return types_of(rule.default, rule, values["n_layers"], f"{where}: {field}")
    return rule.default


def _of_key(
    field: str,
    rule: ConfigRule,
    key: str,
    value: Any,
    config: Mapping[str, Any],
    where: str,
    values: Mapping[str, Any],
) -> Any:
    """Return the value of a field that a rule makes of the value of a key."""
    if value == _INFINITY:
        value = math.inf
    if rule.count:
        value = len(check_value(value, f"{where}: {key}", str if type(value) is str else [str]))
    if rule.kinds:
        offset = None if rule.offset is None else lookup(config, rule.offset)
        return types_of(value, rule, values["n_layers"], f"{where}: {key}", offset)
    if rule.where is not None:
        if isinstance(value, list) and all(type(item) is int for item in value[:MAX_ITEMS]):
            value = list(map(str, value[:MAX_ITEMS]))
        is_pattern = isinstance(value, str)
        each = tuple(value) if is_pattern else check_value(value, f"{where}: {key}", [str])
        return layers_with(rule.where, _of_layers(each, rule.where, f"{where}: {key}", values))
    at, kind = f"{where}: {full_key(config, key)}", FIELDS[field].kind
    if rule.values:
        return _translated(value, rule.values, kind, at)
    if isinstance(value, str):
        value = FIELDS[field].aliases.get(value, value)
    elif isinstance(value, list) and value and rule.largest:
        value = max(check_value(value, at, [kind]))
    elif isinstance(value, list) and kind in (int, float):
        value = _common(value, at)
    elif isinstance(value, int | float) and kind in ([int], [float]):
        value = [value]  # one for all layers
    return check_field(value, at, FIELDS[field])


def _translated(value: Any, words: Mapping[Any, Any], kind: Any, at: str) -> Any:
    """Return our words for a value, or for each item or letter of one that lists layers."""
    if isinstance(value, str) and isinstance(kind, list):
        return _letters(value, words, at)
    if not isinstance(value, list) or not isinstance(kind, list):
        return words[_known(value, words, at)]
    return tuple(w for item in value for w in words[_known(item, words, at)])


_INFINITY = {"__float__": "Infinity"}
"""Infinity in config.json as transformers 5 writes it."""
_MLP_TYPES = ("dense", "sparse")
"""Words of mlp_layer_types."""


def _is_switch(field: str, rule: ConfigRule) -> bool:
    """Return whether a rule reads true and false, and is true without a key."""
    is_true = FIELDS[field].kind is bool and rule.default is True and field != "tied_head"
    return is_true or "false" in rule.values


def _of_layers(
    words: Sequence[str], word: str, where: str, values: Mapping[str, Any]
) -> Sequence[str]:
    """Return the words of a list if there is one for each layer, and each is known."""
    if len(words) > MAX_ITEMS:
        raise UsageError(f"{where}: may have at most {MAX_ITEMS} entries, got {len(words)}")
    n = values["n_layers"]
    if isinstance(n, int) and len(words) < n:
        raise UsageError(f"{where}: must have {n} entries, one for each layer, got {len(words)}")
    for found in words if word in _MLP_TYPES else ():
        check_value(found, where, _MLP_TYPES)
    return words


def _common(each: Sequence[Any], where: str) -> Any:
    """Return the number that a list states for each layer."""
    if not each or any(not same_value(other, each[0]) for other in each):
        can = "one number, or a list of the same number for each layer"
        raise UsageError(f"{where}: must be {can}, got {shown(each)}")
    return each[0]


def _known(value: Any, values: Mapping[str, Any], where: str) -> str:
    """Return a word of the checkpoint, true, false and numbers as words, or raise."""
    word = str(value).lower() if isinstance(value, bool | int) else value
    return str(check_value(word, where, tuple(values)))


def _letters(text: str, values: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """Return the value of each letter of a pattern of layers."""
    if len(text) > MAX_ITEMS:
        raise UsageError(f"{where}: may have at most {MAX_ITEMS} letters, got {len(text)}")
    for letter in text:
        check_value(letter, where, tuple(values))
    return tuple(item for letter in text for item in values[letter])


def _computed(
    field: str, formula: str, config: Mapping[str, Any], where: str, values: Mapping[str, Any]
) -> Any:
    """Return the value of a field by a formula, None if a name in it has no value."""

    def value_of(name: str) -> Any:
        value = values.get(name)
        key = f"{{arch}}{name.removeprefix('arch')}" if name.startswith("arch.") else name
        return lookup(config, key) if value is None or value is REQUIRED else value

    value = evaluate(formula, f"{where}: {field}", value_of)
    if value is None:
        return None
    if FIELDS[field].kind is int and math.isfinite(value):
        if value != int(value):
            names = [n for n in formula.replace("/", " ").split() if value_of(n) is not None]
            found = ", ".join(f"{name} = {value_of(name)}" for name in names)
            raise UsageError(
                f"{where}: {field} is not stated, and {formula} is not a whole number with {found}"
            )
        value = int(value)
    return check_field(value, f"{where}: {field}", FIELDS[field])


def _check_layers(
    n: int, family: Family, config: Mapping[str, Any], held: Collection[str], where: str
) -> None:
    """Refuse more layers than the checkpoint has tensors, before any work per layer."""
    if held and n > len(held):
        keys = full_key(config, _sources(family.config.get("n_layers", ())) or "n_layers")
        raise UsageError(
            f"{where}: {keys} states {n} layers; a layer has at least one tensor, but the "
            f"checkpoint holds {len(held)} in all; correct the number or name the right weights"
        )


# ---- what follows from the fields ---------------------------------------------------------------


def _full_layers(values: Mapping[str, Any], kinds: Sequence[LayerKind]) -> frozenset[int]:
    """Return the layers with full attention in a model with a window."""
    n, every = values["n_layers"], values["full_layer_every"]
    if values["window"] is None:
        return frozenset()
    if kinds:
        return frozenset(i for i, kind in enumerate(kinds) if not kind.window)
    first = values["window_first_layer"]
    return frozenset(i for i in range(n) if i < first or (every and (i + 1) % every == 0))


def _latent(values: Mapping[str, Any]) -> LatentSpec | None:
    if not values["kv_rank"]:
        return None
    eps, value_dim = values["latent_norm_eps"], values["value_dim"]
    return LatentSpec(
        kv_rank=values["kv_rank"],
        q_rank=values["q_rank"],
        value_dim=values["head_dim"] if value_dim is None else value_dim,
        norm_eps=values["norm_eps"] if eps is None else eps,
    )


def _local_heads(values: Mapping[str, Any]) -> HeadShape | None:
    """Return the heads of the layers with the window; None if all layers have the same."""
    n, dim, value_dim = (
        values[f"local_{name}"] for name in ("n_kv_heads", "head_dim", "value_dim")
    )
    usual_dim, usual_value = values["head_dim"], values["value_dim"] or values["head_dim"]
    if value_dim is None:
        value_dim = usual_value if dim is None else dim
    usual = HeadShape(values["n_kv_heads"], usual_dim, usual_value)
    local = HeadShape(n or values["n_kv_heads"], dim or usual_dim, value_dim)
    return None if values["window"] is None or local == usual else local


def _indexer(values: Mapping[str, Any], where: str) -> IndexerSpec | None:
    """Return the indexer; None without one, and where it selects all keys of every context."""
    n, types, top_k = values["n_layers"], values["index_types"], values["index_topk"]
    if top_k is None or top_k >= values["max_context"]:
        return None
    if types and (len(types) != n or not set(types) <= {"full", "shared"} or types[0] != "full"):
        raise UsageError(
            f"{where}: index_types must be {n} times full or shared, one for each layer, the first "
            f"full, got {list(types)!r:.80}"
        )
    return IndexerSpec(
        values["index_heads"],
        values["index_dim"],
        top_k,
        values["index_rope_style"],
        frozenset(i for i in range(n) if not types or types[i] == "full"),
    )


def _classifier(activation: Any, config: Mapping[str, Any], where: str) -> ClassifierSpec | None:
    """Return the classification head, whose labels and kind config.json states as transformers."""
    if activation == "none":
        return None
    stated = lookup(config, "id2label")
    count = lookup(config, "num_labels")
    names = {} if stated is None else check_value(stated, f"{where}: id2label", dict)
    n = len(names) or (2 if count is None else check_value(count, f"{where}: num_labels", int))
    if not 1 <= n <= MAX_ITEMS:
        raise UsageError(f"{where}: there must be 1 to {MAX_ITEMS} labels, got {shown(n)}")
    labels = [
        check_value(names.get(str(i), f"LABEL_{i}"), f"{where}: id2label {i}", str)
        for i in range(n)
    ]
    kind = lookup(config, "problem_type")
    if kind is not None:
        check_value(kind, f"{where}: problem_type", tuple(_PROBLEMS))
    usual: Any = "regression" if n == 1 else "single_label"
    return ClassifierSpec(activation, tuple(labels), _PROBLEMS.get(kind, usual))


_PROBLEMS: dict[str, Any] = {
    "regression": "regression",
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
}
"""problem_type of config.json -> ours."""


def _moe(values: Mapping[str, Any]) -> MoeSpec | None:
    if not values["n_experts"]:
        return None
    every, dense = max(1, values["expert_every"]), set(values["dense_layers"])
    offset = every - 1 if values["expert_offset"] is None else values["expert_offset"]
    layers = frozenset(
        i
        for i in range(values["dense_first"], values["n_layers"] - values["dense_last"])
        if i % every == offset and i not in dense
    )
    if values["expert_layers"] is not None:
        layers = frozenset(i for i in values["expert_layers"] if i < values["n_layers"])
    if not layers:
        return None
    router = ("scoring", "renormalize", "scale", "groups", "groups_used", "group_score")
    return MoeSpec(
        n_experts=values["n_experts"],
        top_k=values["experts_per_token"],
        expert_size=values["expert_size"] or values["intermediate_size"],
        latent_size=values["expert_latent_size"],
        router_bias=values["router_bias"],
        weighs_inputs=values["router_weighs_inputs"],
        shared_size=values["shared_size"],
        shared_gate=values["shared_gate"],
        layers=layers,
        output_scale=values["experts_output_scale"],
        beside_dense=values["experts_beside_dense"],
        **{name: values[f"router_{name}"] for name in router},
    )
