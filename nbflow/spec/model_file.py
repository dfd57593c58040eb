"""Model files: one released model, or a user's own, as a family and what differs.

``name``, ``description``
    What the model is called (default: the file's name), one line about it.
``family``
    Name of the family, or the path of a family file, relative to the file; required.
``path``, ``tokenizer``
    Weights and tokenizer, relative to the file.  A file without ``path`` says how to read a
    checkpoint that is named beside it (``--spec FILE``).
``prompt_template``
    How a conversation becomes a prompt if the tokenizer brings no template of its own: a name of
    `nbflow.tokenization.chat.named_templates`, or the text of a template.
``[config]``
    The config.json that the model was published with, as far as it matters.  It stands in for one
    that does not lie beside the weights, and says how large the model is without any.
``[override]``
    Our fields, as in `nbflow.spec.family.FIELDS`; they win over config.json.
``[tensors]``, ``[ignored]``
    Names that differ from the family's; further patterns to ignore.
``[defaults]``
    Generation settings (`GENERATION`); they win over generation_config.json.

A family file (`nbflow.spec.family`) can stand for a model file: a model of that family with nothing
else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from nbflow.spec.model_spec import ModelSpec
from nbflow.utils.toml_schema import check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError, unknown_name
from nbflow_specs import MODELS

WORDS = {
    "name": "what the model is called; by default as the file",
    "description": "one line",
    "family": "name of the family, or path of a family file",
    "path": "weights, relative to the file",
    "tokenizer": "tokenizer file, relative to the file",
    "prompt_template": "name or text of a template, for tokenizers without one",
}
"""Keys at the top of a model file."""

TABLES = ("config", "override", "tensors", "ignored", "defaults")
"""Tables of a model file."""

GENERATION = {
    "temperature": Field(float, "divisor of the logits", least=0.0),
    "top_k": Field(int, "most probable tokens kept", least=-1),
    "top_p": Field(float, "probability of the tokens kept", least=0.0, most=1.0),
}
"""Generation settings a model can recommend: what strategies start from."""


@dataclass(frozen=True)
class ModelFile:
    """One model file, checked; see the module's docstring for its parts."""

    name: str
    """What the model is called."""
    description: str
    """One line."""
    family: Family
    """The family."""
    path: Path | None
    """Weights, or None if they are named elsewhere."""
    tokenizer: Path | None
    """Tokenizer file, or None to look beside the weights."""
    prompt_template: str | None
    """Template for tokenizers that bring none."""
    config: dict[str, Any]
    """Published config.json, for weights without one."""
    override: dict[str, Any]
    """Our fields that win over config.json."""
    tensors: dict[str, tuple[str, ...]]
    """Tensor names that differ from the family's."""
    ignored_tensors: tuple[str, ...]
    """Patterns besides the family's."""
    defaults: dict[str, Any]
    """Recommended generation settings."""


def known_models() -> dict[str, Path]:
    """Return the models that come with the package: name -> model file."""
    return {path.stem: path for path in sorted(MODELS.glob("*.toml"))}


def find_model_file(spec: str | os.PathLike[str]) -> ModelFile:
    """Read the model file with this path, or the packaged one with this name."""
    path, names = Path(spec), known_models()
    if not path.exists() and path.suffix != ".toml":
        if str(spec) not in names:
            raise UsageError(
                f"{unknown_name('spec', str(spec), names)}; or give the path of a file"
            )
        path = names[str(spec)]
    return load_model_file(path)


def published(model_file: ModelFile) -> ModelSpec:
    """Return the specification that a model file's [config] gives without any weights.

    Parameters
    ----------
    model_file : ModelFile
        As from `find_model_file`.

    Returns
    -------
    ModelSpec
        Where a family knows several names of a tensor, the first; the head of an encoder is
        taken to be there.

    Raises
    ------
    UsageError
        If [config] and [override] do not say all there is to say.

    Examples
    --------
    >>> from nbflow.spec import find_model_file, published
    >>> published(find_model_file("llama2_7b")).n_parameters
    6738415616
    """
    return build_spec(
        model_file.family,
        model_file.config,
        name=model_file.name,
        where=f"{model_file.name}: [config]",
        override=model_file.override,
        tensors=model_file.tensors,
        ignored_tensors=model_file.ignored_tensors,
        checkpoint_tensors=None,
    )


def load_model_file(path: Path) -> ModelFile:
    """Read one model file and check all of it."""
    where = str(path)
    table = read_toml(path)
    if "family" not in table and {"structure", "config", "extends", "model_types"} & set(table):
        family = load_family(path)
        return ModelFile(
            path.stem, family.description, family, None, None, None, {}, {}, {}, (), {}
        )
    check_keys(table, where, (*WORDS, *TABLES))
    values = {
        word: check_value(table[word], f"{where}: {word}", str) for word in WORDS if word in table
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
        path=_beside(path, values.get("path")),
        tokenizer=_beside(path, values.get("tokenizer")),
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
    """Return a family by its name, or from a file seen from the folder of the model file."""
    if name.endswith(".toml"):
        return load_family(path.parent / name)
    return get_family(name, f"{path}: family")


def _template(stated: str | None, where: str) -> str | None:
    """Return a template that a model file states, checked."""
    if stated is not None:
        from nbflow.tokenization.chat import find_template  # late: most files have none

        find_template(stated, where)
    return stated


def _beside(path: Path, relative: str | None) -> Path | None:
    """Return a path that a model file states, seen from the file's folder."""
    return None if relative is None else (path.parent / relative).resolve()
