"""Build a `ModelSpec` from a family and a checkpoint's configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from nbflow.checkpoint.quantization_config import read_quantization
from nbflow.spec.architecture import (
    ClassifierSpec,
    LatentSpec,
    LayerKind,
    MoeSpec,
    RopeSpec,
)
from nbflow.spec.family import ABSENT, ALWAYS, STORED, ConfigRule, Family, encoder_of
from nbflow.spec.fields import FIELDS, FUSED, MAX_ITEMS, REQUIRED, check_field
from nbflow.spec.formula import evaluate
from nbflow.spec.layer_types import first_layers, layer_kinds, types_of
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.recurrent import delta, selective, state_space
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_value
from nbflow_kernels.errors import UsageError
from nbflow_kernels.position import LongRopeScaling, RopeScaling


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
        config = {**config, **nested}
    _refuse_unsupported(family, config, where)
    held = () if checkpoint_tensors is None else checkpoint_tensors
    values = _values(family, config, where, override or {}, held)
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
    names = _names(family, tensors or {}, first_layers(values["n_layers"], kinds), held)
    _name_biases(names)
    no_transform = checkpoint_tensors is not None and names.get("transform.weight") not in held
    if values["head_transform"] and no_transform:
        # an encoder without the head it was trained with
        values |= {"head": False, "head_transform": False, "head_bias": False}
    rope, local_rope, softmax_factor = _ropes(values, config, where, rope_divisors)
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
            unrotated_layers=_unrotated(values, full_layers, where),
            latent=_latent(values),
            delta=delta(values),
            ssm=state_space(values),
            selective=selective(values),
            moe=_moe(values),
            tensors=names,
            ignored_tensors=(*family.ignored_tensors, *ignored_tensors),
            biases=_biases(family, config, where, names, held, values, kinds),
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if it is null or absent; a number enters a list."""
    value: Any = config
    for part in _full(config, key).split("."):
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
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
            can = " or ".join(["null", *(repr(other) for other in rule.values)])
            also = "".join(f", with {k} = {v!r}," for k, v in rule.when.items())
            raise UsageError(
                f"{where}: {_full(config, key)} = {shown(value):.120}{also} is not supported by "
                f"family {family.name!r}; it must be {can}"
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
                value = _from_config(field, rule, config, where, values)
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
    field: str, rule: ConfigRule, config: Mapping[str, Any], where: str, values: Mapping[str, Any]
) -> Any:
    """Return the value of a field by one rule, or None."""
    if not _holds(rule.when, config):
        return None
    for key in rule.keys:
        value = lookup(config, key)
        if value is None or value == {}:  # an empty table of scalings is absent
            continue
        if rule.kinds:
            offset = None if rule.offset is None else lookup(config, rule.offset)
            if rule.from_one and isinstance(value, list):
                value = [i - 1 if type(i) is int else i for i in value]
            return types_of(value, rule.kinds, values["n_layers"], f"{where}: {key}", offset)
        if rule.values:
            if isinstance(value, str) and isinstance(FIELDS[field].kind, list):  # a letter each
                return _letters(value, rule.values, f"{where}: {_full(config, key)}")
            word = str(value).lower() if isinstance(value, bool | int) else value
            check_value(word, f"{where}: {_full(config, key)}", tuple(rule.values))
            return rule.values[word]
        if isinstance(value, str):
            value = FIELDS[field].aliases.get(value, value)
        return check_field(value, f"{where}: {_full(config, key)}", FIELDS[field])
    if rule.same_as is not None:
        other = values.get(rule.same_as)
        if other is None or other is REQUIRED:
            return None
        return check_field(other, f"{where}: {field}", FIELDS[field])
    if rule.formula is not None:
        return _computed(field, rule.formula, config, where, values)
    return rule.default


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
        return lookup(config, name) if value is None or value is REQUIRED else value

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


def _ropes(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    where: str,
    divisors: Mapping[str, Sequence[float]] | None,
) -> tuple[RopeSpec, RopeSpec | None, float]:
    """Return the rotary embeddings of all layers and of local layers, and the softmax factor."""
    style, theta = values["rope_style"], values["rope_theta"]
    if values["position"] != "rope":
        return RopeSpec(style, theta, 0), None, 1.0
    dim = values["rope_dim"]
    if dim is None:
        dim = int(values["head_dim"] * values["rope_fraction"])
    max_context = values["max_context"]
    try:
        scaling = RopeScaling.from_config(
            _scaling_table(values["rope_scaling"], values["rope_truncate"]),
            max_position=max_context,
            original_max_position=values["rope_original_context"],
        )
        if divisors:
            scaling = _stored_scaling(values, divisors, where)
        factor = 1.0 if scaling is None else float(scaling.softmax_factor)
    except (UsageError, TypeError, ArithmeticError) as error:
        raise UsageError(f"{where}: rope_scaling: {error}") from error
    local = values["local_rope_theta"]
    local_rope = None if local is None else RopeSpec(style, local, dim)
    return RopeSpec(style, theta, dim, scaling), local_rope, factor


def _stored_scaling(
    values: Mapping[str, Any], divisors: Mapping[str, Sequence[float]], where: str
) -> RopeScaling:
    """Return the scaling of divisors stored in the checkpoint."""
    each = {name: tuple(map(float, numbers)) for name, numbers in divisors.items()}
    max_context = values["max_context"]
    if "rope_divisors" in each:
        all_lengths = each["rope_divisors"]
        return LongRopeScaling(
            short_factor=all_lengths, long_factor=all_lengths, original_max_position=max_context
        )
    if len(each) != 2:
        raise UsageError(
            f"{where}: the checkpoint has {next(iter(each))} only; LongRoPE needs the divisors for "
            "short and for long sequences"
        )
    original = values["rope_original_context"] or max_context
    return LongRopeScaling(
        short_factor=each["rope_short_divisors"],
        long_factor=each["rope_long_divisors"],
        original_max_position=original,
        factor=max_context / original,
        attention_factor=(values["rope_scaling"] or {}).get("attn_factor"),
    )


_GGUF_SCALING = {"original_context_length": "original_max_position_embeddings"}


def _scaling_table(table: Mapping[str, Any] | None, truncate: bool | None) -> dict[str, Any] | None:
    """Return a rotary scaling with the keys of config.json; GGUF has other ones."""
    if not table:
        return None
    words = {_GGUF_SCALING.get(k, k): v for k, v in table.items() if k != "finetuned"}
    if words.keys() <= {"original_max_position_embeddings", "attn_factor"}:
        return None  # parameters of stored divisors
    log_multiplier = words.pop("yarn_log_multiplier", None)
    if log_multiplier:  # as in llama.cpp, the temperature is in the softmax alone
        words |= dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * log_multiplier)
    if truncate is not None and words.get("rope_type", words.get("type")) == "yarn":
        words["truncate"] = truncate
    return None if words.get("type") == "none" else words


def _full_layers(values: Mapping[str, Any], kinds: Sequence[LayerKind]) -> frozenset[int]:
    """Return the layers with full attention in a model with a window."""
    n, every = values["n_layers"], values["full_layer_every"]
    if values["window"] is None:
        return frozenset()
    if kinds:
        return frozenset(i for i, kind in enumerate(kinds) if not kind.window)
    first = values["window_first_layer"]
    return frozenset(i for i in range(n) if i < first or (every and (i + 1) % every == 0))


def _unrotated(
    values: Mapping[str, Any], full_layers: frozenset[int], where: str
) -> frozenset[int]:
    """Return the layers without rotation in a model with rotation."""
    n, every, flags = values["n_layers"], values["unrotated_every"], values["rope_layers"]
    if values["position"] != "rope":
        return frozenset()
    if flags:
        if len(flags) != n or not set(flags) <= {0, 1}:
            raise UsageError(
                f"{where}: rope_layers must be {n} times 0 or 1, one for each layer, "
                f"got {list(flags)!r:.80}"
            )
        return frozenset(i for i, rotates in enumerate(flags) if not rotates)
    if values["rope_windows_only"]:
        return full_layers if values["window"] is not None else frozenset(range(n))
    return frozenset(i for i in range(n) if every and (i + 1) % every == 0)


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
        for i in range(values["dense_first"], values["n_layers"])
        if i % every == offset and i not in dense
    )
    router = ("scoring", "renormalize", "scale", "groups", "groups_used", "group_score")
    return MoeSpec(
        n_experts=values["n_experts"],
        top_k=values["experts_per_token"],
        expert_size=values["expert_size"] or values["intermediate_size"],
        router_bias=values["router_bias"],
        shared_size=values["shared_size"],
        shared_gate=values["shared_gate"],
        layers=layers,
        **{name: values[f"router_{name}"] for name in router},
    )


# ---- tensors ----------------------------------------------------------------------------------


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
    return frozenset(biases if values["gated"] else biases - {"ffn.gate"})


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
