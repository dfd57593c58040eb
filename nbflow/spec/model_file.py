"""Model files: one released model, or a user's own, as a family and its differences.

`MODEL_KEYS` and `MODEL_TABLES` list the keys.  A family file (`nbflow.spec.family`) can stand for a
model file without differences.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from nbflow.checkpoint.hub import is_repo_name
from nbflow.spec.family import (
    Family,
    check_fields,
    check_tensors,
    config_keys,
    get_family,
    load_family,
)
from nbflow.spec.fields import Field, check_field
from nbflow.spec.from_config import build_spec
from nbflow.spec.model_names import known_models, model_name, unknown_model
from nbflow.spec.model_spec import ModelSpec
from nbflow.utils.toml_schema import check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError

MODEL_KEYS = {
    "name": "name of the model; by default that of the file",
    "description": "one line",
    "family": "path of a family file, or name of one next to this file or of the package",
    "path": "weights, relative to the file; without it the file is used as --spec",
    "hub": "the weights' name on the Hugging Face Hub, ORG/NAME, for nbflow pull",
    "aliases": "further names of a model that comes with the package",
    "tokenizer": "tokenizer file, relative to the file",
    "prompt_template": "name or text of a chat template, for tokenizers without one",
}
"""Keys at the top of a model file."""
MODEL_TABLES = {
    "config": "the published config.json, for weights without one",
    "override": "fields that win over config.json",
    "tensors": "tensor names that differ from the family's",
    "ignored": "tensors = further patterns of tensors that are not weights",
    "defaults": "generation settings that win over generation_config.json",
}
"""Tables of a model file."""
READERS = {".json": "nbflow.compat.inferflow.model_spec_json"}
"""Suffix of a specification in another program's format -> module, imported at first use.

Its function ``load(path)`` returns a `ModelFile`.
"""
GENERATION = {
    "temperature": Field(float, "divisor of the logits", least=0.0),
    "top_k": Field(int, "most probable tokens kept", least=-1),
    "top_p": Field(float, "probability of the tokens kept", least=0.0, most=1.0),
}
"""Generation settings that a model can recommend."""


@dataclass(frozen=True)
class ModelFile:
    """One model file, checked; `MODEL_KEYS` and `MODEL_TABLES` describe the fields."""

    name: str
    description: str
    family: Family
    path: Path | None = None
    hub: str | None = None
    aliases: tuple[str, ...] = ()
    tokenizer: Path | None = None
    """Absolute, or the name of a file in the folder of the weights."""
    prompt_template: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    override: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ignored_tensors: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Entries that have no effect."""

    def build(
        self,
        config: Mapping[str, Any],
        where: str,
        checkpoint_tensors: Collection[str] | None,
        rope_divisors: Mapping[str, Sequence[float]] | None = None,
    ) -> ModelSpec:
        """Return the specification of the model; see `nbflow.spec.from_config.build_spec`."""
        return build_spec(
            self.family,
            config,
            name=self.name,
            where=where,
            override=self.override,
            tensors=self.tensors,
            ignored_tensors=self.ignored_tensors,
            checkpoint_tensors=checkpoint_tensors,
            rope_divisors=rope_divisors,
        )


def find_model_file(spec: str | os.PathLike[str]) -> ModelFile:
    """Read the model file with this path, or the packaged one with this name."""
    path = Path(spec)
    if not path.exists() and not is_spec_path(path):
        name = model_name(str(spec))
        if name is None:
            raise UsageError(f"{unknown_model('spec', str(spec))}; or give the path of a file")
        path = known_models()[name]
    return load_model_file(path)


def is_spec_path(path: Path) -> bool:
    """Return whether a path is called as a specification, and not as weights."""
    return path.suffix in (".toml", *READERS) and not path.name.endswith(".index.json")


def published(model_file: ModelFile) -> ModelSpec:
    """Return the specification of a model file's [config], without weights.

    Parameters
    ----------
    model_file : ModelFile
        As from `find_model_file`.

    Returns
    -------
    ModelSpec
        With the first of several tensor names, and the head of an encoder.

    Raises
    ------
    UsageError
        If [config] and [override] leave a field open.

    Examples
    --------
    >>> from nbflow.spec import find_model_file, published
    >>> published(find_model_file("llama2_7b")).n_parameters
    6738415616
    """
    return model_file.build(model_file.config, f"{model_file.name}: [config]", None)


def load_model_file(path: Path) -> ModelFile:
    """Read and check a model file, or a specification that one of `READERS` reads."""
    if path.suffix in READERS:
        return cast(ModelFile, import_module(READERS[path.suffix]).load(path))
    where = str(path)
    table = read_toml(path)
    if "family" not in table and {"structure", "config", "extends", "model_types"} & set(table):
        family = load_family(path)
        return ModelFile(path.stem, family.description, family)
    check_keys(table, where, (*MODEL_KEYS, *MODEL_TABLES))
    values = {
        word: check_value(table[word], f"{where}: {word}", str)
        for word in MODEL_KEYS
        if word in table and word != "aliases"
    }
    if "family" not in values:
        raise UsageError(f"{where}: family is missing; it must name a family")
    family = _family(path, values["family"])
    ignored = check_keys(table.get("ignored", {}), f"{where}: [ignored]", ("tensors",))
    defaults = check_keys(table.get("defaults", {}), f"{where}: [defaults]", GENERATION)
    return ModelFile(
        name=values.get("name", path.stem),
        description=values.get("description", ""),
        family=family,
        path=_relative_to(path, values.get("path")),
        hub=_hub(values.get("hub"), f"{where}: hub"),
        aliases=strings(table.get("aliases", []), f"{where}: aliases"),
        tokenizer=_relative_to(path, values.get("tokenizer")),
        prompt_template=_template(values.get("prompt_template"), f"{where}: prompt_template"),
        config=check_keys(
            table.get("config", {}), f"{where}: [config]", ("model_type", *config_keys(family))
        ),
        override=check_fields(table.get("override", {}), f"{where}: [override]"),
        tensors=check_tensors(table.get("tensors", {}), f"{where}: [tensors]"),
        ignored_tensors=strings(ignored.get("tensors", []), f"{where}: [ignored] tensors"),
        defaults={
            key: check_field(value, f"{where}: [defaults] {key}", GENERATION[key])
            for key, value in defaults.items()
        },
    )


def _family(path: Path, name: str) -> Family:
    """Return a family by its path relative to the model file, or by its name."""
    if name.endswith(".toml"):
        return load_family(path.parent / name)
    return get_family(name, f"{path}: family", path)


def _hub(stated: str | None, where: str) -> str | None:
    """Return the name of a model of the Hub, checked."""
    if stated is not None and not is_repo_name(stated):
        raise UsageError(f"{where}: must be ORG/NAME, got {stated!r:.80}")
    return stated


def _template(stated: str | None, where: str) -> str | None:
    """Return the template of a model file, checked."""
    if stated is not None:
        from nbflow.tokenization.chat import find_template  # late: most files have none

        find_template(stated, where)
    return stated


def _relative_to(path: Path, relative: str | None) -> Path | None:
    """Return a path of a model file, relative to the file's folder."""
    return None if relative is None else (path.parent / relative).resolve()
