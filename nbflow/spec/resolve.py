"""From what a user calls a model to its specification and files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.hub import find_cached, is_repo_name, repo_of
from nbflow.spec.family import Family, family_of
from nbflow.spec.fields import DIVISORS, check_field
from nbflow.spec.from_config import build_spec
from nbflow.spec.model_file import (
    GENERATION,
    ModelFile,
    find_model_file,
    known_models,
    load_model_file,
)
from nbflow.spec.model_spec import ModelSpec
from nbflow.tokenization import Tokenizer, load_tokenizer_file
from nbflow.tokenization.find_files import NAMES, find_tokenizer, tokenizer_of_weights
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError, unknown_name

MAX_DIVISORS = 4096


@dataclass(frozen=True)
class ResolvedModel:
    """A model and where its parts are."""

    spec: ModelSpec
    """What it is made of."""
    path: Path
    """Its weights: a folder or a file for `nbflow.checkpoint.open_weights`."""
    tokenizer: Path | None
    """Its tokenizer file, or None if there is none beside the weights."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Generation settings it recommends, e.g. ``temperature``."""
    prompt_template: str | None = None
    """Template of its model file, for a tokenizer that brings none."""


def resolve(
    model: str | os.PathLike[str], *, spec: str | os.PathLike[str] | None = None
) -> ResolvedModel:
    """Find a model's weights and tokenizer, and work out its specification.

    Only headers and configuration files are read.

    Parameters
    ----------
    model : str or path
        A Hugging Face folder, a ``.safetensors`` file or torch checkpoint with config.json beside
        it, a ``.gguf``, a llama2.c ``.bin``, a model file (``.toml``) with a ``path``, or the name
        of a model that comes with the package.  An existing path wins over a name.
    spec : str or path, optional
        A model file (``.toml``) that names the family and what differs from the checkpoint's own
        configuration, or the name of one that comes with the package.  What a GGUF or another file
        with a header says about itself stands against a name: then only the template and the
        settings count.

    Returns
    -------
    ResolvedModel
        Specification, path of the weights, tokenizer, recommended settings.

    Raises
    ------
    UsageError
        If there is no such model, its architecture is unknown, its configuration lacks a number, or
        asks for a computation that cannot be run.

    See Also
    --------
    nbflow.spec.check_tensors : Compare the specification with the tensors in the file.

    Examples
    --------
    >>> from nbflow.spec import resolve
    >>> resolve("tiny_pyton")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nbflow_kernels.errors.UsageError: unknown model 'tiny_pyton'; did you mean 'tiny_python' or ...
    """
    named, path = _find(model)
    model_file = named if spec is None else find_model_file(spec)
    with open_weights(path) as weights:
        config = weights.config() or {}
        folder = path if path.is_dir() else path.parent
        where = _config_name(weights, folder)
        generation: dict[str, Any] = {}
        structure = model_file
        if weights.format in ("safetensors", "pickle"):
            generation = read_object(folder / "generation_config.json", missing_ok=True) or {}
        elif spec is not None and str(spec) in known_models() and not Path(spec).exists():
            structure = None  # the header says what is in the file
        if model_file and structure and not config:
            config, where = model_file.config, f"{model_file.name}: [config]"
        resolved = _build(structure, weights, _with_ids(config, generation), where)
    tokenizer = model_file.tokenizer if model_file else None
    if tokenizer is None:
        tokenizer = tokenizer_of_weights(path, weights.format, resolved.vocab_size, config)
    elif not tokenizer.is_file():
        raise UsageError(f"{tokenizer}: the model file names this tokenizer, which does not exist")
    defaults = _defaults(generation, str(folder / "generation_config.json"))
    if model_file:
        defaults |= model_file.defaults
    template = model_file.prompt_template if model_file else None
    return ResolvedModel(resolved, path, tokenizer, defaults, template)


def load_tokenizer(model: str | os.PathLike[str], kind: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model, or a tokenizer file.

    Parameters
    ----------
    model : str or path
        A tokenizer file (``tokenizer.json``, ``tokenizer.model``, ``vocab.json``, ``vocab.txt``,
        llama2.c ``tokenizer.bin``, a ``.gguf``), a folder that holds one, or a model as for
        `resolve`.
    kind : {"hf", "sentencepiece", "bpe", "wordpiece", "gguf", "llama2c"}, optional
        The kind of the tokenizer file; by default its name and content decide.

    Returns
    -------
    Tokenizer
        With ``encode``, ``decode``, ``decode_stream``, ``vocab_size``, ``bos_id``, ``eos_ids``.

    Raises
    ------
    UsageError
        If there is no such model, no tokenizer beside it, or the file is damaged.
    MissingExtraError
        If the kind needs a package that is not installed.

    See Also
    --------
    nbflow.tokenization.chat.encode_chat : The ids of a conversation.

    Examples
    --------
    >>> import nbflow
    >>> tokenizer = nbflow.load_tokenizer("tiny_python")
    >>> tokenizer.decode(tokenizer.encode("def f(x):"))
    'def f(x):'
    """
    path, template = find_tokenizer(Path(model), kind), None
    if path is None:
        resolved = resolve(model)
        path, template = resolved.tokenizer, resolved.prompt_template
        if path is None:
            raise UsageError(
                f"{resolved.path}: no tokenizer file next to the weights; expected one of "
                f"{', '.join(NAMES)}, or tokenizer.bin for llama2.c; name the tokenizer file itself"
            )
    tokenizer = load_tokenizer_file(path, kind)
    tokenizer.prompt_template = template
    return tokenizer


def _find(model: str | os.PathLike[str]) -> tuple[ModelFile | None, Path]:
    """Return the model file that was meant, if any, and the weights."""
    path = Path(model)
    if path.suffix == ".toml" and path.is_file():
        toml = path
    elif path.exists():
        return None, path
    else:
        names = known_models()
        if str(model) not in names and is_repo_name(str(model)):
            return None, _downloaded(str(model))
        if str(model) not in names:
            names = {name: file for name, file in names.items() if load_model_file(file).path}
            raise UsageError(
                f"{unknown_name('model', str(model), names)}; or give the path of a folder or a "
                "weight file that exists"
            )
        toml = names[str(model)]
    named = load_model_file(toml)
    if named.path is None:
        raise UsageError(
            f"{toml}: has no path to weights; name the weights as the model, and {model} as --spec"
        )
    if not named.path.exists():
        raise UsageError(f"{toml}: path does not exist: {named.path}")
    return named, named.path


def _downloaded(repo: str) -> Path:
    """Return a model of the Hub that lies in its cache."""
    path = find_cached(repo)
    if path is None:
        raise UsageError(
            f"there is no file or folder {repo!r}, and no model of the Hub with that name has been "
            f"downloaded; 'nbflow pull {repo}' downloads one"
        )
    return path


def _config_name(weights: WeightFile, folder: Path) -> str:
    """Return where the configuration comes from, for messages."""
    beside = weights.format in ("safetensors", "pickle")
    return str(folder / "config.json" if beside else weights.path)


def _with_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the special ids of generation_config.json, which win."""
    keys = ("bos_token_id", "eos_token_id")
    return {**config, **{key: generation[key] for key in keys if generation.get(key) is not None}}


def _build(
    model_file: ModelFile | None, weights: WeightFile, config: dict[str, Any], where: str
) -> ModelSpec:
    """Choose the family and build the specification."""
    checkpoint_tensors = set(weights.names())
    if model_file is not None:
        family = model_file.family
        return build_spec(
            family,
            config,
            name=model_file.name,
            where=where,
            override=model_file.override,
            tensors=model_file.tensors,
            ignored_tensors=model_file.ignored_tensors,
            checkpoint_tensors=checkpoint_tensors,
            rope_divisors=_rope_divisors(family, weights),
        )
    if not config:
        raise UsageError(f"{where}: not found; the weights alone do not say what model they are")
    family = family_of(config.get("model_type"), where)
    name = _name(weights.path)
    return build_spec(
        family,
        config,
        name=name,
        where=where,
        checkpoint_tensors=checkpoint_tensors,
        rope_divisors=_rope_divisors(family, weights),
    )


def _rope_divisors(family: Family, weights: WeightFile) -> dict[str, list[float]]:
    """Return the divisors of the rotary frequencies that a checkpoint stores as tensors."""
    divisors: dict[str, list[float]] = {}
    present = set(weights.names())
    for ours in DIVISORS:
        name = next((n for n in family.tensors.get(ours, ()) if n in present), None)
        if name is None:
            continue
        shape = weights.shape(name)
        if len(shape) != 1 or shape[0] > MAX_DIVISORS:
            raise UsageError(
                f"{weights.path}: tensor {name!r} must have one dimension of at most "
                f"{MAX_DIVISORS} numbers, got shape {shape}"
            )
        divisors[ours] = [float(x) for x in weights.array(name)]
    return divisors


def _name(path: Path) -> str:
    """Return what to call a model that has no model file."""
    path = Path(os.path.abspath(path))  # links of the Hub's cache are not followed
    repo = repo_of(path)
    if repo is not None and path.suffix != ".gguf":
        return repo.split("/")[1]
    if not path.is_dir() and path.name.startswith(("model.safetensors", "pytorch_model")):
        path = path.parent
    return path.name if path.is_dir() else path.stem


def _defaults(generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the generation settings that we know, checked."""
    return {
        key: check_field(generation[key], f"{where}: {key}", field)
        for key, field in GENERATION.items()
        if generation.get(key) is not None
    }
