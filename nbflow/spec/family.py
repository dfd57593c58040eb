"""Families: how an architecture is made of known parts, as `families/*.toml`.

A family file has these parts, and no others:

description, model_types
    One line, and the ``model_type`` values of config.json that it serves.
[structure]
    Our fields (`FIELDS`) that are the same for all members.
[config]
    Our field = where config.json says it: ``keys`` (the first one present counts; a dot goes into
    a table), then, if none is there, one of ``default`` (a value), ``same_as`` (a field above),
    ``quotient`` (two fields above), ``optional = true`` (no value).  ``values`` translates words,
    ``model_types`` restricts the rule to some members.
[biases]
    Switches of config.json, and the tensors that have a bias when they are true.
[only]
    Keys of config.json that change the computation, and the values that can be run.
[tensors]
    Our tensor name = the checkpoint's, ``{i}`` for the layer.
[ignored]
    ``tensors``: shell patterns of checkpoint tensors that are not weights.

A new architecture made of known parts is a new file in `families/`, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nbflow.spec.toml_schema import Kind, check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError, unknown_name

FAMILIES = Path(__file__).parent / "families"

FIELDS: dict[str, Kind] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "n_layers": int,
    "n_heads": int,
    "n_kv_heads": int,
    "head_dim": int,
    "max_context": int,
    "norm": ("rms", "layer"),
    "norm_eps": float,
    "activation": ("silu", "gelu", "gelu_tanh", "relu"),
    "gated": bool,
    "rope_style": ("half", "interleaved"),
    "rope_theta": float,
    "rope_dim": int,
    "sm_scale": float,
    "window": int,
    "logits_soft_cap": float,
    "tied_head": bool,
    "bos_token_id": int,
    "eos_token_ids": [int],
}
"""Every field a family, a config.json or a spec file can set, and its type."""

LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")
"""The layer's matrices, which may have a bias."""

_LAYER_PARTS = ("attn_norm", "ffn_norm", *LINEARS)
TENSOR_NAMES = tuple(
    f"{part}.{kind}"
    for part in ("embed", *(f"layers.{{i}}.{part}" for part in _LAYER_PARTS), "final_norm", "head")
    for kind in ("weight", "bias")
    if (part, kind) not in {("embed", "bias"), ("head", "bias")}
)
"""Our names of tensors, ``{i}`` for the layer."""


@dataclass(frozen=True)
class ConfigRule:
    """Where config.json says one of our fields; see the module's docstring."""

    keys: tuple[str, ...]
    """Names in config.json, the first one present counts."""
    default: Any = None
    """Value if no key is there."""
    same_as: str | None = None
    """Field to copy if no key is there."""
    quotient: tuple[str, ...] = ()
    """Two fields to divide if no key is there."""
    optional: bool = False
    """Whether the field may stay without a value."""
    values: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's word -> ours; empty means as it is."""
    model_types: tuple[str, ...] = ()
    """Members the rule holds for; empty means all."""


@dataclass(frozen=True)
class Family:
    """One family file; see the module's docstring for its parts."""

    name: str
    """Name of the file without suffix."""
    description: str
    """One line."""
    model_types: tuple[str, ...]
    """Values of ``model_type`` that it serves."""
    structure: dict[str, Any]
    """Fields that all members share."""
    config: dict[str, ConfigRule]
    """Field -> where config.json says it."""
    biases: dict[str, tuple[str, ...]]
    """Switch of config.json -> tensors that then have a bias."""
    only: dict[str, list[Any]]
    """Key of config.json -> the values that can be run."""
    tensors: dict[str, str]
    """Our tensor name -> the checkpoint's."""
    ignored_tensors: tuple[str, ...]
    """Patterns of checkpoint tensors that are not weights."""


@cache
def families() -> dict[str, Family]:
    """Return every family by name."""
    return {path.stem: load_family(path) for path in sorted(FAMILIES.glob("*.toml"))}


def get_family(name: str, where: str) -> Family:
    """Return a family by its name, or raise `UsageError` with close names."""
    if name not in families():
        raise UsageError(f"{where}: {unknown_name('family', name, families())}")
    return families()[name]


def family_of(model_type: Any, where: str) -> Family:
    """Return the family that serves a ``model_type``, or raise `UsageError` with what exists."""
    served = {kind: family for family in families().values() for kind in family.model_types}
    if not isinstance(model_type, str) or model_type not in served:
        raise UsageError(
            f"{where}: {unknown_name('model_type', model_type, served)}; a spec file that names a "
            "family can say how to read this model"
        )
    return served[model_type]


def load_family(path: Path) -> Family:
    """Read one family file and check all of it."""
    table = read_toml(path)
    parts = ("description", "model_types", "structure", "config", "biases", "only", "tensors")
    check_keys(table, str(path), (*parts, "ignored"))
    biases = check_keys(table.get("biases", {}), f"{path}: [biases]", table.get("biases", {}))
    ignored = check_keys(table.get("ignored", {}), f"{path}: [ignored]", ("tensors",))
    only = check_keys(table.get("only", {}), f"{path}: [only]", table.get("only", {}))
    for key, values in only.items():
        if not isinstance(values, list):
            raise UsageError(f"{path}: [only] {key} must be a list of values, got {values!r:.80}")
    return Family(
        name=path.stem,
        description=check_value(table.get("description"), f"{path}: description", str),
        model_types=strings(table.get("model_types"), f"{path}: model_types"),
        structure=check_fields(table.get("structure", {}), f"{path}: [structure]"),
        config=_rules(table.get("config", {}), f"{path}: [config]"),
        biases={key: _biased(names, f"{path}: [biases] {key}") for key, names in biases.items()},
        only=only,
        tensors=check_tensors(table.get("tensors", {}), f"{path}: [tensors]"),
        ignored_tensors=strings(ignored.get("tensors", []), f"{path}: [ignored] tensors"),
    )


def check_fields(table: Any, where: str) -> dict[str, Any]:
    """Return a table of our fields with the values checked against their types."""
    check_keys(table, where, FIELDS)
    return {
        name: check_value(value, f"{where} {name}", FIELDS[name]) for name, value in table.items()
    }


def check_tensors(table: Any, where: str) -> dict[str, str]:
    """Return a table of tensor names, both sides checked."""
    check_keys(table, where, TENSOR_NAMES)
    for name, theirs in table.items():
        check_value(theirs, f"{where} {name}", str)
        if theirs.count("{i}") != name.count("{i}"):
            raise UsageError(
                f"{where} {name}: must contain {{i}} {name.count('{i}')} times, got {theirs!r}"
            )
    return dict(table)


def _biased(value: Any, where: str) -> tuple[str, ...]:
    """Return the matrices of one switch of [biases]."""
    for name in strings(value, where):
        check_value(name, where, LINEARS)
    return tuple(value)


def _rules(table: Any, where: str) -> dict[str, ConfigRule]:
    """Return the rules of [config]."""
    rules: dict[str, ConfigRule] = {}
    for name, rule in check_keys(table, where, FIELDS).items():
        at = f"{where} {name}"
        check_keys(rule, at, ConfigRule.__dataclass_fields__)
        quotient = strings(rule.get("quotient", []), f"{at} quotient")
        same_as = rule.get("same_as")
        for above in (*quotient, *([] if same_as is None else [same_as])):
            if above not in rules:
                raise UsageError(f"{at}: {above!r} must be a field listed above it")
        if len(quotient) not in (0, 2):
            raise UsageError(f"{at} quotient: must be two fields, got {len(quotient)}")
        default = rule.get("default")
        rules[name] = ConfigRule(
            keys=strings(rule.get("keys", []), f"{at} keys"),
            default=None if default is None else check_value(default, at, FIELDS[name]),
            same_as=same_as,
            quotient=quotient,
            optional=check_value(rule.get("optional", False), f"{at} optional", bool),
            values=check_keys(rule.get("values", {}), f"{at} values", rule.get("values", {})),
            model_types=strings(rule.get("model_types", []), f"{at} model_types"),
        )
    return rules
