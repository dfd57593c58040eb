"""Explain a family or model file: the source of every field, without weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nbflow.spec.family import ConfigRule, Family, encoder_of
from nbflow.spec.fields import FIELDS, REQUIRED, SIZES, show
from nbflow.spec.formula import names_in
from nbflow.spec.from_config import build_spec
from nbflow.spec.layer_specs import LAYER_KINDS
from nbflow.spec.model_file import ModelFile, load_model_file
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.plugin_ops import OPS
from nbflow_kernels.errors import UsageError

Row = tuple[str, str, str]
"""A field, the source of its value, its meaning."""
OPEN = "must be overridden"
"""Source of a mandatory field that the family leaves open."""


def explain(path: Path) -> tuple[ModelFile, list[Row]]:
    """Check a family or model file and return the source of every field.

    A family file is a model of that family without differences.
    """
    model_file = load_model_file(path)
    family, override = model_file.family, model_file.override
    rows = _rows(family, override)
    _check_plugins(path, family, override.get("attention", family.structure.get("attention")))
    encoder = encoder_of(family)
    if family.model_types or encoder is not None:
        _check_complete(path, family, {name: source for name, source, _ in rows})
    if encoder is not None:
        of_encoder = {name: source for name, source, _ in _rows(encoder, {})}
        _check_complete(encoder.path, encoder, of_encoder)
    return model_file, rows


def _check_plugins(path: Path, family: Family, attention: str | None) -> None:
    """Raise if a file names an op or an attention variant that no plugin has registered."""
    for kind, settings in family.layers.items():
        for op in filter(None, (settings.op, settings.feed_forward_op)):
            if op not in OPS:
                raise UsageError(f"{path}: [layer.{kind}]: {OPS.unknown(op)}")
    if attention is not None:
        from nbflow_kernels.attention.variants import find_variant  # late: most models have none

        find_variant(attention, f"{path}: attention")


def _rows(family: Family, override: Mapping[str, Any]) -> list[Row]:
    """Return the source of every field of a family with some overridden."""
    rows = []
    for name, field in FIELDS.items():
        if name in override:
            source = f"= {show(override[name])}  (override)"
        else:
            source = _source(family, name, field.default)
        rows.append((name, source, field.doc))
    return rows


def _check_complete(path: Path, family: Family, sources: dict[str, str]) -> None:
    """Raise if a family of models or encoders leaves mandatory fields or tensor names open."""
    open_fields = [name for name, source in sources.items() if source == OPEN]
    if open_fields:
        name = open_fields[0]
        raise UsageError(
            f"{path}: {', '.join(open_fields)} {'is' if len(open_fields) == 1 else 'are'} stated "
            f"nowhere; write {name} = ... under [structure] if all members share it, else "
            f'{name} = {{ keys = ["key of config.json"] }} under [config]'
        )
    nameless = _nameless(path, family)
    if nameless:
        raise UsageError(
            f"{path}: [tensors] has no name for {', '.join(nameless)}, which a model of this "
            f'structure needs; write "{nameless[0]}" = "name in the checkpoint"'
        )


def _nameless(path: Path, family: Family) -> list[str]:
    """Return the tensors of every member that the family does not name."""
    numbers: dict[str, Any] = {name: 8 for name in SIZES if FIELDS[name].default is REQUIRED}
    numbers |= {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "norm_eps": 1e-5}
    numbers |= {"activation": "gelu", "embed_scale": 1.0, "position_offset": 0}
    if family.layers.keys() != LAYER_KINDS.keys():  # a layer of each kind
        kinds = family.structure.get("layer_types") or tuple(
            name for name, kind in family.layers.items() if not kind.chunk
        )
        numbers |= {"layer_types": kinds, "n_layers": len(kinds)}
        recurrent = ("conv_", "linear_", "mamba1_", "ssm_")
        sizes = (name for name in family.config if FIELDS[name].kind is int)
        numbers |= {name: 2 for name in sizes if name.startswith(recurrent)}
    encoder = encoder_of(family)

    def spec_of(one: Family) -> ModelSpec:
        alone = dataclasses.replace(one, encoder=None)
        return build_spec(
            alone, {}, name=one.name, where=str(path), override=numbers, checkpoint_tensors=None
        )

    try:
        spec = spec_of(family)
        if encoder is not None:
            spec = dataclasses.replace(spec, encoder=spec_of(encoder))
    except UsageError:  # it also depends on config.json
        return []
    missing: dict[str, None] = {}
    for name in spec.tensor_shapes():
        try:
            spec.tensor_layout(name)
        except KeyError:
            missing[re.sub(r"^layers\.\d+\.", "layers.{i}.", name)] = None
    return list(missing)


def _source(family: Family, name: str, default: Any) -> str:
    if name in family.structure:
        return f"= {show(family.structure[name])}"
    rules = family.config.get(name, ())
    if not rules:
        return OPEN if default is REQUIRED else f"= {show(default)}  (default)"
    return "; else ".join(" or ".join(_ways(rule)) or "none" for rule in rules)


def _ways(rule: ConfigRule) -> Iterator[str]:
    """Yield the sources of a rule's value, in order."""
    when = ", ".join(f"{key} is {show(value)}" for key, value in rule.when.items())
    if rule.stored is not None:
        when = ", ".join(filter(None, (when, f"the checkpoint has {rule.stored}")))
    prefix = f"if {when}: " if when else ""
    if rule.keys:
        yield prefix + "key " + " or ".join(rule.keys)
        prefix = ""
    others = [name for name in names_in(rule.formula or "0") if name not in FIELDS]
    if others:
        prefix += f"with {', '.join(others)} of config.json: "
    for sign, value in (("as ", rule.same_as), ("= ", rule.formula), ("= ", rule.default)):
        if value is not None:
            yield f"{prefix}{sign}{show(value)}"
            prefix = ""
    if rule.optional:
        yield f"{prefix}none"
