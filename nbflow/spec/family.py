"""Family files (`families/*.toml`): an architecture as a choice of known parts.

`FAMILY_KEYS` lists the tables of a file, `ConfigRule` and `OnlyRule` the keys of a rule;
docs/bring_your_own_architecture.md explains both with an example, docs/family_files.md lists all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from nbflow.checkpoint.quantization_config import KEY as QUANTIZATION
from nbflow.spec.fields import FIELDS, LAYER_FIELDS, check_field
from nbflow.spec.formula import FUNCTIONS, check_formula
from nbflow.spec.layer_specs import LAYER_KINDS, LayerKind
from nbflow.spec.plugin_ops import TENSOR_NAME
from nbflow.spec.tensor_names import FUSED, LINEARS, STACKED_NUMBERS, TENSOR_NAMES
from nbflow.utils.safe_repr import shown
from nbflow.utils.toml_schema import check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_specs import FAMILIES

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_LONGEST_NAME = 200  # file systems have 255 bytes
ABSENT = "absent"
"""Value in ``when`` of a key that is null or missing; in ``[absent]`` it takes the base's away."""
ALWAYS = "always"
"""Switch of biases that every member has."""
STORED = "stored"
"""Switch of biases that the checkpoint decides."""
ANY = "any"
"""Value in ``[only]`` that removes the base's rule."""
FAMILY_KEYS = {
    "description": "one line",
    "model_types": "values of model_type that the family serves; none for a mere base",
    "extends": "family whose rules hold where this file says nothing: NAME.toml next to this file, "
    "or of the package",
    "encoder": "family of the encoder in the same checkpoint, found alike; this is the decoder",
    "text_config": "table of config.json whose keys count as those at its top, if it has the table",
    "prefix": "prefix that some checkpoints put before tensor names",
    "prefixes": "prefix of names under [tensors] = others that checkpoints have in its place",
    "structure": "fields that are the same for all members",
    "absent": "key of config.json = value that it has where config.json has no such key",
    "config": "field = rule for config.json, or a list of rules of which the first value counts",
    "layer": "NAME = kind of layer that layer_types names: mixer, feed_forward, op, "
    "feed_forward_op, window, norm_place",
    "biases": "switch of config.json, always or stored = matrices with a bias",
    "only": "key of config.json = supported values, or { values, when }",
    "tensors": "our tensor name = the checkpoint's, or several of which the first present counts",
    "ignored": "tensors = shell patterns of checkpoint tensors that are not weights",
}
"""Parts of a family file."""


@dataclass(frozen=True)
class ConfigRule:
    """Source of a field in config.json."""

    keys: tuple[str, ...] = ()
    """Keys, of which the first present one counts; a dot enters a table, ``{arch}`` stands for a
    GGUF file's architecture."""
    default: Any = None
    """Value without a key; with `kinds`, n for every n-th layer."""
    same_as: str | None = None
    """Field above to copy without a key."""
    formula: str | None = None
    """Arithmetic on fields above and keys, without a key (`nbflow.spec.formula`)."""
    optional: bool = False
    """The field may have no value."""
    values: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's word -> ours, true, false and numbers as words; empty: unchanged."""
    when: dict[str, Any] = field(default_factory=dict)
    """Required values of keys (`ABSENT`: none); else the rule does not apply."""
    stored: str | None = None
    """Tensor that the checkpoint must have; else the rule does not apply."""
    where: str | None = None
    """Word of the layers in a list of layers, for a key with a word or letter for each layer."""
    has: dict[str, str] = field(default_factory=dict)
    """Word -> tensor of a layer, ``{i}``: the word of each layer is the first whose tensor the
    checkpoint has; for layer_types, or with `where`."""
    largest: bool = False
    """Take the largest number of a key that has one for each layer."""
    count: bool = False
    """Number of layers: the length of a key that has an entry or letter for each layer."""
    kinds: tuple[str, ...] = ()
    """Kinds of layers for layer_types, where a key holds numbers of layers, or n for every n-th
    layer: the kind of these, then the kind of the others."""
    from_one: bool = False
    """The numbers of layers for `kinds` count from 1."""
    offset: str | None = None
    """Key of the first of every n layers, for `kinds`; n - 1 without it."""


@dataclass(frozen=True)
class OnlyRule:
    """Supported values of a key that changes the computation."""

    values: tuple[Any, ...] = ()
    """Supported values; null is always supported."""
    when: dict[str, Any] = field(default_factory=dict)
    """Values of other keys without which the key has no effect."""


@dataclass(frozen=True)
class Family:
    """One family file, merged with those that it extends."""

    name: str
    """Name of the file without suffix."""
    description: str
    model_types: tuple[str, ...]
    """Values of ``model_type``."""
    path: Path
    """The file, next to which `encoder` is looked for."""
    encoder: str | None
    """Name of the encoder's family; see `encoder_of`."""
    prefix: str
    """Optional prefix of tensor names."""
    text_config: str
    """Table of config.json with the keys of the text model; empty for none."""
    prefixes: dict[str, tuple[str, ...]]
    """Prefix of tensor names -> others in its place."""
    structure: dict[str, Any]
    """Fields of all members."""
    absent: dict[str, Any]
    """Key of config.json -> value where it is not stated; null is stated."""
    config: dict[str, tuple[ConfigRule, ...]]
    """Field -> its rules, in order."""
    layers: dict[str, LayerKind]
    """Kinds of layers by the names that layer_types uses."""
    biases: dict[str, tuple[str, ...]]
    """Switch -> matrices with a bias."""
    only: dict[str, OnlyRule]
    """Key of config.json -> supported values."""
    tensors: dict[str, tuple[str, ...]]
    """Our tensor name -> names in checkpoints."""
    ignored_tensors: tuple[str, ...]
    """Patterns of checkpoint tensors that are not weights."""


@cache
def _files() -> dict[str, Path]:
    """Return the file of every family by name."""
    return {path.stem: path for path in sorted(FAMILIES.glob("*.toml"))}


@cache
def _served() -> dict[str, str]:
    """Return the name of the family of each ``model_type``; it is not inherited."""
    return {
        kind: name for name, path in _files().items() for kind in _read(path).get("model_types", [])
    }


@lru_cache(64)
def _server_of(model_type: str) -> str | None:
    """Return the name of the family of a ``model_type``, None if there is none.

    Parses the file that lists it; parsing all takes 50 ms.
    """
    word = re.escape(model_type.encode("utf-8", "surrogatepass"))
    listed = re.compile(rb'^model_types *=[^\]]*"%b"' % word, re.MULTILINE)
    for name, path in _files().items():
        if listed.search(path.read_bytes()) and model_type in _read(path).get("model_types", []):
            return name
    return _served().get(model_type)


@cache
def _read(path: Path) -> dict[str, Any]:
    return read_toml(path)


@cache
def _loaded(path: Path) -> Family:
    return load_family(path)


def families() -> dict[str, Family]:
    """Return every family by name.  Loads all of them, which a process seldom needs."""
    return {name: _loaded(path) for name, path in _files().items()}


def get_family(name: str, where: str, beside: Path | None = None) -> Family:
    """Return a family by its name; that of a file next to `beside` wins over the package's."""
    path = _find(name, where, beside)
    return _loaded(path) if path.parent == FAMILIES else load_family(path)


def encoder_of(family: Family) -> Family | None:
    """Return the family of the encoder, or None for a family without one."""
    if family.encoder is None:
        return None
    where = f"{family.path}: encoder"
    found = get_family(family.encoder, where, family.path)
    if found.encoder is not None:
        raise UsageError(f"{where}: {found.path} has an encoder, too; name an encoder without one")
    return found


def _find(name: str, where: str, beside: Path | None) -> Path:
    """Return the file of a family: NAME.toml next to a file but not itself, or the package's."""
    own: list[Path] = []
    if len(name) > _LONGEST_NAME:
        raise UsageError(f"{where} must be the name of a family, got {shown(name)}")
    if beside is not None and beside.parent != FAMILIES:
        given = Path(name)
        own = [beside.parent / (given if given.suffix == ".toml" else f"{name}.toml")]
        if own[0].is_file() and not own[0].samefile(beside) and "family" not in read_toml(own[0]):
            return own[0].resolve()
    if name in _files():
        return _files()[name]
    looked = f"; {own[0]} is not another family file" if own else ""
    if name.endswith(".toml"):  # a file: a list of families would not help
        raise UsageError(
            f"{where} must be the name of a family, or of a file beside this one{looked}"
        )
    raise UsageError(f"{where}: {unknown_name('family', name, _files())}{looked}")


def family_of(model_type: Any, where: str) -> Family:
    """Return the family of a ``model_type``."""
    name = _server_of(model_type) if isinstance(model_type, str) else None
    if name is None:
        of_gguf = str(model_type).startswith("gguf-")
        available = [kind for kind in _served() if kind.startswith("gguf-") == of_gguf]
        raise UsageError(
            f"{where}: {unknown_name('model_type', model_type, available)}; a file for --spec says "
            'how to read another one, most shortly with extends = "FAMILY" '
            "(docs/bring_your_own_architecture.md)"
        )
    return get_family(name, where)


def family_of_config(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json.

    That of an unknown multimodal model is the family of its text model, which ``text_config``
    describes.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    is_known = isinstance(kind, str) and _server_of(kind) is not None
    in_text = not is_known and isinstance(inner, str) and _server_of(inner) is not None
    return family_of(inner if in_text else kind, where)


def load_family(path: Path) -> Family:
    """Read and check a family file and those that it extends."""
    return check_family(read_toml(path), path)


def check_family(content: dict[str, Any], path: Path) -> Family:
    """Check the content of a family file and return the family, merged with what it extends."""
    table = _extended(content, path, (path.resolve(),))
    config = _rules(table["config"], f"{path}: [config]")
    biases, encoder = table["biases"], table.get("encoder")
    return Family(
        name=path.stem,
        description=check_value(
            table.get("description", ""), f"{path}: description (one line)", str
        ),
        model_types=strings(table.get("model_types", []), f"{path}: model_types"),
        path=path,
        encoder=None if encoder is None else check_value(encoder, f"{path}: encoder", str),
        prefix=check_value(table.get("prefix", ""), f"{path}: prefix", str),
        text_config=check_value(table.get("text_config", ""), f"{path}: text_config", str),
        prefixes={
            prefix: strings(others, f"{path}: [prefixes] {prefix}")
            for prefix, others in table["prefixes"].items()
        },
        structure=check_fields(table["structure"], f"{path}: [structure]"),
        absent={key: value for key, value in table["absent"].items() if value != ABSENT},
        config=config,
        layers=LAYER_KINDS | _layer_kinds(table["layer"], f"{path}: [layer"),
        biases={key: _biased(names, f"{path}: [biases] {key}") for key, names in biases.items()},
        only=_only(table["only"], path),
        tensors={
            name: theirs
            for name, theirs in check_tensors(table["tensors"], f"{path}: [tensors]").items()
            if theirs
        },
        ignored_tensors=strings(table["ignored"].get("tensors", []), f"{path}: [ignored] tensors"),
    )


def _extended(table: dict[str, Any], path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return the table of a file, merged over that of the family it extends.

    `seen` are the file and those that extend it.
    """
    for key in set(table) & set(FIELDS):
        raise UsageError(
            f"{path}: {key} is a field; it stands under [structure], or under [config] with the "
            "key of config.json that says it"
        )
    check_keys(table, str(path), FAMILY_KEYS)
    tables = (
        "prefixes", "structure", "absent", "config", "layer", "biases", "only", "tensors",
        "ignored",
    )  # fmt: skip
    for part in tables:
        allowed = ("tensors",) if part == "ignored" else table.get(part, {})
        check_keys(table.setdefault(part, {}), f"{path}: [{part}]", allowed)
    for key in table["structure"]:
        if key in table["config"]:
            raise UsageError(
                f"{path}: {key} stands in [structure] and in [config]; leave one of them"
            )
    if "extends" not in table:
        return table
    base = check_value(table["extends"], f"{path}: extends", str)
    found = _find(base, f"{path}: extends", path)
    if found in seen:
        raise UsageError(f"{path}: extends: {base} extends this file; name another family")
    below = _extended(read_toml(found), found, (*seen, found))
    merged = {part: {**below[part], **table[part]} for part in tables}
    base_ignored, ignored = (part["ignored"].get("tensors", []) for part in (below, table))
    if isinstance(ignored, list):  # else refused by `check_family`
        merged["ignored"] = {"tensors": [*base_ignored, *ignored]}
    # a field in one of these tables replaces the base's entry in the other
    for part, other in (("structure", "config"), ("config", "structure")):
        merged[part] = {k: v for k, v in merged[part].items() if k not in table[other]}
    # in the base's order, so that a rule may refer to the fields above it
    inherited = {key: below.get(key, "") for key in ("prefix", "text_config")}
    return {**inherited, **table, **merged}


def config_keys(family: Family) -> list[str]:
    """Return the top-level keys of config.json that a family and its encoder read."""
    names = [*family.biases, *family.only, *family.absent, QUANTIZATION]
    for only in family.only.values():
        names += only.when
    for rules in family.config.values():
        for rule in rules:
            names += [*rule.keys, *rule.when, *_NAME.findall(rule.formula or "")]
            names += [rule.offset] if rule.offset else []
    encoder = encoder_of(family)
    if encoder is not None:
        names += config_keys(encoder)
    return sorted({name.split(".")[0] for name in names} - {ALWAYS, STORED, *FUNCTIONS})


def check_fields(table: Any, where: str) -> dict[str, Any]:
    """Return a table of our fields with checked values."""
    check_keys(table, where, FIELDS)
    return {
        name: check_field(value, f"{where} {name}", FIELDS[name]) for name, value in table.items()
    }


def check_tensors(table: Any, where: str) -> dict[str, tuple[str, ...]]:
    """Return a table of tensor names, both sides checked."""
    check_keys({n: v for n, v in table.items() if not _is_of_plugin(n)}, where, TENSOR_NAMES)
    checked = {}
    for name, theirs in table.items():
        if not isinstance(theirs, list):
            theirs = [check_value(theirs, f"{where} {name}", str)]
        checked[name] = names = tuple(t for t in strings(theirs, f"{where} {name}") if t)
        for one in names:
            of_all_layers = name in STACKED_NUMBERS and "{i}" not in one
            if one.count("{i}") != name.count("{i}") and not of_all_layers:
                raise UsageError(
                    f"{where} {name}: must contain {{i}} {name.count('{i}')} times, got {one!r}"
                )
            if one.count("{j}") > name.count("{j}"):
                raise UsageError(f"{where} {name}: {{j}} is for experts and heads, got {one!r}")
    return checked


def _is_of_plugin(name: str) -> bool:
    """Return whether a name is that of a tensor of a plugin's op."""
    return TENSOR_NAME.fullmatch(name) is not None


def _layer_kinds(table: dict[str, Any], where: str) -> dict[str, LayerKind]:
    """Return the kinds of layers of the tables [layer.NAME]."""
    kinds = {}
    for name, settings in table.items():
        at = f"{where}.{name:.80}]"
        check_keys(settings, at, LAYER_FIELDS, 'mixer = "attention"')
        checked = {
            key: check_field(value, f"{at} {key}", LAYER_FIELDS[key])
            for key, value in settings.items()
        }
        for op, other, nothing in (
            ("op", "mixer", "none"),
            ("feed_forward_op", "feed_forward", False),
        ):
            if checked.get(op) is None:
                continue
            if other in checked:
                raise UsageError(f"{at}: {op} stands in the place of {other}; leave {other} out")
            checked[other] = check_field(nothing, f"{at} {other}", LAYER_FIELDS[other])
        kinds[name] = LayerKind(**checked)
    return kinds


def _only(table: dict[str, Any], path: Path) -> dict[str, OnlyRule]:
    rules = {}
    for key, stated in table.items():
        where = f"{path}: [only] {key}"
        if stated == ANY:
            continue
        rule = stated if isinstance(stated, dict) else {"values": stated}
        check_keys(rule, where, OnlyRule.__dataclass_fields__)
        values, when = rule.get("values"), rule.get("when", {})
        if not isinstance(values, list):
            raise UsageError(
                f'{where} must be a list of values, or {{ values, when }}, or "any" to take away '
                f"what the base says, got {stated!r:.80}"
            )
        rules[key] = OnlyRule(tuple(values), check_keys(when, f"{where} when", when))
    return rules


def _biased(value: Any, where: str) -> tuple[str, ...]:
    for name in strings(value, where, "attn.q"):
        if name in FUSED:
            raise UsageError(f"{where}: name the parts of {name}: {', '.join(FUSED[name])}")
        check_value(name, where, LINEARS)
    return tuple(value)


def _rules(table: dict[str, Any], where: str) -> dict[str, tuple[ConfigRule, ...]]:
    checked: dict[str, tuple[ConfigRule, ...]] = {}
    for name, rules in check_keys(table, where, FIELDS).items():
        each = rules if isinstance(rules, list) else [rules]
        checked[name] = tuple(_rule(rule, name, f"{where} {name}", checked) for rule in each)
    return checked


def _rule(rule: Any, name: str, at: str, above: dict[str, Any]) -> ConfigRule:
    example = rule if isinstance(rule, str) else "key of config.json"
    check_keys(rule, at, ConfigRule.__dataclass_fields__, f'keys = ["{example:.40}"]')
    kinds = strings(rule.get("kinds", []), f"{at} kinds")
    has, values, when = (
        check_keys(rule.get(key, {}), f"{at} {key}", rule.get(key, {}))
        for key in ("has", "values", "when")
    )
    _check_rule(rule, name, at, above, kinds)
    default, formula = rule.get("default"), rule.get("formula")
    if default is not None and not kinds:
        default = check_field(default, at, FIELDS[name])
    texts = {key: rule[key] for key in ("stored", "where", "offset") if rule.get(key) is not None}
    switches = {key: rule.get(key, False) for key in ("optional", "largest", "count", "from_one")}
    return ConfigRule(
        keys=strings(rule.get("keys", []), f"{at} keys"),
        default=default,
        same_as=rule.get("same_as"),
        formula=None if formula is None else check_formula(formula, f"{at} formula"),
        values={w: check_field(value, f"{at} values", FIELDS[name]) for w, value in values.items()},
        when=when,
        has={word: check_value(tensor, f"{at} has {word}", str) for word, tensor in has.items()},
        kinds=kinds,
        **{key: check_value(text, f"{at} {key}", str) for key, text in texts.items()},
        **{key: check_value(switch, f"{at} {key}", bool) for key, switch in switches.items()},
    )


def _check_rule(
    rule: Mapping[str, Any], name: str, at: str, above: dict[str, Any], kinds: Sequence[str]
) -> None:
    """Raise if keys of a rule do not go with its field or with each other."""
    same_as, default = rule.get("same_as"), rule.get("default")
    if rule.get("where") is not None and FIELDS[name].kind != [int]:
        raise UsageError(f"{at}: where goes with lists of layers, such as dense_layers")
    if rule.get("has") and name != "layer_types" and rule.get("where") is None:
        raise UsageError(f"{at}: has gives the words of layer_types, or of a list with where")
    if rule.get("largest") and FIELDS[name].kind not in (int, float):
        raise UsageError(f"{at}: largest goes with numbers, such as n_kv_heads")
    if same_as is not None and (not isinstance(same_as, str) or same_as not in above):
        raise UsageError(f"{at}: {same_as!r} must be a field listed above it")
    if rule.get("count") and name != "n_layers":
        raise UsageError(f"{at}: count goes with n_layers")
    if kinds and (
        name != "layer_types" or len(kinds) != 2 or type(default) not in (int, type(None))
    ):
        raise UsageError(
            f"{at}: kinds are the two kinds of layer_types, of the layers that the key says and of "
            f"the others, and a default is n for every n-th layer; got {list(kinds)!r:.80}"
        )
