"""Build a `ModelSpec` from a family and a checkpoint's configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from nbflow.checkpoint.quantization_config import read_quantization
from nbflow.spec.architecture import (
    ClassifierSpec,
    HeadShape,
    IndexerSpec,
    LatentSpec,
    LayerKind,
    MoeSpec,
)
from nbflow.spec.family import ABSENT, ALWAYS, STORED, ConfigRule, Family, encoder_of
from nbflow.spec.fields import FIELDS, MAX_ITEMS, REQUIRED, check_field
from nbflow.spec.formula import evaluate
from nbflow.spec.layer_types import (
    first_layers,
    layer_kinds,
    layers_with,
    types_of,
    words_by_tensor,
)
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.per_layer_config import check_layer_keys
from nbflow.spec.positions import ropes, temperature, unrotated
from nbflow.spec.recurrent import delta, selective, state_space
from nbflow.spec.tensor_names import FUSED
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError

WAY_AROUND = (
    'Where other fields say what the value means, or it means nothing, write extends = "{}", '
    '[only] "{}" = "any" and these fields to a file for --spec; a computation without a field can '
    "be the op of a plugin (docs/bring_your_own_architecture.md)"
)
"""Format of the advice on an unsupported value: family and key."""
N_BEHIND = 4
"""Layers for the prediction of several tokens that a checkpoint may hold behind the last one."""


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
    nested = config.get(family.text_config) if family.text_config else None
    if isinstance(nested, Mapping):
        own = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**config, **nested, **own}  # the head is that of the whole model
    _refuse_unsupported(family, config, where)
    held = () if checkpoint_tensors is None else checkpoint_tensors
    values = _values(family, config, where, override or {}, held)
    if values["dynamic_mask_keys"]:  # longer contexts would leave keys out
        values["max_context"] = min(values["max_context"], values["dynamic_mask_keys"])
    _check_layers(values["n_layers"], family, config, held, where)
    encoder = None
    encoder_family = encoder_of(family)
    if encoder_family is not None:
        encoder = build_spec(
            encoder_family,
            config,
            name=f"{name} (encoder)",
            where=where,
            checkpoint_tensors=checkpoint_tensors,
        )
    kinds = layer_kinds(family, values, where)
    check_layer_keys(family, config, kinds, values["n_layers"], where)
    moe = _moe(values)
    layers = first_layers(values["n_layers"], kinds, frozenset() if moe is None else moe.layers)
    names = _names(family, tensors or {}, layers, held)
    _name_biases(names)
    no_transform = checkpoint_tensors is not None and names.get("transform.weight") not in held
    if values["head_transform"] and no_transform:
        # an encoder without the head it was trained with
        values |= {"head": False, "head_transform": False, "head_bias": False}
    rope, local_rope, softmax_factor = ropes(values, where, rope_divisors)
    sm_scale = values["sm_scale"]
    full_layers = _full_layers(values, kinds)
    same = {field.name: values[field.name] for field in fields(ModelSpec) if field.name in FIELDS}
    has_classifier = all(names.get(f"{part}.weight") in held for part in ("pooler", "classifier"))
    same["classifier"] = (
        _classifier(values["classifier"], config, where) if has_classifier else None
    )
    derived = {
        "embed_size": values["embed_size"] or 0,
        "sm_scale": softmax_factor / math.sqrt(values["head_dim"])
        if sm_scale is None
        else sm_scale * softmax_factor,
        # the file's head if it has one; else tied, unless the configuration forbids it
        "tied_head": names.get("head.weight") not in held and values["tied_head"] is not False,
    }
    try:
        return ModelSpec(
            **(same | derived),
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
            ignored_tensors=_ignored(
                (*family.ignored_tensors, *ignored_tensors), values["n_layers"]
            ),
            biases=_biases(family, config, where, names, held, values, kinds),
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if it is null or absent.

    A number enters a list, -1 its end; ``*`` stands for every key of a table, if all say the same.
    """
    value: Any = config
    first, *rest = _full(config, key).split(".*.", 1)
    if rest:
        found = lookup(config, first)
        inner = (
            [lookup(item, rest[0]) for item in found.values()] if isinstance(found, dict) else []
        )
        return inner[0] if inner and all(_same(item, inner[0]) for item in inner) else None
    for part in first.split("."):
        if isinstance(value, list) and part.removeprefix("-").isdecimal():
            value = value[int(part)] if -len(value) <= int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _full(config: Mapping[str, Any], key: str) -> str:
    """Return a key with ``{arch}`` replaced by the architecture of a GGUF file."""
    if "{arch}" not in key:
        return key
    return key.replace("{arch}", str(lookup(config, "general.architecture")))


# ---- fields -----------------------------------------------------------------------------------


def _refuse_unsupported(family: Family, config: Mapping[str, Any], where: str) -> None:
    """Raise for the first key whose value requires an unsupported computation."""
    read_quantization(config, where)
    for key, rule in family.only.items():
        value = lookup(config, key)
        if value is None or any(_same(value, other) for other in rule.values):
            continue
        if _holds(rule.when, config):
            can = " or ".join(["null", *map(repr, rule.values)])
            also = "".join(f", with {k} = {v!r}," for k, v in rule.when.items())
            raise UsageError(
                f"{where}: {_full(config, key)} = {shown(value):.120}{also} is not supported by "
                f"family {family.name!r}; it must be {can}.  {WAY_AROUND.format(family.name, key)}"
            )


def _holds(when: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether the configuration meets the conditions of a rule."""
    found = ((lookup(config, key), wanted) for key, wanted in when.items())
    return all(v is None if wanted == ABSENT else _same(v, wanted) for v, wanted in found)


def _same(value: Any, other: Any) -> bool:
    """Return whether two configuration values are equal; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


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
    if not _holds(rule.when, config):
        return None
    if rule.has:
        words = words_by_tensor(rule.has, values["n_layers"], held)
        return words if rule.where is None else layers_with(rule.where, words)
    for key in rule.keys:
        value = lookup(config, key)
        if value is None or value == {}:  # an empty table of scalings is absent
            continue
        if rule.count:
            value = len(check_value(value, f"{where}: {key}", str if type(value) is str else [str]))
        if rule.kinds:
            offset = None if rule.offset is None else lookup(config, rule.offset)
            return types_of(value, rule, values["n_layers"], f"{where}: {key}", offset)
        if rule.where is not None:
            is_pattern = isinstance(value, str)
            each = tuple(value) if is_pattern else check_value(value, f"{where}: {key}", [str])
            if len(each) > MAX_ITEMS:
                raise UsageError(f"{where}: {key}: may have at most {MAX_ITEMS} entries")
            return layers_with(rule.where, each)
        if rule.values:
            at = f"{where}: {_full(config, key)}"
            if isinstance(value, str) and isinstance(FIELDS[field].kind, list):  # a letter each
                return _letters(value, rule.values, at)
            if not isinstance(value, list) or not isinstance(FIELDS[field].kind, list):
                return rule.values[_known(value, rule.values, at)]
            return tuple(w for item in value for w in rule.values[_known(item, rule.values, at)])
        if isinstance(value, str):
            value = FIELDS[field].aliases.get(value, value)
        elif isinstance(value, list) and value and rule.largest:
            value = max(check_value(value, f"{where}: {_full(config, key)}", [FIELDS[field].kind]))
        elif isinstance(value, list) and FIELDS[field].kind in (int, float):
            value = _common(value, f"{where}: {_full(config, key)}")
        elif isinstance(value, int | float) and FIELDS[field].kind in ([int], [float]):
            value = [value]  # one for all layers
        return check_field(value, f"{where}: {_full(config, key)}", FIELDS[field])
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


def _common(each: Sequence[Any], where: str) -> Any:
    """Return the number that a list states for each layer."""
    if not each or any(not _same(other, each[0]) for other in each):
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
        keys = _full(config, _sources(family.config.get("n_layers", ())) or "n_layers")
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
        beside_dense=values["experts_beside_dense"],
        **{name: values[f"router_{name}"] for name in router},
    )


# ---- tensors ----------------------------------------------------------------------------------


def _ignored(patterns: Sequence[str], n_layers: int) -> tuple[str, ...]:
    """Return patterns of tensors with numbers for ``{behind}``, layers behind the last one."""
    numbers = range(n_layers, n_layers + N_BEHIND)
    found = (pattern.replace("{behind}", str(n)) for pattern in patterns for n in numbers)
    return tuple(dict.fromkeys(found))


def _names(
    family: Family,
    tensors: Mapping[str, Sequence[str]],
    layers: Sequence[int],
    checkpoint: Collection[str],
) -> dict[str, str]:
    """Return the name of each tensor: the first allowed one that the checkpoint has."""

    def present(name: str) -> bool:
        return any(name.replace("{i}", str(i)).replace("{j}", "0") in checkpoint for i in layers)

    chosen = {}
    for ours, allowed in {**family.tensors, **tensors}.items():
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


def _prefer_stored(names: dict[str, str], present: Any) -> None:
    """Keep either a fused matrix or its members, as the checkpoint stores them."""
    for fused, parts in FUSED.items():
        for kind in ("weight", "bias"):
            whole = f"layers.{{i}}.{fused}.{kind}"
            if whole in names and present(names[whole]):
                for part in parts:
                    names.pop(f"layers.{{i}}.{part}.{kind}", None)
            elif all(f"layers.{{i}}.{part}.{kind}" in names for part in parts):
                names.pop(whole, None)


def _name_biases(names: dict[str, str]) -> None:
    """Name each bias like its weight, unless the family names it."""
    for ours, theirs in list(names.items()):
        if ours.endswith(".weight") and theirs.endswith(".weight"):
            bias = ours.removesuffix(".weight") + ".bias"
            names.setdefault(bias, theirs.removesuffix(".weight") + ".bias")


def _biases(
    family: Family,
    config: Mapping[str, Any],
    where: str,
    names: Mapping[str, str],
    checkpoint: Collection[str],
    values: Mapping[str, Any],
    kinds: Sequence[LayerKind],
) -> frozenset[str]:
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
