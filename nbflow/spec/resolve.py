"""Resolve the name or path of a model to its specification and files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbflow.checkpoint import WeightFile, open_weights
from nbflow.checkpoint.hub import find_cached, is_repo_name, repo_of
from nbflow.checkpoint.shards import SUFFIXES, refuse_adapter
from nbflow.spec.family import Family, family_of_config
from nbflow.spec.fields import check_field
from nbflow.spec.model_file import (
    GENERATION,
    READERS,
    ModelFile,
    find_model_file,
    is_spec_path,
    load_model_file,
)
from nbflow.spec.model_names import known_models, model_name, unknown_model
from nbflow.spec.model_spec import ModelSpec
from nbflow.spec.tensor_names import DIVISORS
from nbflow.tokenization import Tokenizer, load_tokenizer_file
from nbflow.tokenization.find_files import NAMES, find_tokenizer, tokenizer_of_weights
from nbflow.utils.json_file import read_object
from nbflow_kernels.errors import UsageError

MAX_DIVISORS = 4096


@dataclass(frozen=True)
class ResolvedModel:
    """Specification and files of a model."""

    spec: ModelSpec
    path: Path
    """Weights: a folder or file for `nbflow.checkpoint.open_weights`."""
    tokenizer: Path | None
    """Tokenizer file, or None."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Recommended generation settings, e.g. ``temperature``."""
    prompt_template: str | None = None
    """Chat template of the model file, for a tokenizer without one."""


def resolve(
    model: str | os.PathLike[str], *, spec: str | os.PathLike[str] | None = None
) -> ResolvedModel:
    """Find a model's weights and tokenizer, and work out its specification.

    Only headers and configuration files are read.

    Parameters
    ----------
    model : str or path
        A Hugging Face folder, a ``.safetensors`` file or torch checkpoint with config.json in its
        folder, a ``.gguf``, a llama2.c ``.bin``, a model file (``.toml``) with a ``path``, or the
        name of a model that comes with the package, or has a specification there and has been
        downloaded.  An existing path wins over a name.
    spec : str or path, optional
        A model file (``.toml``) with the family and the differences from the checkpoint's own
        configuration, the name of one that comes with the package, or a model_spec.json of
        Inferflow.  The header of a GGUF or
        another file wins over a name, of which only the template and the settings are used.

    Returns
    -------
    ResolvedModel
        Specification, path of the weights, tokenizer, recommended settings.

    Raises
    ------
    UsageError
        If the model does not exist, its architecture is unknown, or its configuration lacks a
        number or requires an unsupported computation.

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
    for note in () if model_file is None else model_file.notes:
        warnings.warn(f"{model if spec is None else spec}: {note}", stacklevel=2)
    with open_weights(path) as weights:
        config = weights.config() or {}
        folder = path if path.is_dir() else path.parent
        where = _config_name(weights, folder)
        generation: dict[str, Any] = {}
        described = model_file
        if weights.format in ("safetensors", "pickle"):
            generation = read_object(folder / "generation_config.json", missing_ok=True) or {}
        elif _is_general(model if spec is None else spec):
            described = None  # the header wins
        if described and not config:
            config, where = described.config, f"{described.name}: [config]"
        config = _with_ids(config, generation)
        if described is None:
            described = _describe(path, config, where)
        divisors = _rope_divisors(described.family, weights)
        resolved = described.build(config, where, set(weights.names()), divisors)
    tokenizer = model_file.tokenizer if model_file else None
    if tokenizer is not None and not tokenizer.is_absolute():  # next to any weights, if there
        tokenizer = folder / tokenizer if (folder / tokenizer).is_file() else None
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
        If the model or its tokenizer does not exist, or the file is damaged.
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
    """Return the model file, or None, and the path of the weights."""
    if not str(model):
        raise UsageError("a model must be a name or a path, got ''")
    path = Path(model)
    if is_spec_path(path) and path.is_file():
        toml = path
    elif path.exists():
        return None, path
    else:
        name = model_name(str(model))
        if name is None and is_repo_name(str(model)):
            return None, _downloaded(str(model))
        if name is None and (path.suffix in SUFFIXES or len(path.parts) > 1):
            raise UsageError(f"{model}: no such file or folder")
        if name is None:
            raise UsageError(
                f"{unknown_model('model', str(model))}; or give the path of a folder or a weight "
                "file that exists"
            )
        toml = known_models()[name]
    named = load_model_file(toml)
    if named.path is None:
        return named, _of_hub(named, toml, str(model))
    if not named.path.exists():
        raise UsageError(f"{toml}: path does not exist: {named.path}")
    return named, named.path


def _is_general(spec: str | os.PathLike[str]) -> bool:
    """Return whether a specification is not for one file: of the package, or another program's."""
    path = Path(spec)
    if path.exists():
        return path.suffix in READERS
    return model_name(str(spec)) is not None


def _of_hub(named: ModelFile, toml: Path, model: str) -> Path:
    """Return the downloaded weights of a model file without a path."""
    otherwise = f"name the weights as the model, and {model} as --spec"
    if named.hub is None:
        raise UsageError(f"{toml}: has no path to weights; {otherwise}")
    path = find_cached(named.hub)
    if path is None:
        raise UsageError(
            f"the weights of {model} are {named.hub} on the Hub, which has not been downloaded: "
            f"'nbflow pull {model}' does it; or {otherwise}"
        )
    return path


def _downloaded(repo: str) -> Path:
    """Return a model in the cache of the Hub."""
    path = find_cached(repo)
    if path is None:
        raise UsageError(
            f"file or folder {repo!r} does not exist, and no model of the Hub with that name has "
            f"been downloaded; 'nbflow pull {repo}' downloads one"
        )
    return path


def _config_name(weights: WeightFile, folder: Path) -> str:
    """Return the source of the configuration, for messages."""
    is_separate = weights.format in ("safetensors", "pickle")
    return str(folder / "config.json" if is_separate else weights.path)


def _with_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration, overridden by the special ids of generation_config.json.

    Where that file exists, it alone states forced tokens, as in transformers.
    """
    keys = ("bos_token_id", "eos_token_id", "decoder_start_token_id")
    ids = {key: generation[key] for key in keys if generation.get(key) is not None}
    if generation:
        ids |= {key: generation.get(key) for key in ("forced_bos_token_id", "forced_eos_token_id")}
        ids["force_bos_token_to_be_generated"] = None
        if "bos_token_id" in ids:
            ids.setdefault("decoder_start_token_id", ids["bos_token_id"])
    return {**config, **ids}


def _describe(path: Path, config: Mapping[str, Any], where: str) -> ModelFile:
    """Return the family and name of a checkpoint without a model file."""
    if not config:
        refuse_adapter(Path(where).parent)
        raise UsageError(f"{where}: not found; the weights alone do not say what model they are")
    return ModelFile(_name(path), "", family_of_config(config, where))


def _rope_divisors(family: Family, weights: WeightFile) -> dict[str, list[float]]:
    """Return the divisors of the rotary frequencies stored as tensors."""
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
    """Return the name of a model without a model file."""
    path = Path(os.path.abspath(path))  # keep links of the Hub's cache
    repo = repo_of(path)
    if repo is not None and path.suffix != ".gguf":
        return repo.split("/")[1]
    if not path.is_dir() and path.name.startswith(("model.safetensors", "pytorch_model")):
        path = path.parent
    return path.name if path.is_dir() else path.stem


def _defaults(generation: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the known generation settings, checked."""
    return {
        key: check_field(generation[key], f"{where}: {key}", field)
        for key, field in GENERATION.items()
        if generation.get(key) is not None
    }
