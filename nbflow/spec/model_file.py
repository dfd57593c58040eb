"""Model files: one released model, or a user's own, as a family and what differs.

``name``, ``description``
    What the model is called (default: the file's name), one line about it.
``family``
    Name of the family, or the path of a family file, relative to the file; required.
``path``, ``tokenizer``
    Weights and tokenizer, relative to the file.  A file without ``path`` says how to read a
    checkpoint that is named beside it (``--spec FILE``).
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

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbflow.spec.family import Family, check_fields, check_tensors, get_family, load_family
from nbflow.spec.toml_schema import Kind, check_keys, check_value, read_toml, strings
from nbflow_kernels.errors import UsageError

MODELS = Path(__file__).parent / "models"

WORDS = {
    "name": "what the model is called; by default as the file",
    "description": "one line",
    "family": "name of the family, or path of a family file",
    "path": "weights, relative to the file",
    "tokenizer": "tokenizer file, relative to the file",
}
"""Keys at the top of a model file."""

GENERATION: dict[str, Kind] = {"temperature": float, "top_k": int, "top_p": float}
"""Generation settings a model can recommend, and their types: what strategies start from."""


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


def load_model_file(path: Path) -> ModelFile:
    """Read one model file and check all of it."""
    where = str(path)
    table = read_toml(path)
    if "family" not in table and {"structure", "config", "extends", "model_types"} & set(table):
        family = load_family(path)
        return ModelFile(path.stem, family.description, family, None, None, {}, {}, (), {})
    check_keys(table, where, (*WORDS, "override", "tensors", "ignored", "defaults"))
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
        override=check_fields(table.get("override", {}), f"{where}: [override]"),
        tensors=check_tensors(table.get("tensors", {}), f"{where}: [tensors]"),
        ignored_tensors=strings(ignored.get("tensors", []), f"{where}: [ignored] tensors"),
        defaults={
            key: check_value(value, f"{where}: [defaults] {key}", GENERATION[key])
            for key, value in defaults.items()
        },
    )


def _family(path: Path, name: str) -> Family:
    """Return a family by its name, or from a file seen from the folder of the model file."""
    if name.endswith(".toml"):
        return load_family(path.parent / name)
    return get_family(name, f"{path}: family")


def _beside(path: Path, relative: str | None) -> Path | None:
    """Return a path that a model file states, seen from the file's folder."""
    return None if relative is None else (path.parent / relative).resolve()
